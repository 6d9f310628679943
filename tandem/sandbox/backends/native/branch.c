/* Keeper side: a copy of a held process in a box of its own. The process makes a child in new namespaces (A), A makes
 * one that shares its memory (C), then A becomes the agent of the new box and C alone keeps the memory, copied on
 * write from the first. C is A's child, so all that an agent does for its commands works for it. What is mounted is
 * done from outside (graft.c). Before C runs it has lost every power that a new user namespace gave it. */
#include "box.h"
#include "hold.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __x86_64__
/* Where what is in the scratch; one thing at a time at AT_ADDRESS. */
enum { AT_PIPES = 0, AT_POWERS = 64, AT_ADDRESS = 128, AT_ARGUMENTS = 256, AT_FOLDER = 512, HELPER_MS = 10000 };
enum { NEW_SPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS };

static char text[512];
static struct traced first, copy; /* A and C */

static const char *failed(const char *step, long result) {
    snprintf(text, sizeof text, "live fork: %s: %s", step, strerror(result < 0 ? (int)-result : errno));
    return text;
}

/* Processes count against a user of the user namespaces above, too: without this a copy's would be its parent's. The
 * control group counts them in any case. */
static void lift_limit(const struct hold *hold, const struct box_spec *spec) {
    pid_t pids[] = { hold->agent.pid, hold->between, hold->target };
    struct rlimit limit;
    bool owner = root_become(spec); /* a container's root often lacks this one power over others */
    for (int i = 0; owner && i < 3; i++) {
        if (!pids[i] || prlimit(pids[i], RLIMIT_NPROC, NULL, &limit)) continue;
        limit.rlim_cur = limit.rlim_max;
        prlimit(pids[i], RLIMIT_NPROC, &limit, NULL);
    }
    root_return();
}

static void set_limit(const struct box_spec *spec, pid_t pid) {
    struct rlimit limit;
    if (root_become(spec) && !prlimit(pid, RLIMIT_NPROC, NULL, &limit)) {
        limit.rlim_cur = spec->num_processes < limit.rlim_max ? spec->num_processes : limit.rlim_max;
        prlimit(pid, RLIMIT_NPROC, &limit, NULL);
    }
    root_return();
}

/* Ids are mapped from the parent's user namespace: in a process that goes there and does not come back. */
static const char *map_ids(pid_t mother, pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", mother);
    int space = open(path, O_RDONLY | O_CLOEXEC), status = 1;
    if (space < 0) return failed("find its user namespace", 0);
    pid_t helper = fork();
    if (helper == 0) {
        char line[] = "0 0 65536";
        if (setns(space, CLONE_NEWUSER)) _exit(errno);
        snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
        if (!write_file(path, line, sizeof line - 1)) _exit(errno);
        snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
        _exit(write_file(path, line, sizeof line - 1) ? 0 : errno);
    }
    close(space);
    if (helper < 0 || waitpid(helper, &status, 0) != helper) return failed("map its ids", 0);
    return WIFEXITED(status) && !WEXITSTATUS(status) ? NULL : failed("map its ids", -(long)WEXITSTATUS(status));
}

/* The first process's own control group, no powers but an agent's, and the streams of the copy. */
static const char *prepare_first(struct hold *hold, int pipes[3][2]) {
    struct call calls[64] = { { .number = __NR_unshare, .a = CLONE_NEWCGROUP } };
    size_t count = 1, powers, streams[3] = { 0 };
    uint64_t keep = agent_powers(true);
    for (int capability = 0; capability < 48; capability++)
        if (!(keep >> capability & 1))
            calls[count++] = (struct call){ .number = __NR_prctl, .a = PR_CAPBSET_DROP, .b = capability };
    powers = count;
    for (int i = 0; i < 3; i++) {
        pipes[i][0] = pipes[i][1] = -1;
        if (hold->streams[i] != i) continue;
        streams[i] = count;
        calls[count++] = (struct call){ .number = __NR_pipe2, .a = hold->scratch + AT_PIPES + 8 * i, .b = O_CLOEXEC };
    }
    if (!trace_room(&first) || !trace_calls(&first, calls, count)) return failed("prepare its agent", 0);
    if (calls[0].result) return failed("hide its control group", calls[0].result);
    for (size_t i = 1; i < powers; i++) /* EINVAL: the kernel knows no such power */
        if (calls[i].result && calls[i].result != -EINVAL) return failed("drop its bounding set", calls[i].result);
    for (int i = 0; i < 3; i++) {
        if (!streams[i]) continue;
        if (calls[streams[i]].result) return failed("make a pipe", calls[streams[i]].result);
        if (!trace_read(&first, hold->scratch + AT_PIPES + 8 * i, pipes[i], sizeof pipes[i])) return failed("make a pipe", 0);
    }
    return NULL;
}

/* A terminal of the new box with the settings of the old one; ``pipes[0]``: its two ends. */
static const char *open_terminal(struct hold *hold, int pipes[3][2], struct carried *carried) {
    uint64_t at = hold->scratch + AT_ADDRESS;
    struct { char path[32]; uint8_t termios[64], window[8]; int32_t unlock; } words = { .path = "/dev/pts/ptmx" };
    memcpy(words.termios, hold->termios, sizeof words.termios);
    memcpy(words.window, hold->window, sizeof words.window);
    if (!trace_write(&first, at, &words, sizeof words)) return failed("prepare its terminal", 0);
    long master = trace_call(&first, __NR_openat, AT_FDCWD, at, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC, 0, 0);
    if (master < 0) return failed("open its terminal", master);
    struct call calls[] = {
        { .number = __NR_ioctl, .a = master, .b = TIOCSPTLCK, .c = at + offsetof(__typeof__(words), unlock) },
        { .number = __NR_ioctl, .a = master, .b = TIOCSWINSZ, .c = at + offsetof(__typeof__(words), window) },
        { .number = __NR_ioctl, .a = master, .b = TIOCGPTPEER, .c = O_RDWR | O_NOCTTY },
    };
    if (!trace_calls(&first, calls, 3) || calls[0].result) return failed("unlock its terminal", calls[0].result);
    long slave = calls[2].result;
    if (slave < 0) return failed("open its terminal", slave);
    long result = trace_call(&first, __NR_ioctl, slave, TCSETS, at + offsetof(__typeof__(words), termios), 0, 0);
    if (result) return failed("set its terminal", result);
    pipes[0][0] = slave;
    pipes[0][1] = master;
    carried->on_terminal = true;
    return NULL;
}

static const char *make_copy(struct hold *hold, int pipes[3][2], struct carried *carried) {
    long flags = CLONE_VM | (hold->tid_at ? CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID : 0);
    uint64_t at = hold->scratch + AT_ADDRESS;
    struct { struct clone_args arguments; int32_t number; } asked = {
        { .flags = flags, .child_tid = hold->tid_at, .exit_signal = SIGCHLD, .set_tid_size = 1,
          .set_tid = at + offsetof(__typeof__(asked), number) },
        hold->number,
    };
    long result = -ENOSYS;
    if (trace_write(&first, at, &asked, sizeof asked))
        result = trace_call(&first, __NR_clone3, at, sizeof asked.arguments, 0, 0, 0);
    if (result < 0) result = trace_call(&first, __NR_clone, flags | SIGCHLD, 0, 0, hold->tid_at, 0);
    if (result <= 0 || !trace_born(&copy, first.born)) return failed("copy the process", result);
    carried->pid = (uint32_t)result;
    copy.site = first.site;
    copy.mask = first.mask;
    copy.room = first.room;
    copy.saved = hold->main.saved;
    carried->pipes[0] = pipes[0][1];
    carried->pipes[1] = carried->on_terminal ? pipes[0][1] : pipes[1][0];
    carried->pipes[2] = pipes[2][0];
    return NULL;
}

/* A connects to us and becomes the program. */
static const char *become_agent(struct hold *hold, int pipes[3][2]) {
    uint64_t at = hold->scratch;
    struct { char path[32], name[16], word[16]; uint64_t arguments[4]; } strings = {
        GRAFT_AGENT, "box-agent", "agent",
        { at + AT_ARGUMENTS + 32, at + AT_ARGUMENTS + 48, 0, 0 },
    };
    struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = GRAFT_SOCKET };
    if (!trace_write(&first, at + AT_ARGUMENTS, &strings, sizeof strings) ||
        !trace_write(&first, at + AT_ADDRESS, &address, sizeof address))
        return failed("prepare its agent", 0);
    struct call calls[16] = { { 0 } };
    size_t count = 0;
    for (int i = 0; i < 3; i++) { /* it keeps our ends of the streams */
        if (pipes[i][0] < 0) continue;
        calls[count++] = (struct call){ .number = __NR_close, .a = pipes[i][i ? 1 : 0] };
        calls[count++] = (struct call){ .number = __NR_fcntl, .a = pipes[i][i ? 0 : 1], .b = F_SETFD };
    }
    calls[count++] = (struct call){ .number = __NR_socket, .a = AF_UNIX, .b = SOCK_SEQPACKET };
    if (!trace_calls(&first, calls, count)) return failed("prepare its agent", 0);
    long fd = calls[count - 1].result;
    if (fd < 0) return failed("make a socket", fd);
    struct call last[] = {
        { .number = __NR_connect, .a = fd, .b = at + AT_ADDRESS, .c = sizeof address },
        { .number = __NR_setresgid }, { .number = __NR_setresuid },
        { .number = __NR_dup2, .a = fd, .b = 0 }, { .number = __NR_dup2, .a = fd, .b = 1 },
        { .number = __NR_dup2, .a = fd, .b = 2 }, { .number = __NR_close, .a = fd },
    };
    if (!trace_calls(&first, last, sizeof last / sizeof *last)) return failed("prepare its agent", 0);
    if (last[0].result) return failed("connect", last[0].result);
    if (last[1].result || last[2].result) return failed("become the box's root", last[1].result ? last[1].result : last[2].result);
    if (last[3].result || last[4].result != 1 || last[5].result != 2) return failed("move its socket", 0);
    uint64_t arguments = at + AT_ARGUMENTS + 64;
    long result = trace_call(&first, __NR_execve, at + AT_ARGUMENTS, arguments, arguments + 16, 0, 0);
    return result ? failed("start its agent", result) : NULL;
}

static const char *brief_agent(int listener, int agent_fd, const struct carried *carried) {
    struct pollfd source = { listener, POLLIN, 0 };
    struct ucred peer = { 0 };
    socklen_t size = sizeof peer;
    int fd = poll(&source, 1, HELPER_MS) == 1 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    if (fd < 0) return failed("hear of its agent", 0);
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { .space = { 0 } };
    struct iovec part = { (void *)carried, sizeof *carried };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    extra.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
    memcpy(CMSG_DATA(&extra.head), &agent_fd, sizeof agent_fd);
    errno = EPERM;
    bool good = !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.pid == first.pid &&
                sendmsg(fd, &head, MSG_NOSIGNAL) == sizeof *carried;
    close(fd);
    return good ? NULL : failed("brief its agent", 0);
}

/* The copy's own streams, folder and session, and what its C library told the kernel; then it has the
 * powers that its parent has in its own box: none, but for the box's root. */
static const char *settle_copy(struct hold *hold, int pipes[3][2]) {
    uint64_t at = hold->scratch;
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    uint64_t most = agent_powers(true), permitted = hold->permitted & most, effective = hold->effective & most;
    struct { struct __user_cap_header_struct head; struct __user_cap_data_struct data[2]; } powers = {
        head,
        { { .permitted = (uint32_t)permitted, .effective = (uint32_t)effective },
          { .permitted = (uint32_t)(permitted >> 32), .effective = (uint32_t)(effective >> 32) } },
    };
    if (!trace_write(&copy, at + AT_POWERS, &powers, sizeof powers) ||
        !trace_write(&copy, at + AT_FOLDER, hold->folder, strlen(hold->folder) + 1))
        return failed("write its memory", 0);
    struct call calls[32] = {
        { .number = __NR_chdir, .a = at + AT_FOLDER },
        { .number = __NR_setsid },
        { .number = __NR_prctl, .a = PR_SET_DUMPABLE, .b = 1 },
        { .number = __NR_capset, .a = at + AT_POWERS, .b = at + AT_POWERS + sizeof powers.head },
    };
    static const char *const steps[] = { "enter its working folder", "give it a session", "open it to itself",
                                         "drop its powers" };
    size_t count = 4, first_stream = count;
    for (int fd = 0; fd < 3; fd++) {
        int from = hold->streams[fd];
        if (from >= 0) calls[count++] = (struct call){ .number = __NR_dup2, .a = pipes[from][from ? 1 : 0], .b = fd };
    }
    if (hold->num_on_terminal) calls[count++] = (struct call){ .number = __NR_ioctl, .a = pipes[0][0], .b = TIOCSCTTY };
    for (int i = 0; i < hold->num_on_terminal; i++)
        calls[count++] = (struct call){ .number = __NR_dup2, .a = pipes[0][0], .b = hold->on_terminal[i] };
    size_t num_needed = count;
    for (int i = 0; i < 3; i++)
        for (int end = 0; end < 2 && pipes[i][end] >= 0; end++)
            calls[count++] = (struct call){ .number = __NR_close, .a = pipes[i][end] };
    if (hold->robust_size)
        calls[count++] = (struct call){ .number = __NR_set_robust_list, .a = hold->robust_at, .b = hold->robust_size };
#ifdef __NR_rseq
    if (hold->rseq_size)
        calls[count++] = (struct call){ .number = __NR_rseq, .a = hold->rseq_at, .b = hold->rseq_size,
                                        .d = hold->rseq_signature };
#endif
    if (!trace_calls(&copy, calls, count)) return failed("settle it", 0);
    for (size_t i = 0; i < num_needed; i++)
        if (calls[i].result < 0) return failed(i < first_stream ? steps[i] : "give it its streams", calls[i].result);
    trace_unroom(&copy);
    if (!trace_write(&copy, at, hold->old, SCRATCH)) return failed("put its memory back", 0);
    return copy.lost ? failed("settle it", 0) : NULL;
}

static const char *raise_branch(struct hold *hold, struct box *box, const struct box_spec *spec, int agent_fd,
                                struct carried *carried) {
    struct graft graft = { .pid = first.pid, .helper = 0 };
    int pipes[3][2];
    first.site = hold->main.site;
    first.mask = hold->main.mask;
    first.saved = hold->main.saved;
    box->pid = first.pid;
    set_limit(spec, first.pid);
    const char *error = box_enter_cgroups(box, spec->cgroups);
    if (!error) error = map_ids(hold->target, first.pid);
    if (!error) error = graft_begin(&graft, box, spec);
    if (!error) error = prepare_first(hold, pipes);
    if (!error) error = graft_mounted(&graft);
    if (!error && hold->num_on_terminal) error = open_terminal(hold, pipes, carried);
    if (!error) error = make_copy(hold, pipes, carried);
    if (!error) error = become_agent(hold, pipes);
    if (!error) error = brief_agent(graft.listener, agent_fd, carried);
    if (!error) error = settle_copy(hold, pipes);
    const char *late = graft_end(&graft);
    return error ? error : late;
}

const char *branch_make(struct hold *hold, struct box *box, const struct box_spec *spec, int agent_fd,
                        struct carried *carried) {
    const char *error = NULL;
    first = copy = (struct traced){ 0 };
    trace_begin();
    lift_limit(hold, spec);
    /* Its parent is its maker's parent: the maker has no child that it does not know of. */
    hold->main.born = 0;
    long result = trace_call(&hold->main, __NR_clone, NEW_SPACES | CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
    if (result <= 0 || !trace_born(&first, hold->main.born))
        error = result == -ENOSPC || result == -EUSERS ? "live fork: too many generations, or namespaces in all"
                                                        : failed("make its namespaces", result);
    if (!error) error = raise_branch(hold, box, spec, agent_fd, carried);
    trace_end();
    pid_t pid = first.pid;
    if (!error) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
        write_file(path, "-1000", 5);
        setpriority(PRIO_PROCESS, pid, -5);
        setpriority(PRIO_PROCESS, copy.pid, hold->nice);
        if (!trace_go_on(&copy, true)) error = failed("let it go", 0);
        else trace_leave(&first);
    }
    if (!error) return NULL;
    box->pid = 0;
    if (error != text) snprintf(text, sizeof text, "%s", error);
    if (copy.pid) kill(copy.pid, SIGKILL), waitpid(copy.pid, NULL, __WALL);
    if (pid) kill(pid, SIGKILL), waitpid(pid, NULL, __WALL);
    return text;
}
#else
const char *branch_make(struct hold *hold, struct box *box, const struct box_spec *spec, int agent_fd,
                        struct carried *carried) {
    return (void)hold, (void)box, (void)spec, (void)agent_fd, (void)carried, "live fork is for x86-64 only";
}
#endif

/* The first process of a branch, now this program: its keeper tells the rest over the socket that it is on. */
int branch_agent(void) {
    struct carried carried;
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra;
    struct iovec part = { &carried, sizeof carried };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    if (recvmsg(0, &head, MSG_CMSG_CLOEXEC) != sizeof carried) return 1;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&head);
    int fd = -1;
    if (!rights || rights->cmsg_type != SCM_RIGHTS) return 1;
    memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    agent_place(fd, carried.pipes);
    agent_main(AGENT_FD, carried.work_id, true, carried.watch_bytes, &carried);
}
