/* What stands between the agent and a command. Agent -> shim -> command: the shim is a child subreaper in front of the
 * command, so that all its descendants stay below the shim; it waits for the command only, and ends with its exit code.
 * The shim of a long-lived command with a deadline tells the code and stays while anything is below it: the deadline is
 * theirs. A spare is a shim that waits for its command: to make one takes longer than many a command. */
#include "box.h"
#include "shim.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_FDS = 1024, STATUS_FD = 3, SPARE_MESSAGE_MAX = 64 * 1024 };

static int status_fd = -1, score = -1, received[3] = { -1, -1, -1 };
static char own_score[16];
static size_t own_score_length;

/* Written by the child between vfork and exec, in the memory it shares with the shim. */
static volatile int failed_errno;
static const char *volatile failed_step;

static void give_up(const char *step) {
    failed_errno = errno;
    failed_step = step;
    _exit(126);
}

/* What the kernel ends first when memory is short. A file, because only who is dumpable may open it. */
static int open_score(void) {
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    return fd;
}

/* Own identity, no powers, no signal held back; their actions are the agent's, who has none. */
static void become_command(const struct plan *plan) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpriority(PRIO_PROCESS, 0, 0);
    if (plan->num_ids) {
        if (syscall(__NR_setgroups, plan->num_ids - 2, plan->ids + 2) ||
            syscall(__NR_setresgid, plan->ids[1], plan->ids[1], plan->ids[1]) ||
            syscall(__NR_setresuid, plan->ids[0], plan->ids[0], plan->ids[0]))
            give_up("become that user");
    } else if (plan->switch_user && (syscall(__NR_setresgid, plan->work_id, plan->work_id, plan->work_id) ||
                              syscall(__NR_setresuid, plan->work_id, plan->work_id, plan->work_id)))
        give_up("become the box's user");
}

static void run_program(const struct plan *plan) {
    if (chdir(plan->folder)) give_up(plan->folder);
    const char *path = "/usr/local/bin:/usr/bin:/bin";
    for (char *const *entry = plan->envp; *entry; entry++)
        if (!strncmp(*entry, "PATH=", 5)) path = *entry + 5;
    if (!strchr(plan->argv[0], '/')) setenv("PATH", path, 1); /* execvpe searches the caller's PATH */
    execvpe(plan->argv[0], plan->argv, plan->envp);
    give_up(plan->argv[0]);
}

static pid_t try_start(const struct plan *plan) {
    failed_errno = 0;
    failed_step = "start the command";
    pid_t child = vfork(); /* shares this process's memory until exec: nothing here is needed afterwards */
    if (child == 0) {
        setsid();
        if (plan->on_terminal && ioctl(0, TIOCSCTTY, 0)) give_up("take the terminal");
        become_command(plan);
        run_program(plan);
    }
    if (child < 0) failed_errno = errno;
    if (child > 0 && failed_errno) waitpid(child, NULL, 0);
    return failed_errno ? -1 : child;
}

/* The command shall be the first to go, and its shim among the last. */
static void prepare(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "box-shim");
    setsid();
    score = open_score();
    if (score < 0) return;
    ssize_t length = read(score, own_score, sizeof own_score);
    own_score_length = length < 0 ? 0 : length;
    if (pwrite(score, "500", 3, 0) < 0) own_score_length = 0;
}

static void tell(uint8_t kind, int32_t value) {
    struct shim_word word = { kind, value };
    if (status_fd >= 0 && write(status_fd, &word, sizeof word) < 0) _exit(125);
}

static void run(const struct plan *plan) {
    pid_t child;
    for (int tries = 0; (child = try_start(plan)) < 0 && failed_errno == EAGAIN && tries < 40; tries++) {
        kill(1, SIGUSR1); /* the box is full: the agent ends what was left in the background */
        usleep(5000);
    }
    if (child < 0) {
        if (plan->is_long) tell('E', failed_errno);
        char text[512];
        int length = snprintf(text, sizeof text, "box: %s: %s\n", failed_step, strerror(failed_errno));
        if (length >= (int)sizeof text) length = sizeof text - 1;
        if (write(2, text, length) < 0) _exit(125);
        _exit(failed_errno == ENOENT && failed_step == plan->argv[0] ? 127 : 126);
    }
    for (int fd = 0; fd < 3; fd++) close(fd);
    for (int i = 0; i < 3; i++)
        if (received[i] >= 0) close(received[i]);
    if (plan->is_long) tell('P', child);
    if (own_score_length && pwrite(score, own_score, own_score_length, 0) < 0) own_score_length = 0;
    for (int code = 125;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid == child) {
            code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            if (!plan->lingers) _exit(code); /* this tells it: who hears of the end finds no shim beside what he starts */
            tell('S', code);
        }
        if (pid < 0 && errno != EINTR) _exit(code);
    }
}

static void close_from(int first) {
    if (!syscall(__NR_close_range, first, ~0u, 0)) return;
    for (int fd = first; fd < MOST_FDS; fd++) close(fd); /* gVisor has no such call: all that an agent can have open */
}

static void work(const struct plan *plan) {
    if (plan->kind == FILE_EXEC) run(plan);
    become_command(plan);
    if (chdir(plan->folder)) _exit(errno);
    prctl(PR_SET_NAME, FILES_NAME);
    if (plan->is_long) tell('P', getpid());
    int result = file_operation(plan->kind, plan->argv[0], plan->max_bytes);
    if (result == ENOSYS) result = entry_operation(plan->kind, (char **)plan->argv);
    _exit(result == ENOSYS ? stream_operation(plan->kind, (char **)plan->argv) : result);
}

void shim_main(const struct plan *plan, int in, int out, int error, int status) {
    dup2(in, 0);
    dup2(out, 1);
    dup2(error, 2);
    if (status >= 0) { /* never below 4: the agent's socket is 3 */
        dup2(status, status_fd = STATUS_FD);
        fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC);
    }
    close_from(status >= 0 ? STATUS_FD + 1 : STATUS_FD);
    prepare();
    work(plan);
    _exit(125);
}

/* ---- spare ones */
static void wait_for_work(int fd, uint32_t work_id, bool switch_user) {
    static struct plan plan;
    static uint8_t message[SPARE_MESSAGE_MAX];
    dup2(fd, status_fd = STATUS_FD); /* never itself: the agent's socket is 3 */
    fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC);
    close_from(STATUS_FD + 1);
    prepare();
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof received)]; } extra;
    struct iovec part = { message, sizeof message };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    ssize_t length;
    while ((length = recvmsg(STATUS_FD, &head, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) continue;
    struct cmsghdr *rights = length > 0 ? CMSG_FIRSTHDR(&head) : NULL;
    if (!rights || rights->cmsg_type != SCM_RIGHTS) _exit(125);
    memcpy(received, CMSG_DATA(rights), rights->cmsg_len - CMSG_LEN(0));
    struct cursor c = { message, message + length, false };
    if (!plan_read(&plan, &c, work_id, switch_user)) _exit(125);
    for (int i = 0, next = 0; i < 3; i++) {
        if (i == 0 && !plan.has_input && !plan.on_terminal) continue; /* it has no stdin but nothing */
        dup2(received[next++], i);
    }
    work(&plan);
    _exit(125);
}

struct spare spare_make(uint32_t work_id, bool switch_user) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return (struct spare){ .fd = -1 };
    pid_t pid = fork();
    if (pid == 0) wait_for_work(ends[1], work_id, switch_user);
    close(ends[1]);
    if (pid > 0) return (struct spare){ pid, ends[0] };
    close(ends[0]);
    return (struct spare){ .fd = -1 };
}

bool spare_send(const struct spare *spare, struct cursor message, const int *streams) {
    union { struct cmsghdr head; char space[CMSG_SPACE(3 * sizeof(int))]; } extra = { .space = { 0 } };
    struct iovec part = { (void *)message.at, message.end - message.at };
    if (part.iov_len > SPARE_MESSAGE_MAX) return false;
    int count = 0, given[3];
    for (int i = 0; i < 3; i++)
        if (streams[i] >= 0) given[count++] = streams[i];
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra,
                           .msg_controllen = CMSG_SPACE(count * sizeof(int)) };
    extra.head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
                                   .cmsg_len = CMSG_LEN(count * sizeof(int)) };
    memcpy(CMSG_DATA(&extra.head), given, count * sizeof(int));
    return sendmsg(spare->fd, &head, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)part.iov_len;
}
