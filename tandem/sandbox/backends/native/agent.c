/* Pid 1 of the box: reaps, starts commands, carries their output with hard caps, keeps their deadlines, and ends
 * (and with it everything in the box) when its socket closes. It never blocks on anything but poll. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_COMMANDS = 128, OUT_SIZE = 512 * 1024, CHUNK = 64 * 1024, OUT_RESERVE = 64 * 1024, WATCH_MS = 25,
       MAX_RIGHTS = 64 };

static struct command commands[MAX_COMMANDS];
static uint8_t in[FRAME_MAX + FRAME_HEAD], out[OUT_SIZE], chunk[CHUNK];
static size_t in_length, out_start, out_length;
static int sock, rights[MAX_RIGHTS]; /* sockets for the supervisor: they go out before the frames that name them */
static size_t num_rights;
static bool has_worked;

static size_t out_free(void) { return OUT_SIZE - out_length; }

static ssize_t send_out(void) {
    if (!num_rights) return send(sock, out + out_start, out_length, MSG_NOSIGNAL | MSG_DONTWAIT);
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { 0 };
    struct iovec part = { out + out_start, num_rights > 1 ? 1 : out_length };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    extra.head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
    memcpy(CMSG_DATA(&extra.head), &rights[0], sizeof(int));
    ssize_t done = sendmsg(sock, &head, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done > 0) {
        close(rights[0]);
        memmove(rights, rights + 1, --num_rights * sizeof *rights);
    }
    return done;
}

static void flush(void) {
    while (out_length) {
        ssize_t done = send_out();
        if (done < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return;
            _exit(0); /* the supervisor is gone */
        }
        out_start += done;
        out_length -= done;
    }
    out_start = 0;
}

/* Callers see to it that there is room: output stops at OUT_RESERVE, which is kept for the small frames. */
static void emit(uint8_t type, uint32_t id, const void *data, size_t length) {
    if (out_start + out_length + FRAME_HEAD + length > OUT_SIZE) {
        memmove(out, out + out_start, out_length);
        out_start = 0;
    }
    if (FRAME_HEAD + length > out_free()) _exit(1); /* the supervisor has not read for thousands of frames */
    uint8_t *at = out + out_start + out_length;
    put_u32(at, 5 + length);
    at[4] = type;
    put_u32(at + 5, id);
    memcpy(at + FRAME_HEAD, data, length);
    out_length += FRAME_HEAD + length;
}

static void report(struct command *command) {
    uint8_t data[32];
    bool no_code = command->flags & (TIMED_OUT | KILLED);
    put_u32(data, no_code ? (uint32_t)-1 : (uint32_t)command->code);
    put_u32(data + 4, command->flags);
    put_u64(data + 8, command->dropped[0]);
    put_u64(data + 16, command->dropped[1]);
    put_u64(data + 24, now_us() - command->started_us);
    emit(EXIT, command->id, data, sizeof data);
    command->reported = true;
}

static struct command *find(uint32_t id) {
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].reported && commands[i].id == id) return &commands[i];
    return NULL;
}

static void kill_command(struct command *command, int flag) {
    if (command->gone) return;
    command->flags |= flag;
    command->deadline_us = INT64_MAX;
    tree_kill(command->shim);
    kill(command->shim, SIGKILL);
}

static bool is_shim(pid_t pid) {
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].exited && commands[i].shim == pid) return true;
    return false;
}

/* Ends everything that belongs to no running command. */
static void kill_strays(void) {
    pid_t shims[MAX_COMMANDS + 1];
    size_t count = 0;
    if (command_spare()) shims[count++] = command_spare();
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].exited) shims[count++] = commands[i].shim;
    tree_kill_strays(shims, count);
}

/* The command has ended: what its pipes hold now is the last that counts. */
static void note_exit(struct command *command, int code) {
    if (command->exited) return;
    command->exited = true;
    command->code = code;
    for (int stream = 0; stream < 2; stream++) {
        int held = 0;
        if (command->pipe[stream] >= 0) ioctl(command->pipe[stream], FIONREAD, &held);
        command->rest[stream] = held;
    }
}

/* What shims say; before their ends are noticed, for a word outlives its shim. */
static void hear(struct command *command) {
    struct shim_word word;
    while (command->status >= 0 && read(command->status, &word, sizeof word) == sizeof word) {
        uint8_t pid[4];
        if (word.kind == 'S') note_exit(command, word.value);
        if (word.kind == 'E') {
            command->flags |= NOT_STARTED;
            note_exit(command, word.value);
        }
        if (word.kind != 'P') continue;
        command->main = word.value;
        put_u32(pid, word.value);
        emit(STARTED, command->id, pid, sizeof pid);
    }
}

static void reap(void) {
    int status;
    pid_t pid;
    bool strays = false;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < MAX_COMMANDS && !command_lost(pid); i++) {
            struct command *command = &commands[i];
            if (!command->used || command->gone || command->shim != pid) continue;
            hear(command);
            note_exit(command, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
            command->gone = true;
            /* A shim that dies by a signal nobody here sent was killed by its command: what it held is loose. */
            strays = strays || (command->is_shim && WIFSIGNALED(status) && !(command->flags & (TIMED_OUT | KILLED)));
        }
    if (strays) kill_strays();
}

/* ---- messages from the supervisor */
static void on_run(uint32_t id, struct cursor c, uint32_t work_id, bool switch_user) {
    struct command *command = NULL;
    for (int i = 0; i < MAX_COMMANDS && !command; i++)
        if (!commands[i].used) command = &commands[i];
    struct command none = { 0 };
    has_worked = true;
    if (!command) command = &none;
    *command = (struct command){ .used = true, .id = id, .pipe = { -1, -1 }, .input = -1, .status = -1,
                                 .started_us = now_us() };
    int error = EAGAIN;
    for (int tries = 0; command != &none && error == EAGAIN && tries < 25; tries++) {
        if (command_start(command, c, work_id, switch_user)) return;
        if ((error = errno) != EAGAIN) break;
        kill_strays(); /* the box is full of what was left in the background */
        usleep(2000);
        reap();
    }
    const char *reason = strerror(error);
    if (!command->is_long) emit(STDERR, id, reason, strlen(reason));
    command->code = command->is_long ? error : 126;
    command->flags = NOT_STARTED;
    report(command);
    command_close(command);
}

static void feed(struct command *command) {
    uint32_t before = command->pending_length;
    while (command->input >= 0 && command->pending_length) {
        ssize_t done = write(command->input, command->pending + command->pending_start, command->pending_length);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EAGAIN) break;
        if (done < 0) { /* the reader closed it: the rest goes nowhere, as in a shell's pipe */
            close(command->input);
            command->input = -1;
            done = command->pending_length;
        }
        command->pending_start += done;
        command->pending_length -= done;
    }
    if (command->input < 0) command->pending_length = 0;
    if (!command->pending_length) command->pending_start = 0;
    if (before > command->pending_length) {
        uint8_t data[4];
        put_u32(data, before - command->pending_length);
        if (!command->reported) emit(STDIN_ACK, command->id, data, sizeof data);
    }
    if (command->input >= 0 && command->input_ends && !command->pending_length) {
        close(command->input);
        command->input = -1;
    }
}

static void on_stdin(struct command *command, const uint8_t *data, size_t length) {
    if (!command) return;
    if (length == 0) command->input_ends = true;
    if (length && !command->pending) command->pending = malloc(STDIN_WINDOW);
    if (length + command->pending_length > STDIN_WINDOW || (length && !command->pending)) {
        kill_command(command, KILLED); /* the supervisor broke the window */
        return;
    }
    if (length) {
        memmove(command->pending, command->pending + command->pending_start, command->pending_length);
        command->pending_start = 0;
        memcpy(command->pending + command->pending_length, data, length);
        command->pending_length += length;
    }
    feed(command);
}

/* The box was paused for so long: deadlines move, because they are in its running time. */
static void slept(const uint8_t *data) {
    struct cursor c = { data, data + 8, false };
    int64_t length_us = (int64_t)get_u64(&c);
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].gone) {
            if (commands[i].deadline_us != INT64_MAX) commands[i].deadline_us += length_us;
            commands[i].started_us += length_us;
        }
}

static bool receive(void) {
    ssize_t length = recv(sock, in + in_length, sizeof in - in_length, MSG_DONTWAIT);
    if (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR)) _exit(0);
    if (length > 0) in_length += length;
    return length > 0;
}

/* To the group that the command leads; SIGKILL to all below its shim, whatever group they made for themselves. */
static void on_signal(struct command *command, int number) {
    if (!command || !command->main || command->exited) return;
    if (number == SIGKILL) tree_kill(command->shim);
    if (number != SIGKILL) kill(-command->main, number);
    else if (command->main == command->shim) kill(command->main, number); /* a carried command has no shim */
}

static void on_port(uint32_t id, struct cursor c, bool listens) {
    uint32_t port = get_u32(&c), sort = get_u32(&c); /* IPv6, or datagrams */
    uint8_t data[4];
    int fd = -1;
    errno = EAGAIN;
    if (num_rights < MAX_RIGHTS) fd = listens ? port_listen(port, sort) : port_connect(port, sort);
    put_u32(data, fd < 0 ? errno : 0);
    if (fd >= 0) rights[num_rights++] = fd;
    emit(SOCKET, id, data, sizeof data);
}

/* A checkpoint is taken between this word and the next: nothing of a frame may be on its way in either direction, for
 * whoever speaks with the copy has read none of it. */
static void be_quiet(uint32_t id) {
    emit(QUIET, id, "", 0);
    struct pollfd end = { sock, POLLOUT, 0 };
    while (out_length) {
        flush();
        if (out_length) poll(&end, 1, -1);
    }
    end.events = POLLIN;
    while (poll(&end, 1, -1) < 1) continue;
}

static void on_frames(uint32_t work_id, bool switch_user) {
    size_t at = 0;
    while (in_length - at >= 4) {
        uint32_t length;
        memcpy(&length, in + at, 4);
        if (length < 5 || length > FRAME_MAX) _exit(1);
        if (in_length - at < 4 + (size_t)length) break;
        uint8_t type = in[at + 4];
        uint32_t id;
        memcpy(&id, in + at + 5, 4);
        uint8_t *data = in + at + FRAME_HEAD;
        size_t size = length - 5;
        if (type == RUN) on_run(id, (struct cursor){ data, data + size, false }, work_id, switch_user);
        else if (type == STDIN) on_stdin(find(id), data, size);
        else if (type == KILL && find(id)) kill_command(find(id), KILLED);
        else if (type == SLEPT && size == 8) slept(data);
        else if (type == QUIET) be_quiet(id);
        struct cursor c = { data, data + size, false };
        if (type == SIGNAL) on_signal(find(id), get_u32(&c));
        else if (type == CONNECT || type == LISTEN) on_port(id, c, type == LISTEN);
        else if (type == RESIZE && find(id) && find(id)->on_terminal) {
            uint32_t columns = get_u32(&c), rows = get_u32(&c);
            terminal_resize(find(id)->pipe[0], columns, rows);
        }
        at += 4 + length;
    }
    memmove(in, in + at, in_length - at);
    in_length -= at;
}

/* ---- output and exits
 * Reads at most ``budget`` from one pipe while there is room; past the cap it reads and drops. The budget is used
 * up, too, when there is nothing more to read now. */
static void pump(struct command *command, int stream, size_t *budget) {
    if (command->pipe[stream] < 0) *budget = 0;
    while (*budget) {
        if (out_free() < OUT_RESERVE + FRAME_HEAD + CHUNK) return;
        ssize_t length = read(command->pipe[stream], chunk, *budget < CHUNK ? *budget : CHUNK);
        if (length < 0 && errno == EINTR) continue;
        if (length <= 0) {
            if (length == 0 || errno != EAGAIN) {
                close(command->pipe[stream]);
                command->pipe[stream] = -1;
            }
            *budget = 0;
            return;
        }
        *budget -= length;
        uint64_t room = command->cap[stream] - command->sent[stream];
        size_t keep = command->reported ? 0 : (uint64_t)length < room ? (size_t)length : room;
        if (keep) emit(stream ? STDERR : STDOUT, command->id, chunk, keep);
        command->sent[stream] += keep;
        command->dropped[stream] += length - keep;
    }
}

static void drain(struct command *command, int stream) {
    size_t budget = (size_t)1 << 20; /* then the others' turn */
    pump(command, stream, &budget);
}

/* An ended command is reported once what its pipes held at its end is read. Survivors may hold the pipes for as
 * long as they like: what they write is read into nothing. */
static void finish(void) {
    for (int i = 0; i < MAX_COMMANDS; i++) {
        struct command *command = &commands[i];
        if (!command->used || !command->exited) continue;
        if (command->input >= 0) {
            close(command->input);
            command->input = -1;
            command->pending_length = 0;
        }
        if (!command->reported) {
            for (int stream = 0; stream < 2; stream++) pump(command, stream, &command->rest[stream]);
            if (!command->rest[0] && !command->rest[1]) report(command);
        }
        for (int stream = 0; stream < 2; stream++) /* the last holder may have ended */
            if (command->reported && command->pipe[stream] >= 0) drain(command, stream);
        if (command->gone && command->reported && command->pipe[0] < 0 && command->pipe[1] < 0) command_close(command);
    }
}

/* Where there is no memory cgroup: the largest process ends when all of them together pass the limit. */
static void watch_memory(uint64_t limit) {
    static struct process all[MAX_PROCESSES];
    static int64_t next_us;
    if (now_us() < next_us) return;
    next_us = now_us() + WATCH_MS * 1000;
    size_t count = tree_scan(all, true), largest = 0;
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += all[i].anonymous_bytes;
        if (all[i].anonymous_bytes > all[largest].anonymous_bytes) largest = i;
    }
    if (total <= limit || !count) return;
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].exited && tree_within(all, count, all[largest].pid, commands[i].shim))
            commands[i].flags |= OUT_OF_MEMORY;
    kill(all[largest].pid, SIGKILL);
}

static bool overdue(const struct command *command, int64_t now) {
    return command->used && !command->gone && command->deadline_us <= now;
}

/* Kept in two steps, because a pause may come and go between any two instructions here: what the supervisor says of a
 * pause is in the socket before the box goes on, so whatever is late by ``now`` is judged after the socket was read. */
static void keep_deadlines(uint32_t work_id, bool switch_user) {
    int64_t now = now_us();
    bool late = false;
    for (int i = 0; i < MAX_COMMANDS; i++) late = late || overdue(&commands[i], now);
    if (!late) return;
    if (receive()) on_frames(work_id, switch_user);
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (overdue(&commands[i], now)) kill_command(&commands[i], TIMED_OUT);
}

/* Time for the next command's shim; a box that never had a command needs none. A live fork copies a process that has
 * nothing beside it, so beside one that runs there is no spare. */
static bool idle_again(void) {
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].exited) return false;
    return has_worked;
}

static int64_t next_deadline(void) {
    int64_t next = INT64_MAX;
    for (int i = 0; i < MAX_COMMANDS; i++)
        if (commands[i].used && !commands[i].gone && commands[i].deadline_us < next) next = commands[i].deadline_us;
    return next;
}

static int wait_ms(uint64_t watch_bytes) {
    bool busy = false, draining = false;
    for (int i = 0; i < MAX_COMMANDS; i++) {
        busy = busy || (commands[i].used && !commands[i].exited);
        draining = draining || (commands[i].used && commands[i].exited && !commands[i].reported);
    }
    int64_t next = next_deadline();
    if (draining) return 1;
    int64_t left = next == INT64_MAX ? 0 : next - now_us();
    int64_t wait = next == INT64_MAX ? -1 : left <= 0 ? 0 : left / 1000 + 1;
    if (wait > 1 << 30) wait = 1 << 30;
    return watch_bytes && busy && (wait < 0 || wait > WATCH_MS) ? WATCH_MS : (int)wait;
}

static size_t gather(struct pollfd *sources, struct command **owners) {
    size_t count = 2;
    bool room = out_free() >= OUT_RESERVE + FRAME_HEAD + CHUNK;
    for (int i = 0; i < MAX_COMMANDS; i++) {
        struct command *command = &commands[i];
        if (!command->used) continue;
        for (int stream = 0; stream < 2; stream++)
            if (command->pipe[stream] >= 0 && room) {
                owners[count] = command;
                sources[count++] = (struct pollfd){ command->pipe[stream], POLLIN, 0 };
            }
        if (command->status >= 0 && !command->exited) {
            owners[count] = command;
            sources[count++] = (struct pollfd){ command->status, POLLIN, 0 };
        }
        if (command->input >= 0 && command->pending_length) {
            owners[count] = command;
            sources[count++] = (struct pollfd){ command->input, POLLOUT, 0 };
        }
    }
    return count;
}

static void serve(struct pollfd *source, struct command *command) {
    if (!command->used || !source->revents) return;
    if (source->fd == command->input) feed(command);
    if (source->fd == command->status) hear(command);
    for (int stream = 0; stream < 2; stream++)
        if (source->fd == command->pipe[stream] && !(command->exited && !command->reported)) drain(command, stream);
}

/* A command that was here before its agent: our first child. */
static void take(const struct carried *carried) {
    struct command *command = &commands[0];
    uint8_t pid[4];
    *command = (struct command){
        .used = true, .id = carried->id, .on_terminal = carried->on_terminal,
        .shim = carried->pid, .main = carried->pid, .is_long = true, .status = -1,
        .input = carried->pipes[0], .pipe = { carried->pipes[1], carried->pipes[2] }, .cap = { UINT64_MAX, UINT64_MAX },
        .started_us = now_us(), .deadline_us = INT64_MAX,
    };
    if (carried->timeout_ms) command->deadline_us = command->started_us + carried->timeout_ms * 1000ll;
    put_u32(pid, command->main);
    emit(STARTED, command->id, pid, sizeof pid);
}

void agent_main(int fd, uint32_t work_id, bool switch_user, uint64_t watch_bytes, const struct carried *carried) {
    static struct pollfd sources[2 + 4 * MAX_COMMANDS];
    static struct command *owners[2 + 4 * MAX_COMMANDS];
    sigset_t mask;
    sigfillset(&mask);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    struct sigaction plain = { .sa_handler = SIG_DFL }; /* commands find them so, too: nobody changes them after this */
    for (int number = 1; number < 32; number++) sigaction(number, &plain, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGUSR1); /* from a shim that found the box full */
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    sock = fd;
    uint8_t hello[4];
    put_u32(hello, PROTOCOL);
    emit(HELLO, 0, hello, sizeof hello);
    if (carried) take(carried);
    for (;;) {
        keep_deadlines(work_id, switch_user);
        flush();
        size_t count = gather(sources, owners);
        sources[0] = (struct pollfd){ sock, POLLIN | (out_length ? POLLOUT : 0), 0 };
        sources[1] = (struct pollfd){ signals, POLLIN, 0 };
        if (idle_again()) command_prepare(work_id, switch_user);
        poll(sources, count, wait_ms(watch_bytes));
        if (sources[0].revents & (POLLIN | POLLHUP | POLLERR)) {
            receive();
            on_frames(work_id, switch_user);
        }
        for (size_t i = 2; i < count; i++) serve(&sources[i], owners[i]);
        struct signalfd_siginfo info;
        bool full = false;
        while (read(signals, &info, sizeof info) > 0) full = full || (info.ssi_signo == SIGUSR1 && is_shim(info.ssi_pid));
        if (full) kill_strays();
        reap();
        finish();
        if (watch_bytes) watch_memory(watch_bytes);
    }
}
