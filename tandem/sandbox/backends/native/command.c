/* The agent's side of one command: its streams, and the process that becomes its shim, a spare one or a new one. */
#include "box.h"
#include "shim.h"
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

static struct plan plan;
static struct spare spare = { .fd = -1 };

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

static void close_all(int (*pairs)[2], int count) {
    for (int i = 0; i < count; i++)
        for (int end = 0; end < 2; end++)
            if (pairs[i][end] >= 0) close(pairs[i][end]);
}

/* Pairs: stdin, stdout, stderr; [i][0] is read, [i][1] written. A terminal is stdin and stdout at once. */
static bool open_pairs(int (*pairs)[2], bool has_input, uint32_t columns, uint32_t rows) {
    if (!plan.on_terminal)
        return !pipe2(pairs[1], O_CLOEXEC) && !pipe2(pairs[2], O_CLOEXEC) && (!has_input || !pipe2(pairs[0], O_CLOEXEC));
    uint32_t owner = plan.switch_user ? plan.work_id : (uint32_t)geteuid();
    if (!terminal_open(&pairs[1][0], &pairs[1][1], owner, columns, rows)) return false;
    pairs[0][1] = fcntl(pairs[1][0], F_DUPFD_CLOEXEC, 4);
    pairs[0][0] = fcntl(pairs[1][1], F_DUPFD_CLOEXEC, 4);
    return pairs[0][0] >= 0 && pairs[0][1] >= 0;
}

bool plan_read(struct plan *plan, struct cursor *c, uint32_t work_id, bool switch_user) {
    plan->kind = get_u8(c);
    plan->timeout_ms = get_u32(c);
    plan->max_bytes = get_u64(c);
    plan->max_error_bytes = get_u64(c);
    plan->has_input = get_u8(c);
    uint8_t options = get_u8(c);
    plan->columns = get_u32(c);
    plan->rows = get_u32(c);
    plan->folder = get_str(c, NULL);
    plan->work_id = work_id;
    plan->switch_user = switch_user && !(options & AS_ROOT);
    plan->is_long = options & LONG_LIVED;
    plan->on_terminal = options & ON_TERMINAL;
    plan->lingers = plan->is_long && plan->timeout_ms;
    errno = E2BIG;
    if (!read_strings(c, plan->argv) || !read_strings(c, plan->envp) || !plan->argv[0]) return false;
    plan->num_ids = options & AS_OTHER ? get_u32(c) : 0;
    if (plan->num_ids > MOST_IDS || plan->num_ids == 1) return false;
    for (uint32_t i = 0; i < plan->num_ids; i++) plan->ids[i] = get_u32(c);
    if (c->bad) return false;
    errno = EPERM;
    return !(options & (AS_ROOT | AS_OTHER)) || switch_user; /* else there is one id only */
}

/* ``pairs``: the child's ends are taken from them, and ours stay. */
static pid_t start_anew(int (*pairs)[2], bool good) {
    pid_t pid = good ? fork() : -1;
    if (pid == 0)
        shim_main(&plan, pairs[0][0] >= 0 ? pairs[0][0] : 0, pairs[1][1], plan.on_terminal ? pairs[1][1] : pairs[2][1],
                  pairs[3][1]);
    return pid;
}

/* False: there is none that can take it; then nothing was lost. */
static bool start_spare(struct command *command, int (*pairs)[2], struct cursor message) {
    int streams[3] = { pairs[0][0], pairs[1][1], plan.on_terminal ? pairs[1][1] : pairs[2][1] };
    if (spare.fd < 0) return false;
    bool taken = spare_send(&spare, message, streams);
    if (taken) command->shim = spare.pid, command->status = spare.fd;
    else close(spare.fd); /* and it ends */
    spare = (struct spare){ .fd = -1 };
    return taken;
}

bool command_start(struct command *command, struct cursor c, uint32_t work_id, bool switch_user) {
    int pairs[4][2] = { { -1, -1 }, { -1, -1 }, { -1, -1 }, { -1, -1 } };
    struct cursor message = c;
    bool sound = plan_read(&plan, &c, work_id, switch_user);
    command->is_long = plan.is_long;
    if (!sound) return false;
    command->cap[0] = plan.max_bytes;
    command->cap[1] = plan.max_error_bytes;
    command->on_terminal = plan.on_terminal;
    bool good = open_pairs(pairs, plan.has_input, plan.columns, plan.rows);
    if (!good || !start_spare(command, pairs, message)) {
        good = good && (!plan.is_long || !pipe2(pairs[3], O_CLOEXEC));
        command->shim = start_anew(pairs, good);
        command->status = pairs[3][0];
    }
    if (command->shim < 0) {
        int error = errno;
        close_all(pairs, 4);
        command->shim = 0;
        command->status = -1;
        errno = error;
        return false;
    }
    for (int i = 0; i < 4; i++)
        if (pairs[i][i == 0 ? 0 : 1] >= 0) close(pairs[i][i == 0 ? 0 : 1]);
    command->is_shim = plan.kind == FILE_EXEC;
    command->input = pairs[0][1];
    for (int i = 0; i < 2; i++) command->pipe[i] = pairs[i + 1][0];
    int ours[] = { command->pipe[0], command->pipe[1], command->input, command->status };
    for (int i = 0; i < 4; i++)
        if (ours[i] >= 0) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    command->started_us = now_us();
    command->deadline_us = plan.timeout_ms ? command->started_us + (int64_t)plan.timeout_ms * 1000 : INT64_MAX;
    return true;
}

void command_prepare(uint32_t work_id, bool switch_user) {
    if (spare.fd < 0) spare = spare_make(work_id, switch_user);
}

bool command_lost(pid_t pid) {
    if (!spare.pid || pid != spare.pid) return false;
    close(spare.fd);
    spare = (struct spare){ .fd = -1 };
    return true;
}

pid_t command_spare(void) { return spare.pid; }

void command_close(struct command *command) {
    for (int i = 0; i < 2; i++)
        if (command->pipe[i] >= 0) close(command->pipe[i]);
    if (command->input >= 0) close(command->input);
    if (command->status >= 0) close(command->status);
    free(command->pending);
    memset(command, 0, sizeof *command);
}
