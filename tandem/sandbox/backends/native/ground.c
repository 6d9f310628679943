/* The root of a box that another kernel isolates (gVisor): made as every box's, on layers, with a quota of its own, and
 * attached in a mount namespace of its own, where the command that is run then finds it. What the box writes is in the
 * upper, and that is given to who asked. Everything goes when the last process with these mounts ends and nobody has the
 * upper. What the command leaves behind gets a parent here that lives as long: the machine's first process may take
 * seconds to bury the dead, and gVisor waits for that. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GROUND_MESSAGE_MAX = 256 * 1024, MOST_FDS = 1024 };

static int failed(const char *what) {
    fprintf(stderr, "its root cannot be made: %s\n", what);
    return 9;
}

/* gVisor takes an empty /tmp for one that may be memory of its own. The agent removes this (guest.c). Links of the
 * layers are not followed. */
static void occupy_tmp(int root) {
    struct open_how how = { .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC,
                            .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS };
    int fd = syscall(__NR_openat2, root, "tmp", &how, sizeof how);
    if (fd < 0) return;
    mkdirat(fd, GROUND_MARK, 0700);
    close(fd);
}

static bool hand(int control, int fd) {
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { .space = { 0 } };
    char word = 'U';
    struct iovec part = { &word, 1 };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    extra.head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int)) };
    memcpy(CMSG_DATA(&extra.head), &fd, sizeof fd);
    return sendmsg(control, &head, MSG_NOSIGNAL) == 1;
}

static void bury(pid_t command, int told) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno == ECHILD) _exit(0);
        if (pid != command) continue;
        uint8_t code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
        if (write(told, &code, 1) != 1) _exit(1);
        close(told);
    }
}

/* The command's code. Who is killed meanwhile takes it along. */
static int run(char **command) {
    int told[2];
    uint8_t code;
    if (pipe2(told, O_CLOEXEC)) return failed(strerror(errno));
    pid_t parent = fork();
    if (parent == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        prctl(PR_SET_NAME, "box-parent");
        pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
            execv(command[0], command);
            _exit(failed(strerror(errno)));
        }
        for (int fd = 0; fd < MOST_FDS; fd++) /* the agent's end of its socket most of all */
            if (fd != told[1]) close(fd);
        bury(child, told[1]);
    }
    close(told[1]);
    return parent > 0 && read(told[0], &code, 1) == 1 ? code : failed("its command was lost");
}

/* ``control`` has the message that creates a box and hears of the upper; ``hidden`` and ``place`` are empty folders. */
int ground_main(int control, const char *ways, const char *hidden, const char *place, bool fresh, char **command) {
    static uint8_t message[GROUND_MESSAGE_MAX];
    struct box_root root = { .tmpfs = -1 };
    struct box_spec spec = { 0 };
    char found;
    ssize_t length = recv(control, message, sizeof message, 0);
    if (length < 1 || !box_read_spec((struct cursor){ message + 1, message + length, false }, &spec))
        return failed("broken message");
    fcntl(control, F_SETFD, FD_CLOEXEC);
    if (!mounts_alone(false)) return failed(strerror(errno));
    const char *error = mounts_probe(ways, hidden, true, NULL, &found);
    if (!error && (root.tmpfs = root_tmpfs(spec.disk_bytes, spec.disk_inodes)) < 0) error = "mount tmpfs";
    if (!error) error = root_take(&root, spec.layers);
    int overlay = error ? -1 : root_overlay(&root, &spec, -1, true, &error);
    if (error) return failed(error);
    if (fresh) occupy_tmp(overlay);
    int upper = openat(root.tmpfs, "upper0", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (upper < 0 || !hand(control, upper)) return failed("its upper cannot be given away");
    if (syscall(__NR_move_mount, overlay, "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH)) return failed(strerror(errno));
    return run(command);
}
