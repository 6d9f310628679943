/* Starts one command. Agent -> shim -> command: the shim is a child subreaper in front of the command, so that all
 * its descendants stay below the shim; it waits for the command only, and ends with its exit code. The shim of a
 * long-lived command with a deadline tells the code and stays while anything is below it: the deadline is theirs. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STRINGS = 4096, MOST_FDS = 1024 };

struct plan { /* what the child does; strings are in the message */
    int kind;
    uint64_t max_bytes;
    const char *folder;
    char *argv[MAX_STRINGS], *envp[MAX_STRINGS];
    uint32_t work_id;
    bool switch_user, is_long, on_terminal, lingers;
};
static struct plan plan;

int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static bool read_strings(struct cursor *c, char **into) {
    uint32_t count = get_u32(c);
    if (count >= MAX_STRINGS) return false;
    for (uint32_t i = 0; i < count; i++) into[i] = (char *)get_str(c, NULL);
    into[count] = NULL;
    return !c->bad;
}

/* Written by the child between vfork and exec, in the memory it shares with the shim. */
static volatile int failed_errno;
static const char *volatile failed_step;

static void give_up(const char *step) {
    failed_errno = errno;
    failed_step = step;
    _exit(126);
}

/* Own identity, no powers, default signals; then the program or the file operation. */
static void become_command(void) {
    struct sigaction plain = { .sa_handler = SIG_DFL };
    sigset_t none;
    sigemptyset(&none);
    for (int number = 1; number < 32; number++) sigaction(number, &plain, NULL);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* so that the next line may write its own file; exec sets it anyway */
    write_file("/proc/self/oom_score_adj", "500", 3);
    setpriority(PRIO_PROCESS, 0, 0);
    if (plan.switch_user && (syscall(__NR_setresgid, plan.work_id, plan.work_id, plan.work_id) ||
                             syscall(__NR_setresuid, plan.work_id, plan.work_id, plan.work_id)))
        give_up("become the box's user");
}

static void run_program(void) {
    if (chdir(plan.folder)) give_up(plan.folder);
    const char *path = "/usr/local/bin:/usr/bin:/bin";
    for (char **entry = plan.envp; *entry; entry++)
        if (!strncmp(*entry, "PATH=", 5)) path = *entry + 5;
    setenv("PATH", path, 1); /* execvpe searches the caller's PATH */
    execvpe(plan.argv[0], plan.argv, plan.envp);
    give_up(plan.argv[0]);
}

static pid_t try_start(void) {
    failed_errno = 0;
    failed_step = "start the command";
    pid_t child = vfork(); /* shares this process's memory until exec: nothing here is needed afterwards */
    if (child == 0) {
        setsid();
        if (plan.on_terminal && ioctl(0, TIOCSCTTY, 0)) give_up("take the terminal");
        become_command();
        run_program();
    }
    if (child < 0) failed_errno = errno;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* the child had to lift it, in our shared memory */
    if (child > 0 && failed_errno) waitpid(child, NULL, 0);
    return failed_errno ? -1 : child;
}

enum { STATUS_FD = 3 };

static void tell(uint8_t kind, int32_t value) {
    struct shim_word word = { kind, value };
    if (plan.is_long && write(STATUS_FD, &word, sizeof word) < 0) _exit(125);
}

static void shim(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "box-shim");
    setsid();
    pid_t child;
    for (int tries = 0; (child = try_start()) < 0 && failed_errno == EAGAIN && tries < 40; tries++) {
        kill(1, SIGUSR1); /* the box is full: the agent ends what was left in the background */
        usleep(5000);
    }
    if (child < 0) {
        tell('E', failed_errno);
        char text[512];
        int length = snprintf(text, sizeof text, "box: %s: %s\n", failed_step, strerror(failed_errno));
        if (length >= (int)sizeof text) length = sizeof text - 1;
        if (write(2, text, length) < 0) _exit(125);
        _exit(failed_errno == ENOENT && failed_step == plan.argv[0] ? 127 : 126);
    }
    for (int fd = 0; fd < 3; fd++) close(fd);
    tell('P', child);
    for (int code = 125;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid == child) {
            code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            tell('S', code);
            if (!plan.lingers) _exit(code);
        }
        if (pid < 0 && errno != EINTR) _exit(code);
    }
}

static void child_main(int in, int out, int error, int status) {
    dup2(in, 0);
    dup2(out, 1);
    dup2(error, 2);
    if (status >= 0) { /* never below 4: the agent's socket is 3 */
        dup2(status, STATUS_FD);
        fcntl(STATUS_FD, F_SETFD, FD_CLOEXEC);
    }
    int first = status >= 0 ? STATUS_FD + 1 : STATUS_FD;
    if (syscall(__NR_close_range, first, ~0u, 0)) /* gVisor has no such call: all that an agent can have open */
        for (int fd = first; fd < MOST_FDS; fd++) close(fd);
    if (plan.kind == FILE_EXEC) shim();
    become_command();
    if (chdir(plan.folder)) _exit(errno);
    int result = file_operation(plan.kind, plan.argv[0], plan.max_bytes);
    _exit(result == ENOSYS ? entry_operation(plan.kind, plan.argv) : result);
}

static void close_all(int (*pairs)[2], int count) {
    for (int i = 0; i < count; i++)
        for (int end = 0; end < 2; end++)
            if (pairs[i][end] >= 0) close(pairs[i][end]);
}

/* Pairs: stdin, stdout, stderr, status; [i][0] is read, [i][1] written. A terminal is stdin and stdout at once. */
static bool open_pairs(int (*pairs)[2], bool has_input, uint32_t columns, uint32_t rows) {
    if (plan.is_long && pipe2(pairs[3], O_CLOEXEC)) return false;
    if (!plan.on_terminal)
        return !pipe2(pairs[1], O_CLOEXEC) && !pipe2(pairs[2], O_CLOEXEC) && (!has_input || !pipe2(pairs[0], O_CLOEXEC));
    uint32_t owner = plan.switch_user ? plan.work_id : (uint32_t)geteuid();
    if (!terminal_open(&pairs[1][0], &pairs[1][1], owner, columns, rows)) return false;
    pairs[0][1] = fcntl(pairs[1][0], F_DUPFD_CLOEXEC, 4);
    pairs[0][0] = fcntl(pairs[1][1], F_DUPFD_CLOEXEC, 4);
    return pairs[0][0] >= 0 && pairs[0][1] >= 0;
}

bool command_start(struct command *command, struct cursor c, uint32_t work_id, bool switch_user) {
    int pairs[4][2] = { { -1, -1 }, { -1, -1 }, { -1, -1 }, { -1, -1 } };
    plan.kind = get_u8(&c);
    uint32_t timeout_ms = get_u32(&c); /* 0: none */
    command->cap[0] = plan.max_bytes = get_u64(&c);
    command->cap[1] = get_u64(&c);
    bool has_input = get_u8(&c);
    uint8_t options = get_u8(&c);
    uint32_t columns = get_u32(&c), rows = get_u32(&c);
    plan.folder = get_str(&c, NULL);
    plan.work_id = work_id;
    plan.switch_user = switch_user && !(options & AS_ROOT);
    command->is_long = plan.is_long = options & LONG_LIVED;
    command->on_terminal = plan.on_terminal = options & ON_TERMINAL;
    plan.lingers = plan.is_long && timeout_ms;
    errno = E2BIG;
    if (!read_strings(&c, plan.argv) || !read_strings(&c, plan.envp) || !plan.argv[0]) return false;
    errno = EPERM;
    if ((options & AS_ROOT) && !switch_user) return false; /* there is one id only */

    bool good = open_pairs(pairs, has_input, columns, rows);
    pid_t pid = good ? fork() : -1;
    if (pid == 0)
        child_main(pairs[0][0] >= 0 ? pairs[0][0] : 0, pairs[1][1], plan.on_terminal ? pairs[1][1] : pairs[2][1],
                   pairs[3][1]);
    if (pid < 0) {
        int error = errno;
        close_all(pairs, 4);
        errno = error;
        return false;
    }
    for (int i = 0; i < 4; i++)
        if (pairs[i][i == 0 ? 0 : 1] >= 0) close(pairs[i][i == 0 ? 0 : 1]);
    command->shim = pid;
    command->is_shim = plan.kind == FILE_EXEC;
    command->input = pairs[0][1];
    command->status = pairs[3][0];
    for (int i = 0; i < 2; i++) command->pipe[i] = pairs[i + 1][0];
    int ours[] = { command->pipe[0], command->pipe[1], command->input, command->status };
    for (int i = 0; i < 4; i++)
        if (ours[i] >= 0) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    command->started_us = now_us();
    command->deadline_us = timeout_ms ? command->started_us + (int64_t)timeout_ms * 1000 : INT64_MAX;
    return true;
}

void command_close(struct command *command) {
    for (int i = 0; i < 2; i++)
        if (command->pipe[i] >= 0) close(command->pipe[i]);
    if (command->input >= 0) close(command->input);
    if (command->status >= 0) close(command->status);
    free(command->pending);
    memset(command, 0, sizeof *command);
}
