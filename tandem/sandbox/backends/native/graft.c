/* Keeper side: the mounts, the host name and the network of a box that was born of a live fork. A process of ours makes
 * them from outside, for whoever is born inside has its parent's mounts, locked, and its parent's filter. For a moment
 * the box program and a socket of ours lie over the new /proc, where the first process finds them. */
#include "box.h"
#include "hold.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ANSWER_MS = 10000 };

static char text[512];

static const char *failed(const char *step) {
    snprintf(text, sizeof text, "live fork: %s: %s", step, strerror(errno));
    return text;
}

/* A file system with the program and the socket, made once; its mount in a box is read-only. Nobody in a box may read
 * the program, only run it: so its memory belongs to the host for the kernel, and code of the parent, which has all
 * powers in the new box, cannot look into the agent there or change it. */
static int tool = -1, door = -1;

static bool make_tool(void) {
    char path[64], chunk[65536];
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (tool >= 0) return true;
    int made = root_tmpfs(16 << 20, 16), from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int to = made < 0 ? -1 : openat(made, "agent", O_WRONLY | O_CREAT | O_CLOEXEC, 0111);
    ssize_t length = -1;
    while (from >= 0 && to >= 0 && (length = read(from, chunk, sizeof chunk)) > 0)
        if (write(to, chunk, length) != length) break;
    if (from >= 0) close(from);
    if (to >= 0) close(to);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/keeper", made);
    mode_t old = umask(0);
    bool good = length == 0 && listener >= 0 && !bind(listener, (struct sockaddr *)&address, sizeof address) &&
                !listen(listener, 4);
    umask(old);
    snprintf(path, sizeof path, "/proc/self/fd/%d/keeper", made);
    if (good) good = !chmod(path, 0777);
    if (!good) {
        if (made >= 0) close(made);
        if (listener >= 0) close(listener);
        return false;
    }
    tool = made;
    door = listener;
    return true;
}

static int tool_mount(void) {
    int fd = syscall(__NR_open_tree, tool, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
    struct mount_attr attributes = { .attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV };
    if (fd >= 0 && syscall(__NR_mount_setattr, fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) close(fd), fd = -1;
    return fd;
}

static void answer(int fd, const char *problem) {
    char line[256];
    int length = problem ? snprintf(line, sizeof line, "%s: %s", problem, strerror(errno)) : snprintf(line, sizeof line, "y");
    if (write(fd, line, length) < 0 || problem) _exit(1);
}

static void require(bool good, int fd, const char *step) {
    if (!good) answer(fd, step);
}

static void work(int task, const struct box_spec *spec, int overlay, int fd) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    setpriority(PRIO_PROCESS, 0, -20); /* a held process waits for it */
    int extra = tool_mount();
    require(extra >= 0, fd, "open the program");
    steps_open(spec->ops, fd);
    int proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC); /* the host's */
    require(!setns(task, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS), fd, "enter its namespaces");
    require(!syscall(__NR_move_mount, overlay, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH), fd, "mount its root");
    require(!fchdir(overlay), fd, "enter its root");
    steps_apply();
    require(!syscall(__NR_pivot_root, ".", "."), fd, "pivot_root");
    require(!umount2(".", MNT_DETACH), fd, "leave its parent's root");
    require(!chdir("/"), fd, "enter /");
    require(!syscall(__NR_move_mount, extra, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH), fd, "show the program");
    require(!sethostname(spec->hostname, strlen(spec->hostname)), fd, "set its host name");
    raise_loopback();
    free_low_ports(proc);
    answer(fd, NULL);
    char word;
    if (read(fd, &word, 1) != 1) _exit(1);
    require(!umount2("/proc", MNT_DETACH), fd, "hide the program");
    answer(fd, NULL);
    _exit(0);
}

const char *graft_begin(struct graft *graft, struct box *box, const struct box_spec *spec) {
    char path[64];
    int pair[2];
    const char *error = NULL;
    if (!make_tool()) return failed("lay out the program");
    graft->listener = door;
    box->root.tmpfs = root_tmpfs(spec->disk_bytes, spec->disk_inodes);
    if (box->root.tmpfs < 0) return failed("mount tmpfs");
    if ((error = root_take(&box->root, spec->layers))) return error;
    snprintf(path, sizeof path, "/proc/%d/ns/user", graft->pid);
    int userns = open(path, O_RDONLY | O_CLOEXEC);
    if (userns < 0) return failed("find its user namespace");
    int overlay = root_overlay(&box->root, spec, userns, box->trusted, &error);
    close(userns);
    if (overlay < 0) return error;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return close(overlay), failed("make a socket");
    /* The helper is born among the new box's processes: the /proc that it makes is theirs. */
    int own = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC), task = syscall(__NR_pidfd_open, graft->pid, 0);
    graft->helper = own >= 0 && task >= 0 && !setns(task, CLONE_NEWPID) ? fork() : -1;
    if (graft->helper == 0) {
        close(pair[0]);
        work(task, spec, overlay, pair[1]);
    }
    if (own >= 0 && setns(own, CLONE_NEWPID)) error = failed("return to its own processes");
    if (own >= 0) close(own);
    if (task >= 0) close(task);
    close(overlay);
    close(pair[1]);
    graft->fd = pair[0];
    return graft->helper > 0 ? error : failed("start a helper");
}

static const char *hear(struct graft *graft) {
    char line[256];
    struct pollfd source = { graft->fd, POLLIN, 0 };
    ssize_t length = poll(&source, 1, ANSWER_MS) == 1 ? read(graft->fd, line, sizeof line - 1) : -1;
    if (length == 1 && line[0] == 'y') return NULL;
    line[length < 0 ? 0 : length] = 0;
    snprintf(text, sizeof text, "live fork: %s", length > 0 ? line : "a helper did not answer");
    return text;
}

const char *graft_mounted(struct graft *graft) { return hear(graft); }

/* Puts the program away, if it is there. */
const char *graft_end(struct graft *graft) {
    if (graft->helper <= 0) return NULL;
    const char *error = send(graft->fd, "", 1, MSG_NOSIGNAL) == 1 ? hear(graft) : "live fork: a helper died";
    close(graft->fd);
    if (error) kill(graft->helper, SIGKILL);
    waitpid(graft->helper, NULL, 0);
    graft->helper = 0;
    return error;
}
