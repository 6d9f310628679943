/* The keeper: a small process beside the supervisor that makes boxes and buries them. It dies with the
 * supervisor (a pidfd tells it, however the supervisor went), and its boxes die with it: it removes their
 * cgroups on the way out, so that even a SIGKILLed supervisor leaves nothing.
 *
 * Control socket (SOCK_SEQPACKET). To the keeper: 'C' create + agent socket, 'K' u32 box. From it: 'P' u32 box,
 * u32 pid; 'E' u32 box, text (no box was made); 'G' u32 box, u32 wait status (gone, cgroups removed). */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CGROUPS = 8, MESSAGE_MAX = 256 * 1024 };
struct box {
    struct box *next;
    uint32_t id;
    pid_t pid; /* 0: buried, cgroups still to remove */
    int status, tries, num_cgroups;
    char *cgroups[MAX_CGROUPS];
};

static struct box *boxes;
static int control;
static uint8_t message[MESSAGE_MAX];

static void tell(char kind, uint32_t id, const void *data, size_t length) {
    uint8_t out[1024];
    if (length > sizeof out - 5) length = sizeof out - 5;
    out[0] = kind;
    put_u32(out + 1, id);
    memcpy(out + 5, data, length);
    send(control, out, 5 + length, MSG_NOSIGNAL); /* a supervisor that is gone is noticed by poll */
}

static bool remove_cgroups(struct box *box) {
    bool clean = true;
    for (int i = 0; i < box->num_cgroups; i++)
        if (rmdir(box->cgroups[i]) && errno != ENOENT) clean = false;
    return clean;
}

static void forget(struct box *box) {
    for (struct box **link = &boxes; *link; link = &(*link)->next)
        if (*link == box) {
            *link = box->next;
            break;
        }
    for (int i = 0; i < box->num_cgroups; i++) free(box->cgroups[i]);
    free(box);
}

/* ---- making a box */
static const char *make_cgroups(struct box *box, struct cursor c, int *unified_fd) {
    static char text[PATH_MAX + 300];
    uint32_t count = get_u32(&c);
    if (c.bad || count > MAX_CGROUPS) return "broken cgroup list";
    for (uint32_t i = 0; i < count; i++) {
        const char *folder = get_str(&c, NULL);
        bool unified = get_u8(&c);
        if (mkdir(folder, 0755)) {
            snprintf(text, sizeof text, "make cgroup %s: %s", folder, strerror(errno));
            return text;
        }
        box->cgroups[box->num_cgroups++] = strdup(folder);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) {
            char path[PATH_MAX];
            const char *file = get_str(&c, NULL);
            uint32_t length;
            const char *value = get_str(&c, &length);
            snprintf(path, sizeof path, "%s/%s", folder, file);
            if (!write_file(path, value, length)) {
                snprintf(text, sizeof text, "write %s to %s: %s", value, path, strerror(errno));
                return text;
            }
        }
        if (unified && *unified_fd < 0) *unified_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    return c.bad ? "broken cgroup list" : NULL;
}

/* The unified group was entered at birth; the others must be entered before the box touches memory. */
static const char *enter_cgroups(const struct box *box, struct cursor c) {
    static char text[PATH_MAX + 300];
    char number[16], path[PATH_MAX];
    int length = snprintf(number, sizeof number, "%d", box->pid);
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        const char *folder = get_str(&c, NULL);
        bool unified = get_u8(&c);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) get_str(&c, NULL), get_str(&c, NULL);
        if (unified) continue;
        snprintf(path, sizeof path, "%s/cgroup.procs", folder);
        if (!write_file(path, number, length)) {
            snprintf(text, sizeof text, "enter cgroup %s: %s", folder, strerror(errno));
            return text;
        }
    }
    return NULL;
}

static const char *map_ids(const struct box_spec *spec, pid_t pid) {
    static char text[160];
    char path[64], line[64];
    uint32_t inner = spec->id_count > 1 ? 0 : spec->work_id;
    if (spec->id_count == 1) {
        snprintf(path, sizeof path, "/proc/%d/setgroups", pid);
        if (!write_file(path, "deny", 4)) return "deny setgroups";
    }
    int length = snprintf(line, sizeof line, "%u %u %u", inner, spec->outer_gid, spec->id_count);
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    bool good = write_file(path, line, length);
    length = snprintf(line, sizeof line, "%u %u %u", inner, spec->outer_uid, spec->id_count);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (good && write_file(path, line, length)) return NULL;
    snprintf(text, sizeof text, "map ids (%s): %s", line, strerror(errno));
    return text;
}

static bool read_spec(struct cursor c, struct box_spec *spec) {
    spec->id = get_u32(&c);
    spec->hostname = get_str(&c, NULL);
    spec->outer_uid = get_u32(&c);
    spec->outer_gid = get_u32(&c);
    spec->id_count = get_u32(&c);
    spec->work_id = get_u32(&c);
    spec->disk_bytes = get_u64(&c);
    spec->disk_inodes = get_u64(&c);
    spec->num_processes = get_u64(&c);
    spec->data_bytes = get_u64(&c);
    spec->watch_bytes = get_u64(&c);
    uint32_t length;
    const char *part = get_str(&c, &length);
    spec->cgroups = (struct cursor){ (const uint8_t *)part, (const uint8_t *)part + length, false };
    part = get_str(&c, &length);
    spec->ops = (struct cursor){ (const uint8_t *)part, (const uint8_t *)part + length, false };
    return !c.bad;
}

static pid_t start(const struct box_spec *spec, int agent_fd, int unified_fd, int *go_fd) {
    int go[2];
    if (pipe2(go, O_CLOEXEC)) return -1;
    struct clone_args arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS,
        .exit_signal = SIGCHLD,
    };
    if (unified_fd >= 0) {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = unified_fd;
    }
    pid_t pid = syscall(__NR_clone3, &arguments, sizeof arguments);
    if (pid == 0) {
        close(go[1]); /* so that the keeper's death ends the wait */
        box_main(spec, agent_fd, go[0]);
    }
    int error = errno;
    close(go[0]);
    if (pid < 0) close(go[1]);
    else *go_fd = go[1];
    errno = error;
    return pid;
}

static const char *create(const struct box_spec *spec, struct box *box, int agent_fd) {
    static char text[160];
    int unified_fd = -1, go_fd = -1;
    const char *error = make_cgroups(box, spec->cgroups, &unified_fd);
    if (!error) {
        box->pid = start(spec, agent_fd, unified_fd, &go_fd);
        if (box->pid < 0) {
            snprintf(text, sizeof text, "make namespaces: %s", strerror(errno));
            error = text;
        }
    }
    if (unified_fd >= 0) close(unified_fd);
    if (!error) error = map_ids(spec, box->pid);
    if (!error) error = enter_cgroups(box, spec->cgroups);
    if (!error && geteuid() == 0) { /* as an ordinary user the box keeps the defaults */
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/oom_score_adj", box->pid);
        write_file(path, "-1000", 5);
        setpriority(PRIO_PROCESS, box->pid, -5);
    }
    if (!error && write(go_fd, "g", 1) != 1) error = "wake the box";
    if (go_fd >= 0) close(go_fd);
    if (error && box->pid > 0) {
        kill(box->pid, SIGKILL);
        waitpid(box->pid, NULL, 0);
    }
    return error;
}

static void on_create(struct cursor c, int agent_fd) {
    struct box_spec spec;
    bool good = read_spec(c, &spec);
    struct box *box = calloc(1, sizeof *box);
    const char *error = !good || agent_fd < 0 || !box ? "broken create message" : create(&spec, box, agent_fd);
    if (agent_fd >= 0) close(agent_fd);
    if (error) {
        tell('E', spec.id, error, strlen(error));
        for (int tries = 0; box && !remove_cgroups(box) && tries < 20; tries++) usleep(1000);
        free(box);
        return;
    }
    box->id = spec.id;
    box->next = boxes;
    boxes = box;
    uint8_t pid[4];
    put_u32(pid, box->pid);
    tell('P', box->id, pid, 4);
}

/* ---- burying */
static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (struct box *box = boxes; box; box = box->next)
            if (box->pid == pid) {
                box->pid = 0;
                box->status = status;
                break;
            }
}

/* Cgroups of the dead go at once, or a moment later when the kernel still holds them. True if some remain. */
static bool bury(void) {
    bool waiting = false;
    for (struct box *box = boxes, *next; box; box = next) {
        next = box->next;
        if (box->pid) continue;
        if (!remove_cgroups(box) && box->tries++ < 500) {
            waiting = true;
            continue;
        }
        uint8_t status[4];
        put_u32(status, box->status);
        tell('G', box->id, status, 4);
        forget(box);
    }
    return waiting;
}

static bool on_control(void) {
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra;
    struct iovec part = { message, sizeof message };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    ssize_t length = recvmsg(control, &head, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0) return errno == EAGAIN || errno == EINTR;
    if (length == 0) return false;
    int fd = -1;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&head);
    if (rights && rights->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    struct cursor c = { message, message + length, false };
    uint8_t kind = get_u8(&c);
    if (kind == 'C') {
        on_create(c, fd);
    } else if (kind == 'K') {
        uint32_t id = get_u32(&c);
        for (struct box *box = boxes; box; box = box->next)
            if (box->id == id && box->pid) kill(box->pid, SIGKILL);
    }
    return true;
}

static void end_all(void) {
    for (struct box *box = boxes; box; box = box->next)
        if (box->pid) kill(box->pid, SIGKILL);
    for (struct box *box = boxes; box; box = box->next)
        if (box->pid) {
            waitpid(box->pid, &box->status, 0);
            box->pid = 0;
        }
    while (bury()) usleep(1000);
}

/* The supervisor's own cgroup folders, which hold its boxes', go last. */
int keeper_main(int control_fd, pid_t supervisor, char **folders) {
    control = control_fd;
    int owner = syscall(__NR_pidfd_open, supervisor, 0);
    if (owner < 0 || getppid() != supervisor) return 1;
    sigset_t mask;
    sigfillset(&mask);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    prctl(PR_SET_NAME, "tandem-keeper");
    struct pollfd sources[3] = { { control, POLLIN, 0 }, { signals, POLLIN, 0 }, { owner, POLLIN, 0 } };
    bool waiting = false;
    for (;;) {
        if (poll(sources, 3, waiting ? 2 : -1) < 0 && errno != EINTR) break;
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) > 0) { }
        reap();
        waiting = bury();
        if (sources[2].revents) break;
        if (sources[0].revents && !on_control()) break;
    }
    end_all();
    for (; *folders; folders++) rmdir(*folders);
    return 0;
}
