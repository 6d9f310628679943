/* A new process, already in its own namespaces, makes its root file system, gives up every power and becomes the
 * agent. Any failed step is reported by name over the agent socket, and the process ends: there is no box with
 * less isolation than asked for. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/if.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif

static int report_fd;
static bool in_words; /* to whom words are enough */

static void fail(const char *step, const char *what) {
    char text[512];
    uint8_t frame[FRAME_HEAD + sizeof text];
    int length = snprintf(text, sizeof text, "%s%s%s: %s", step, *what ? " " : "", what, strerror(errno));
    if (length >= (int)sizeof text) length = sizeof text - 1;
    if (in_words && send(report_fd, text, length, MSG_NOSIGNAL) >= 0) _exit(1);
    put_u32(frame, 5 + length);
    frame[4] = FAIL;
    put_u32(frame + 5, 0);
    memcpy(frame + FRAME_HEAD, text, length);
    send(report_fd, frame, FRAME_HEAD + length, MSG_NOSIGNAL);
    _exit(1);
}

static void check(bool good, const char *step, const char *what) {
    if (!good) fail(step, what);
}

enum { MAX_OPS = 256 };
#define MOST_TERMINALS "64" /* the machine has 4096, for all */
struct op { uint8_t kind; const char *path, *argument; uint32_t length, mode; int tree; };
static struct op ops[MAX_OPS];

static size_t read_ops(struct cursor c) {
    uint32_t count = get_u32(&c);
    errno = E2BIG;
    check(count <= MAX_OPS, "template", "");
    for (uint32_t i = 0; i < count; i++) {
        ops[i].kind = get_u8(&c);
        ops[i].path = get_str(&c, NULL);
        ops[i].argument = get_str(&c, &ops[i].length);
        ops[i].mode = get_u32(&c);
        ops[i].tree = -1;
    }
    errno = EPROTO;
    check(!c.bad, "template", "");
    return count;
}

/* A file system of this process's namespaces, mounted nowhere yet. */
static int detached(const char *kind, const char *const *options, uint64_t attributes) {
    int context = syscall(__NR_fsopen, kind, FSOPEN_CLOEXEC);
    for (; context >= 0 && *options; options += 2) syscall(__NR_fsconfig, context, 1, options[0], options[1], 0);
    bool good = context >= 0 && !syscall(__NR_fsconfig, context, 6, NULL, NULL, 0);
    int fd = good ? (int)syscall(__NR_fsmount, context, FSMOUNT_CLOEXEC, attributes) : -1;
    if (context >= 0) close(context);
    return fd;
}

/* The host's trees are opened before our tmpfs hides anything of the host; ``all``: what else is mounted, too. */
static void open_trees(size_t count, bool all) {
    static const char *const plain[] = { NULL }, *const terminals[] = { "ptmxmode", "0666", "mode", "0620", "max", MOST_TERMINALS,
                                                                                 NULL };
    for (size_t i = 0; i < count; i++) {
        struct op *op = &ops[i];
        if (all && op->kind == 'p')
            op->tree = detached("proc", plain, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
        if (all && op->kind == 't') op->tree = detached("devpts", terminals, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
        if (all && (op->kind == 'p' || op->kind == 't')) check(op->tree >= 0, "open", op->path);
        if (op->kind != 'b' && op->kind != 'n') continue;
        op->tree = syscall(__NR_open_tree, AT_FDCWD, op->argument, OPEN_TREE_CLONE | AT_RECURSIVE | O_CLOEXEC);
        check(op->tree >= 0, "open", op->argument);
        struct mount_attr attributes = { .attr_set = MOUNT_ATTR_NOSUID };
        if (op->kind == 'b') attributes.attr_set |= MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV;
        else attributes.attr_set |= MOUNT_ATTR_NOEXEC;
        check(!syscall(__NR_mount_setattr, op->tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes, sizeof attributes),
              "protect", op->argument);
    }
}

static void attach(const struct op *op) {
    check(!syscall(__NR_move_mount, op->tree, "", AT_FDCWD, op->path, MOVE_MOUNT_F_EMPTY_PATH), "attach", op->path);
    close(op->tree);
}

/* Paths are relative to the new root, which is the working directory. The keeper made folders, files and mount
 * points. */
static void apply(const struct op *op) {
    struct stat info;
    switch (op->kind) {
    case 'd': case 'h': case 'f': case 'l':
        break;
    case 'b': /* host tree or file, read-only */
    case 'n': /* device node */
        attach(op);
        break;
    case 'p':
        if (op->tree >= 0) {
            attach(op);
            break;
        }
        check(!mount("proc", op->path, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount", op->path);
        break;
    case 't': /* terminals of its own */
        check(!mkdir(op->path, 0755) || errno == EEXIST, "make", op->path);
        if (op->tree >= 0) {
            attach(op);
            break;
        }
        check(!mount("devpts", op->path, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=" MOST_TERMINALS), "mount",
              op->path);
        break;
    case 'm': /* hide a file, where there is one */
        if (lstat(op->path, &info)) break;
        check(!mount("dev/null", op->path, NULL, MS_BIND, NULL), "hide", op->path);
        break;
    case 'r': /* make a folder of /proc read-only, where there is one */
        if (lstat(op->path, &info)) break;
        check(!mount(op->path, op->path, NULL, MS_BIND | MS_REC, NULL), "bind", op->path);
        check(!mount(NULL, op->path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL),
              "protect", op->path);
        break;
    default:
        errno = ENOSYS;
        fail("template", op->path);
    }
}

static size_t num_ops;

void steps_open(struct cursor steps, int fd) {
    report_fd = fd;
    in_words = true;
    num_ops = read_ops(steps);
    open_trees(num_ops, true);
}

void steps_apply(void) {
    for (size_t i = 0; i < num_ops; i++) apply(&ops[i]);
}

static void make_root(const struct box_spec *spec, int overlay) {
    num_ops = read_ops(spec->ops);
    check(!mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), "make private", "/");
    open_trees(num_ops, false);
    check(!syscall(__NR_move_mount, overlay, "", AT_FDCWD, "/tmp", MOVE_MOUNT_F_EMPTY_PATH), "mount", "root");
    check(!fchdir(overlay), "enter", "root");
    steps_apply();
    check(!syscall(__NR_pivot_root, ".", "."), "pivot_root", "");
    check(!umount2(".", MNT_DETACH), "leave", "the host's root");
    check(!chdir("/"), "enter", "/");
}

/* The keeper's word, with the root's mount. */
static int await_root(int go_fd) {
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra;
    char go;
    struct iovec part = { &go, 1 };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    int fd = -1;
    if (recvmsg(go_fd, &head, MSG_CMSG_CLOEXEC) != 1) _exit(1); /* the keeper died or gave up */
    struct cmsghdr *rights = CMSG_FIRSTHDR(&head);
    if (!rights || rights->cmsg_type != SCM_RIGHTS) _exit(1);
    memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    return fd;
}

void raise_loopback(void) {
    struct ifreq request = { .ifr_flags = IFF_UP | IFF_RUNNING };
    strcpy(request.ifr_name, "lo");
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    check(fd >= 0 && !ioctl(fd, SIOCSIFFLAGS, &request), "raise", "lo");
    close(fd);
}

/* Ports below 1024 are anybody's in a box, whose network is its own: the host's resolver for it listens there. Where
 * /proc/sys cannot be written (a container often shows it read-only) that port stays closed, and the host says so. */
void free_low_ports(int proc) {
    int fd = openat(proc, "sys/net/ipv4/ip_unprivileged_port_start", O_WRONLY | O_CLOEXEC); /* of our network */
    if (fd >= 0 && write(fd, "0", 1) < 0) errno = 0;
    if (fd >= 0) close(fd);
    if (proc >= 0) close(proc);
}

static void limit(int resource, uint64_t value, const char *name, bool soft) {
    struct rlimit old, new;
    check(!getrlimit(resource, &old), "read limit", name);
    new.rlim_cur = new.rlim_max = old.rlim_max != RLIM_INFINITY && value > old.rlim_max ? old.rlim_max : value;
    if (soft) new.rlim_max = old.rlim_max;
    check(!setrlimit(resource, &new), "limit", name);
}

/* Whether a control group counts the box's processes, too. */
static bool counted(struct cursor c) {
    bool found = false;
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        get_str(&c, NULL);
        get_u8(&c);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) {
            found = !strcmp(get_str(&c, NULL), "pids.max") || found;
            get_str(&c, NULL);
        }
    }
    return found && !c.bad;
}

static void set_limits(const struct box_spec *spec) {
    /* Where a group counts, the box may lift this one: it only keeps room for the agent, and a live fork, whose copies
     * count here as well, must not take it from the parent. */
    limit(RLIMIT_NPROC, spec->num_processes, "processes", counted(spec->cgroups));
    if (spec->data_bytes) limit(RLIMIT_DATA, spec->data_bytes, "data", false);
    limit(RLIMIT_CORE, 1, "core", false); /* 0 would still feed a host that pipes cores to a program; 1 stops that, too */
    limit(RLIMIT_NOFILE, 4096, "open files", false);
    limit(RLIMIT_MEMLOCK, 1 << 16, "locked memory", false);
    limit(RLIMIT_SIGPENDING, 1024, "pending signals", false);
    limit(RLIMIT_MSGQUEUE, 1 << 16, "message queues", false);
    limit(RLIMIT_RTPRIO, 0, "priority", false);
    limit(RLIMIT_STACK, 8 << 20, "stack", false);
}

/* The agent's, and those of the box's root over the box's own files; its user has none of them. */
uint64_t agent_powers(bool switch_user) {
    return !switch_user ? 0 : 1ull << CAP_SETUID | 1ull << CAP_SETGID | 1ull << CAP_KILL | 1ull << CAP_CHOWN |
                              1ull << CAP_DAC_OVERRIDE | 1ull << CAP_FOWNER | 1ull << CAP_FSETID;
}

static void drop_powers(bool switch_user) {
    uint64_t keep = agent_powers(switch_user);
    for (int capability = 0; capability < 64; capability++)
        if (!(keep >> capability & 1) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) && errno != EINVAL) fail("drop", "bounding set");
    check(!prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "drop", "ambient set");
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct data[2] = { { 0 }, { 0 } };
    data[0].effective = data[0].permitted = (uint32_t)keep;
    data[1].effective = data[1].permitted = (uint32_t)(keep >> 32);
    check(!syscall(__NR_capset, &head, data), "drop", "capabilities");
    const char *step = filter_install();
    if (step) fail("install", step);
}

void agent_place(int agent_fd, int *pipes) {
    int high_pipes[3] = { -1, -1, -1 };
    report_fd = agent_fd;
    check(!prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "protect", "agent");
    prctl(PR_SET_NAME, "box-agent");

    for (int i = 0; pipes && i < 3; i++) high_pipes[i] = pipes[i] < 0 ? -1 : fcntl(pipes[i], F_DUPFD, 64);
    int null = open("/dev/null", O_RDWR);
    check(null >= 0, "open", "/dev/null");
    /* Move the socket away from its final number first: null may have landed on it. */
    int high = fcntl(agent_fd, F_DUPFD, 64);
    check(high >= 0, "move", "socket");
    report_fd = high;
    for (int fd = 0; fd < 3; fd++) check(dup2(null, fd) == fd, "attach", "/dev/null");
    check(dup2(high, AGENT_FD) == AGENT_FD, "move", "socket");
    report_fd = AGENT_FD;
    int next = AGENT_FD + 1;
    for (int i = 0; pipes && i < 3; i++) {
        if (high_pipes[i] < 0) continue;
        pipes[i] = next++;
        check(dup2(high_pipes[i], pipes[i]) == pipes[i], "move", "stream");
        fcntl(pipes[i], F_SETFL, O_NONBLOCK);
    }
    check(!syscall(__NR_close_range, next, ~0u, 0), "close", "inherited files");
}

void box_main(const struct box_spec *spec, int agent_fd, int go_fd, const int *entries) {
    bool switch_user = spec->id_count > 1;
    report_fd = agent_fd;
    for (; *entries >= 0; entries++) check(write(*entries, "0", 1) == 1, "enter", "a control group"); /* before memory */
    int overlay = await_root(go_fd);
    if (switch_user) check(!setgroups(0, NULL), "drop", "groups");
    uint32_t own = switch_user ? 0 : spec->work_id;
    check(!syscall(__NR_setresgid, own, own, own) && !syscall(__NR_setresuid, own, own, own), "become", "box user");
    check(!prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "tie to", "keeper");
    check(!unshare(CLONE_NEWCGROUP), "unshare", "cgroup namespace");
    free_low_ports(open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC)); /* the host's, before it is hidden */
    make_root(spec, overlay);
    check(!sethostname(spec->hostname, strlen(spec->hostname)), "set", "host name");
    raise_loopback();
    set_limits(spec);
    drop_powers(switch_user);
    agent_place(agent_fd, NULL);
    agent_main(AGENT_FD, spec->work_id, switch_user, spec->watch_bytes, NULL);
}
