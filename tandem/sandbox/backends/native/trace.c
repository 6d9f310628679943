/* Keeper side: system calls made by a stopped process of a box on our behalf. While it is held, the box's filter does
 * not apply to it (PTRACE_O_SUSPEND_SECCOMP, which only root of the host outside any filter may ask for), so there is
 * no opening in the filter that code of the box could find, and no secret that could reach its memory. All its signals
 * wait until it is let go. Nothing here waits longer than LIMIT_S. */
#include "box.h"
#include "trace.h"
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
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

/* The next stop of a traced process. Its end is not taken here: an agent is the keeper's child, and its end a box's. */
static bool next_stop(pid_t pid, int *status) {
    siginfo_t what = { 0 };
    if (waitid(P_PID, pid, &what, WSTOPPED | WEXITED | WNOWAIT | __WALL)) {
        if (errno == EINTR) errno = ETIMEDOUT;
        return false;
    }
    what = (siginfo_t){ 0 };
    errno = ESRCH;
    if (waitid(P_PID, pid, &what, WSTOPPED | WNOHANG | __WALL) || what.si_pid != pid) return false; /* it ended */
    *status = what.si_status << 8 | 0x7f; /* as waitpid has it */
    return true;
}

static bool read_registers(struct traced *task) {
#ifdef __x86_64__
    return !ptrace(PTRACE_GETREGS, task->pid, 0, &task->saved);
#else
    return task->pid > 0; /* nothing is made to call anything there: see below */
#endif
}

bool trace_born(struct traced *task, pid_t pid) {
    int status;
    *task = (struct traced){ .pid = pid };
    return next_stop(pid, &status) && read_registers(task);
}

/* Without options: what it makes before it stops is not traced. A signal that comes first stays with it. */
bool trace_stop(struct traced *task, pid_t pid) {
    int status;
    *task = (struct traced){ 0 };
    if (ptrace(PTRACE_SEIZE, pid, 0, 0)) return false;
    task->pid = pid;
    if (ptrace(PTRACE_INTERRUPT, pid, 0, 0) || !next_stop(pid, &status)) return false;
    if (status >> 16 != PTRACE_EVENT_STOP) task->pending = WSTOPSIG(status);
    return read_registers(task);
}

bool trace_arm(struct traced *task) {
    /* EXITKILL: whatever becomes of us, nothing half made ever runs. */
    long options = PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC |
                   PTRACE_O_EXITKILL | SUSPEND_SECCOMP;
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

/* Makes the calls of a list that rbx points to, each of eight words, until one has number -1. */
static const uint8_t caller[] = {
    0x48, 0x8b, 0x03,       /* again: mov rax, [rbx] */
    0x48, 0x83, 0xf8, 0xff, /* cmp rax, -1 */
    0x74, 0x24,             /* je end */
    0x48, 0x8b, 0x7b, 0x08, /* mov rdi, [rbx + 8] */
    0x48, 0x8b, 0x73, 0x10, /* mov rsi, [rbx + 16] */
    0x48, 0x8b, 0x53, 0x18, /* mov rdx, [rbx + 24] */
    0x4c, 0x8b, 0x53, 0x20, /* mov r10, [rbx + 32] */
    0x4c, 0x8b, 0x43, 0x28, /* mov r8, [rbx + 40] */
    0x4c, 0x8b, 0x4b, 0x30, /* mov r9, [rbx + 48] */
    0x0f, 0x05,             /* syscall */
    0x48, 0x89, 0x43, 0x38, /* mov [rbx + 56], rax */
    0x48, 0x83, 0xc3, 0x40, /* add rbx, 64 */
    0xeb, 0xd3,             /* jmp again */
    0xcc,                   /* end: int3 */
};
enum { PAGE = 4096, AT_CALLS = 256, MOST_CALLS = (PAGE - AT_CALLS) / sizeof(struct call) - 1 };

bool trace_room(struct traced *task) {
    long at = trace_call(task, __NR_mmap, 0, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (at < 0 && at > -PAGE) return !task->lost; /* some machines forbid such pages: then call by call */
    task->room = at;
    return trace_write(task, task->room, caller, sizeof caller);
}

void trace_unroom(struct traced *task) {
    if (task->room) trace_call(task, __NR_munmap, task->room, PAGE, 0, 0, 0);
    task->room = 0;
}

bool trace_calls(struct traced *task, struct call *calls, size_t count) {
    static const struct call last = { .number = -1 };
    if (!task->room || count > MOST_CALLS) {
        for (size_t i = 0; i < count && !task->lost; i++)
            calls[i].result = trace_call(task, calls[i].number, calls[i].a, calls[i].b, calls[i].c, calls[i].d, calls[i].e);
        return !task->lost;
    }
    struct user_regs_struct r = task->saved;
    uint64_t at = task->room + AT_CALLS;
    int status;
    r.rip = task->room;
    r.rbx = at;
    r.orig_rax = ~0ul;
    if (!trace_write(task, at, calls, count * sizeof *calls) ||
        !trace_write(task, at + count * sizeof *calls, &last, sizeof last) || ptrace(PTRACE_SETREGS, task->pid, 0, &r))
        return task->lost = true, false;
    for (;;) {
        if (ptrace(PTRACE_CONT, task->pid, 0, 0) || !next_stop(task->pid, &status)) return task->lost = true, false;
        if (status >> 16) continue;
        if (WSTOPSIG(status) == SIGTRAP) break;
        task->pending = WSTOPSIG(status);
        if (task->pending == SIGSEGV || task->pending == SIGBUS || task->pending == SIGILL) return task->lost = true, false;
    }
    return trace_read(task, at, calls, count * sizeof *calls);
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
bool trace_room(struct traced *task) { return (void)task, false; }
void trace_unroom(struct traced *task) { (void)task; }
bool trace_calls(struct traced *task, struct call *calls, size_t count) {
    return (void)task, (void)calls, (void)count, false;
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
