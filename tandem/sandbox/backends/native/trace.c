/* Keeper side: system calls made by a stopped process of a box on our behalf. While it is held, the box's filter does
 * not apply to it (PTRACE_O_SUSPEND_SECCOMP, which only root of the host outside any filter may ask for), so there is
 * no opening in the filter that code of the box could find, and no secret that could reach its memory. All its signals
 * wait until it is let go. Nothing here waits longer than LIMIT_S. */
#include "box.h"
#include "trace.h"
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIMIT_S = 5, SUSPEND_SECCOMP = 1 << 21 };

static void on_alarm(int number) { (void)number; }

static void alarm_after(int seconds) {
    struct itimerval timer = { .it_interval = { seconds ? 1 : 0, 0 }, .it_value = { seconds, 0 } };
    sigset_t mask;
    setitimer(ITIMER_REAL, &timer, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGALRM);
    sigprocmask(seconds ? SIG_UNBLOCK : SIG_BLOCK, &mask, NULL);
}

void trace_begin(void) {
    struct sigaction action = { .sa_handler = on_alarm }; /* no SA_RESTART: a wait that is too long ends */
    sigaction(SIGALRM, &action, NULL);
    alarm_after(LIMIT_S);
}

void trace_end(void) { alarm_after(0); }

/* The next stop of a traced process. */
static bool next_stop(pid_t pid, int *status) {
    pid_t found = waitpid(pid, status, __WALL);
    if (found != pid) {
        if (errno == EINTR) errno = ETIMEDOUT;
        return false;
    }
    errno = ESRCH;
    return WIFSTOPPED(*status);
}

bool trace_born(struct traced *task, pid_t pid) {
    int status;
    *task = (struct traced){ .pid = pid };
    return next_stop(pid, &status) && !ptrace(PTRACE_GETREGS, pid, 0, &task->saved);
}

/* Without options: what it makes before it stops is not traced. A signal that comes first stays with it. */
bool trace_stop(struct traced *task, pid_t pid) {
    int status;
    *task = (struct traced){ 0 };
    if (ptrace(PTRACE_SEIZE, pid, 0, 0)) return false;
    task->pid = pid;
    if (ptrace(PTRACE_INTERRUPT, pid, 0, 0) || !next_stop(pid, &status)) return false;
    if (status >> 16 != PTRACE_EVENT_STOP) task->pending = WSTOPSIG(status);
    return !ptrace(PTRACE_GETREGS, pid, 0, &task->saved);
}

bool trace_arm(struct traced *task) {
    long options = PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC | SUSPEND_SECCOMP;
    uint64_t all = ~(1ull << (SIGTRAP - 1)); /* the step itself ends with SIGTRAP */
    return !ptrace(PTRACE_SETOPTIONS, task->pid, 0, options) &&
           !ptrace(PTRACE_GETSIGMASK, task->pid, sizeof task->mask, &task->mask) &&
           !ptrace(PTRACE_SETSIGMASK, task->pid, sizeof all, &all);
}

#ifdef __x86_64__
enum { SYSCALL_INSTRUCTION = 0x050f, RESTART_SYSCALL = __NR_restart_syscall };

bool trace_waits_for_input(struct traced *task) {
    const struct user_regs_struct *r = &task->saved;
    long result = (long)r->rax, call = (long)r->orig_rax;
    bool cut_short = result == -512 || result == -513 || result == -514 || result == -516; /* to be restarted */
    bool reads = call == __NR_read && r->rdi == 0;
    bool looks = call == __NR_poll || call == __NR_ppoll || call == __NR_select || call == __NR_pselect6 ||
                 call == __NR_epoll_wait || call == __NR_epoll_pwait;
    if (r->cs != 0x33 || !cut_short || (!reads && !looks)) return false;
    errno = 0;
    long word = ptrace(PTRACE_PEEKTEXT, task->pid, r->rip - 2, 0);
    task->site = r->rip - 2;
    return !errno && (word & 0xffff) == SYSCALL_INSTRUCTION;
}

/* Where a process goes on: it makes the call again that the stop cut short. */
static struct user_regs_struct continued(const struct user_regs_struct *saved, bool copied) {
    struct user_regs_struct r = *saved;
    long result = (long)r.rax;
    r.rip -= 2;
    r.rax = result == -516 ? (unsigned long)RESTART_SYSCALL : r.orig_rax;
    if (result == -516 && copied) { /* the copy does not know how much of the time was left */
        r.rip = saved->rip;
        r.rax = (unsigned long)-EINTR;
    }
    r.orig_rax = ~0ul;
    return r;
}

long trace_call(struct traced *task, long number, long a, long b, long c, long d, long e) {
    struct user_regs_struct r = task->saved;
    int status;
    r.rip = task->site;
    r.rax = number;
    r.orig_rax = ~0ul;
    r.rdi = a, r.rsi = b, r.rdx = c, r.r10 = d, r.r8 = e, r.r9 = 0;
    if (ptrace(PTRACE_SETREGS, task->pid, 0, &r)) goto lost;
    for (;;) {
        if (ptrace(PTRACE_SINGLESTEP, task->pid, 0, 0) || !next_stop(task->pid, &status)) goto lost;
        int event = status >> 16;
        if (event == PTRACE_EVENT_CLONE || event == PTRACE_EVENT_FORK || event == PTRACE_EVENT_VFORK) {
            unsigned long born = 0;
            ptrace(PTRACE_GETEVENTMSG, task->pid, 0, &born);
            task->born = born;
        } else if (event == PTRACE_EVENT_EXEC) {
            return 0;
        } else if (!event && WSTOPSIG(status) == SIGTRAP) {
            break;
        } else if (!event) {
            task->pending = WSTOPSIG(status);
        }
    }
    if (ptrace(PTRACE_GETREGS, task->pid, 0, &r)) goto lost;
    return (long)r.rax;
lost:
    task->lost = true;
    return errno ? -errno : -ESRCH;
}

bool trace_go_on(struct traced *task, bool copied) {
    struct user_regs_struct r = continued(&task->saved, copied);
    return !ptrace(PTRACE_SETREGS, task->pid, 0, &r) &&
           !ptrace(PTRACE_SETSIGMASK, task->pid, sizeof task->mask, &task->mask) && trace_leave(task);
}

uint64_t trace_stack(const struct traced *task) { return task->saved.rsp; }
#else
bool trace_waits_for_input(struct traced *task) { return (void)task, false; }
long trace_call(struct traced *task, long number, long a, long b, long c, long d, long e) {
    return (void)task, (void)number, (void)a, (void)b, (void)c, (void)d, (void)e, -ENOSYS;
}
bool trace_go_on(struct traced *task, bool copied) { return (void)copied, trace_leave(task); }
uint64_t trace_stack(const struct traced *task) { return (void)task, 0; }
#endif

bool trace_leave(struct traced *task) {
    pid_t pid = task->pid;
    int signal_waiting = task->pending;
    task->pid = 0;
    return pid && !ptrace(PTRACE_DETACH, pid, 0, (long)signal_waiting);
}

bool trace_write(const struct traced *task, uint64_t at, const void *data, size_t length) {
    struct iovec here = { (void *)data, length }, there = { (void *)(uintptr_t)at, length };
    return process_vm_writev(task->pid, &here, 1, &there, 1, 0) == (ssize_t)length;
}

bool trace_read(const struct traced *task, uint64_t at, void *data, size_t length) {
    struct iovec here = { data, length }, there = { (void *)(uintptr_t)at, length };
    return process_vm_readv(task->pid, &here, 1, &there, 1, 0) == (ssize_t)length;
}
