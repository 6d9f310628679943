/* The keeper: a small process beside the supervisor that makes boxes and buries them. It dies with the
 * supervisor (a pidfd tells it, however the supervisor went), and its boxes die with it: it removes their
 * cgroups on the way out, so that even a SIGKILLed supervisor leaves nothing.
 *
 * With a listening socket it instead keeps all boxes for a grace time and gives them to the next supervisor.
 *
 * Control socket (SOCK_SEQPACKET). To the keeper: 'C' create + agent socket + supervisor's end of it, 'K' u32 box,
 * 'S' u32 box (at rest: make its upper a layer), 'L' u32 box, u32 process (stop it for a live fork), 'B' u32 box, u32
 * command, u32 timeout_ms, and all of a 'C' (a branch of it, with its process as this command), 'l' u32 box (go on), 'H' u32 box, str (make this folder one), 'M' u32 box, str, str, u32 (see
 * on_merged), 'R' str (a layer is held by
 * one less), '+' str (by one more), 'O' str (a cgroup folder of
 * the supervisor), 'X' (end, whoever listens). From it: 'P' u32 box, u32 pid; 'E' u32 box, text (no box was made);
 * 'L' u32 box, 'y' and the layer's path, (none: nothing new was written), or 'b' (not now) or 'n' and why;
 * 'S' u32 box, 'y' and the layer's path, or 'n' (nothing happened) and why, or 'c' (copy it), tmpfs, upper and why; 'G' u32 box, u32 wait status (gone,
 * cgroups removed); to a later supervisor 'V' u32 protocol, u32 keeper's pid, 'A' u32 box, u32 pid, what the create message said for
 * it, and the socket, for each box; 'D' u32 0. First of all to each 'W' u32 0, the way of mounts (see mounts.c; 'n':
 * none, and why) and 'i' where ids are mapped, else '-'. */
#include "box.h"
#include "hold.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FOLDERS = 16, MESSAGE_MAX = 256 * 1024 };
static struct box *boxes;
static int control;
static uint8_t message[MESSAGE_MAX];
static char *folders[MAX_FOLDERS];
static int num_folders;
static bool nested; /* not root here: in a user namespace of our own */
static bool trusted;
static int branch_ends; /* an epoll of pidfds */
static char mounts_found[512];

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

static void end_agent(struct box *box) {
    box->ending = true;
    if (box->pidfd >= 0) syscall(__NR_pidfd_send_signal, box->pidfd, SIGKILL, NULL, 0);
    else if (box->pid) kill(box->pid, SIGKILL);
}

static void forget(struct box *box) {
    for (struct box **link = &boxes; *link; link = &(*link)->next)
        if (*link == box) {
            *link = box->next;
            break;
        }
    struct box *mother = box->mother;
    if (mother && !--mother->num_branches && mother->retired) end_agent(mother);
    for (struct box *branch = boxes; branch; branch = branch->next)
        if (branch->mother == box) branch->mother = NULL;
    for (int i = 0; i < box->num_cgroups; i++) free(box->cgroups[i]);
    root_drop(&box->root);
    hold_end(box->hold);
    if (box->pidfd >= 0) close(box->pidfd);
    if (box->socket >= 0) close(box->socket);
    free(box->error);
    free(box->message);
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
        if (unified && unified_fd && *unified_fd < 0) *unified_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    return c.bad ? "broken cgroup list" : NULL;
}

/* The unified group was entered at birth; the others must be entered before the box touches memory. */
const char *box_enter_cgroups(const struct box *box, struct cursor c, bool unified_too) {
    static char text[PATH_MAX + 300];
    char number[16], path[PATH_MAX];
    int length = snprintf(number, sizeof number, "%d", box->pid);
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        const char *folder = get_str(&c, NULL);
        bool unified = get_u8(&c);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) get_str(&c, NULL), get_str(&c, NULL);
        if (unified && !unified_too) continue;
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
    part = get_str(&c, &length);
    spec->layers = (struct cursor){ (const uint8_t *)part, (const uint8_t *)part + length, false };
    get_str(&c, NULL); /* the supervisor's own words for the next one */
    return !c.bad;
}

static pid_t start(const struct box_spec *spec, int agent_fd, int unified_fd, int *go_fd) {
    int go[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, go)) return -1;
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

static int user_namespace(const struct box_spec *spec, pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    return spec->id_count > 1 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
}

static const char *hand_root(const struct box_spec *spec, struct box *box, int go_fd) {
    box->root.tmpfs = root_tmpfs(spec->disk_bytes, spec->disk_inodes);
    if (box->root.tmpfs < 0) return "mount tmpfs";
    const char *error = root_take(&box->root, spec->layers);
    if (error) return error;
    int userns = user_namespace(spec, box->pid);
    int overlay = root_overlay(&box->root, spec, userns, trusted, &error);
    if (userns >= 0) close(userns);
    if (overlay < 0) return error;
    union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { .space = { 0 } };
    struct iovec part = { "g", 1 };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    extra.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
    memcpy(CMSG_DATA(&extra.head), &overlay, sizeof overlay);
    if (sendmsg(go_fd, &head, MSG_NOSIGNAL) != 1) error = "wake the box";
    close(overlay);
    return error;
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
    if (!error) error = box_enter_cgroups(box, spec->cgroups, false);
    if (!error && geteuid() == 0) { /* as an ordinary user the box keeps the defaults */
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/oom_score_adj", box->pid);
        write_file(path, "-1000", 5);
        setpriority(PRIO_PROCESS, box->pid, -5);
    }
    if (!error) error = hand_root(spec, box, go_fd);
    if (go_fd >= 0) close(go_fd);
    if (error && box->pid > 0) {
        kill(box->pid, SIGKILL);
        waitpid(box->pid, NULL, 0);
        box->pid = 0;
    }
    return error;
}

/* A box that starts as a copy of its mother's process. */
static const char *branch(const struct box_spec *spec, struct box *box, int agent_fd, struct box *mother,
                          struct carried *carried) {
    if (!mother || !mother->hold || mother->ending) return "its parent is gone";
    carried->work_id = spec->work_id;
    carried->watch_bytes = spec->watch_bytes;
    const char *error = make_cgroups(box, spec->cgroups, NULL);
    if (!error) error = branch_make(mother->hold, box, spec, agent_fd, carried);
    if (error) return error;
    box->pidfd = syscall(__NR_pidfd_open, box->pid, 0);
    struct epoll_event event = { .events = EPOLLIN, .data.ptr = box };
    if (box->pidfd < 0 || epoll_ctl(branch_ends, EPOLL_CTL_ADD, box->pidfd, &event)) {
        kill(box->pid, SIGKILL);
        return "live fork: its end cannot be watched";
    }
    box->mother = mother;
    mother->num_branches++;
    return NULL;
}

/* ``carried`` NULL: a box of its own; else a branch of ``mother``. */
static void on_create(const uint8_t *data, size_t length, int agent_fd, int socket, struct box *mother,
                      struct carried *carried) {
    struct box_spec spec = { 0 };
    bool good = read_spec((struct cursor){ data + 1, data + length, false }, &spec);
    struct box *box = calloc(1, sizeof *box);
    if (box) box->socket = socket, box->root.tmpfs = box->pidfd = -1, box->trusted = trusted;
    const char *error = "broken create message";
    if (good && agent_fd >= 0 && box)
        error = carried ? branch(&spec, box, agent_fd, mother, carried) : create(&spec, box, agent_fd);
    if (agent_fd >= 0) close(agent_fd);
    if (box) box->message = malloc(length);
    if (!error && !box->message) error = "no memory";
    if (!box) {
        tell('E', spec.id, error, strlen(error));
        return;
    }
    box->id = spec.id;
    box->next = boxes;
    boxes = box;
    if (error) { /* told when its cgroups are gone, too */
        box->pid = 0;
        box->error = strdup(error);
        return;
    }
    memcpy(box->message, data, box->length = length);
    uint8_t pid[4];
    put_u32(pid, box->pid);
    tell('P', box->id, pid, 4);
}

static struct box *living(uint32_t id) {
    for (struct box *box = boxes; box; box = box->next)
        if (box->id == id && box->pid && !box->retired) return box;
    return NULL;
}

/* ---- snapshots */
static const char *push(struct box *box, const struct box_spec *spec, char *path, size_t size) {
    if (box->root.num_layers == MAX_LAYERS) return "it has too many layers";
    const char *error = NULL;
    int upper = root_upper(&box->root);
    if (upper < 0) return "its upper cannot be opened";
    snprintf(path, size, "/proc/%d/fd/%d", getpid(), upper);
    struct layer *layer = layer_take(path, "", 'f', upper, false); /* this one is the snapshot's */
    if (!layer) return "no memory";
    struct box_root next = box->root;
    next.generation++;
    memmove(next.layers + 1, next.layers, next.num_layers++ * sizeof *next.layers);
    next.layers[0] = layer;
    int userns = user_namespace(spec, box->pid);
    int overlay = root_overlay(&next, spec, userns, trusted, &error);
    if (userns >= 0) close(userns);
    if (overlay >= 0) {
        error = push_mount(box->pid, overlay, spec->ops);
        close(overlay);
        if (error) kill(box->pid, SIGKILL); /* half moved: nobody may see it */
    }
    box->root.generation = next.generation; /* also of a failed try: its folders exist */
    if (error) {
        layer_drop(layer);
        return error;
    }
    layer->references++;
    box->root = next;
    return NULL;
}

/* A group that names the box's processes, whatever its hierarchy. */
static const char *group_of(const struct box *box) { return box->num_cgroups ? box->cgroups[0] : NULL; }

/* After the path of a new layer: where its folder is, that of the upper before this one. */
static size_t add_place(const struct box *box, char *answer, size_t size) {
    size_t length = strlen(answer);
    return length + snprintf(answer + length, size - length, "%c/proc/%d/fd/%d%cupper%u", 0, getpid(), box->root.tmpfs, 0,
                             box->root.generation - 1);
}

static void on_snapshot(uint32_t id) {
    char answer[512] = "y";
    struct box *box = living(id);
    struct box_spec spec = { 0 };
    const char *error = "it is gone", *busy = box ? push_refusal(box->pid, group_of(box), 0) : NULL;
    if (busy) {
        int length = snprintf(answer, sizeof answer, "c/proc/%d/fd/%d%cupper%u%c%s", getpid(), box->root.tmpfs, 0,
                              box->root.generation, 0, busy);
        tell('S', id, answer, length);
        return;
    }
    if (box && read_spec((struct cursor){ box->message + 1, box->message + box->length, false }, &spec))
        error = push(box, &spec, answer + 1, sizeof answer - 1);
    if (error) snprintf(answer, sizeof answer, "n%s", error);
    tell('S', id, answer, error ? strlen(answer) : add_place(box, answer, sizeof answer));
}

/* ``count`` layers of a box from ``first`` on are one, ``path``: its next root is made of that. */
static void on_merged(uint32_t id, const char *path, const char *first, uint32_t count) {
    struct box *box = living(id);
    struct layer *layer = layer_find(path);
    if (!box || !layer) return;
    struct box_root *root = &box->root;
    int at = 0;
    while (at < root->num_layers && strcmp(root->layers[at]->path, first)) at++;
    if (count < 1 || count > (uint32_t)(root->num_layers - at)) return;
    layer->references++;
    for (uint32_t i = 0; i < count; i++) layer_drop(root->layers[at + i]);
    root->layers[at] = layer;
    memmove(root->layers + at + 1, root->layers + at + count, (root->num_layers - at - count) * sizeof *root->layers);
    root->num_layers -= count - 1;
}

/* Stops a box and makes its files a layer, for branches that follow. */
static void on_still(uint32_t id, pid_t inner) {
    char answer[512] = "y";
    bool busy = false;
    struct box *box = living(id);
    struct box_spec spec = { 0 };
    const char *error = box && !box->hold ? NULL : "it is gone";
    if (!error && (box->hold = hold_take(box->pid, group_of(box), inner, &error, &busy))) {
        if (root_untouched(&box->root)) { } /* its layers are its files: many forks make no deep stack */
        else if ((error = push_refusal(box->pid, group_of(box), box->hold->target))) { }
        else if (!read_spec((struct cursor){ box->message + 1, box->message + box->length, false }, &spec)) error = "no spec";
        else if (!(error = push(box, &spec, answer + 1, sizeof answer - 1)) && (error = hold_return_folder(box->hold)))
            end_agent(box); /* half moved: nobody may see it */
        if (error) hold_end(box->hold), box->hold = NULL;
    }
    if (error) snprintf(answer, sizeof answer, "%c%s", busy ? 'b' : 'n', error);
    tell('L', id, answer, error || !answer[1] ? strlen(answer) : add_place(box, answer, sizeof answer));
}

static void on_branch(const uint8_t *data, size_t length, int agent_fd, int socket) {
    struct cursor c = { data + 1, data + length, false };
    struct box *mother = living(get_u32(&c));
    struct carried carried = { 0 };
    carried.id = get_u32(&c);
    carried.timeout_ms = get_u32(&c);
    on_create(c.at, c.end - c.at, agent_fd, socket, mother, &carried);
}

static void on_hold(uint32_t id, const char *folder) {
    char answer[512];
    int fd = syscall(__NR_open_tree, AT_FDCWD, folder, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    snprintf(answer, sizeof answer, "y/proc/%d/fd/%d", getpid(), fd);
    if (fd < 0 || !layer_take(answer + 1, "", 'f', fd, false)) snprintf(answer, sizeof answer, "nhold: %s", strerror(errno));
    tell('S', id, answer, strlen(answer));
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

/* Branches end on their own: their agents are not our children. */
static void reap_branches(void) {
    struct epoll_event events[16];
    for (int count; (count = epoll_wait(branch_ends, events, 16, 0)) > 0;)
        for (int i = 0; i < count; i++) {
            struct box *box = events[i].data.ptr;
            epoll_ctl(branch_ends, EPOLL_CTL_DEL, box->pidfd, NULL);
            box->pid = 0;
            box->status = SIGKILL;
        }
}

/* A box with branches ends but for its agent, in whose namespaces they live: it stands still until the last is gone. */
static void retire(struct box *box) {
    char path[PATH_MAX], line[32];
    hold_end(box->hold);
    box->hold = NULL;
    kill(box->pid, SIGSTOP);
    snprintf(path, sizeof path, "%s/cgroup.procs", group_of(box));
    for (int tries = 0, left = 1; left && tries < 500; tries++) {
        FILE *members = fopen(path, "re");
        left = 0;
        while (members && fgets(line, sizeof line, members)) {
            pid_t pid = atoi(line);
            if (pid > 0 && pid != box->pid && !kill(pid, SIGKILL)) left++;
        }
        if (members) fclose(members);
        if (left) usleep(tries < 20 ? 50 : 1000);
    }
    root_drop(&box->root);
    if (box->socket >= 0) close(box->socket);
    box->socket = -1;
    box->retired = true;
    uint8_t status[4];
    put_u32(status, SIGKILL);
    tell('G', box->id, status, 4);
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
        root_drop(&box->root);
        uint8_t status[4];
        put_u32(status, box->status);
        if (box->error) tell('E', box->id, box->error, strlen(box->error));
        else if (!box->retired) tell('G', box->id, status, 4);
        forget(box);
    }
    return waiting;
}

/* 0: go on, 1: the supervisor is gone, 2: end. */
static int on_control(void) {
    union { struct cmsghdr head; char space[CMSG_SPACE(2 * sizeof(int))]; } extra;
    struct iovec part = { message, sizeof message };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra, .msg_controllen = sizeof extra };
    ssize_t length = recvmsg(control, &head, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0) return errno != EAGAIN && errno != EINTR;
    if (length == 0) return 1;
    int fds[2] = { -1, -1 };
    struct cmsghdr *rights = CMSG_FIRSTHDR(&head);
    if (rights && rights->cmsg_type == SCM_RIGHTS) memcpy(fds, CMSG_DATA(rights), rights->cmsg_len - CMSG_LEN(0));
    struct cursor c = { message, message + length, false };
    uint8_t kind = get_u8(&c);
    struct box *box;
    struct layer *layer;
    switch (kind) {
    case 'C': on_create(message, length, fds[0], fds[1], NULL, NULL); break;
    case 'B': on_branch(message, length, fds[0], fds[1]); break;
    case 'K':
        if ((box = living(get_u32(&c)))) box->num_branches ? retire(box) : end_agent(box);
        break;
    case 'L': {
        uint32_t id = get_u32(&c);
        on_still(id, get_u32(&c));
        break;
    }
    case 'l':
        if ((box = living(get_u32(&c)))) hold_end(box->hold), box->hold = NULL;
        break;
    case 'S': on_snapshot(get_u32(&c)); break;
    case 'H': {
        uint32_t id = get_u32(&c);
        on_hold(id, get_str(&c, NULL));
        break;
    }
    case 'M': {
        uint32_t id = get_u32(&c);
        const char *path = get_str(&c, NULL), *first = get_str(&c, NULL);
        uint32_t count = get_u32(&c);
        if (!c.bad) on_merged(id, path, first, count);
        break;
    }
    case '+':
        if ((layer = layer_find(get_str(&c, NULL)))) layer->references++;
        break;
    case 'R':
        if ((layer = layer_find(get_str(&c, NULL)))) layer_drop(layer);
        break;
    case 'O':
        if (num_folders < MAX_FOLDERS) folders[num_folders++] = strdup(get_str(&c, NULL));
        break;
    case 'X': return 2;
    }
    return 0;
}

/* ---- the next supervisor */
static int take_over(int listener, int *owner) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (fd < 0) return -1;
    int held = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) ? -1 : (int)syscall(__NR_pidfd_open, peer.pid, 0);
    if (*owner >= 0 || held < 0 || (peer.uid != geteuid() && peer.uid != 0)) { /* one supervisor at a time */
        if (held >= 0) close(held);
        close(fd);
        return -1;
    }
    *owner = held;
    return fd;
}

static void tell_all(void) {
    static uint8_t out[MESSAGE_MAX + 16];
    uint8_t own[4];
    put_u32(own, getpid());
    tell('V', PROTOCOL, own, 4);
    tell('W', 0, mounts_found, strlen(mounts_found));
    for (struct box *box = boxes; box; box = box->next) {
        if (!box->pid || box->socket < 0) continue;
        struct cursor c = { box->message + 1, box->message + box->length, false };
        struct box_spec spec;
        read_spec(c, &spec);
        uint32_t length;
        struct cursor tail = { spec.layers.end + 1, box->message + box->length, false };
        const char *words = get_str(&tail, &length);
        out[0] = 'A';
        put_u32(out + 1, box->id);
        put_u32(out + 5, box->pid);
        memcpy(out + 9, words, length);
        union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { .space = { 0 } };
        struct iovec part = { out, 9 + length };
        struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra,
                               .msg_controllen = sizeof extra };
        extra.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
                                       .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(&extra.head), &box->socket, sizeof(int));
        if (sendmsg(control, &head, MSG_NOSIGNAL) < 0) return;
    }
    tell('D', 0, NULL, 0);
}

static void end_all(void) {
    for (struct box *box = boxes; box; box = box->next)
        if (box->pid) hold_end(box->hold), box->hold = NULL, end_agent(box);
    for (struct box *box = boxes; box; box = box->next)
        if (box->pid) {
            struct pollfd end = { box->pidfd, POLLIN, 0 };
            if (box->pidfd < 0) waitpid(box->pid, &box->status, 0);
            else poll(&end, 1, 5000); /* with the agent in whose namespaces it is */
            box->pid = 0;
        }
    while (bury()) usleep(1000);
}

/* Not root of the machine: mounts are ours to make in a user namespace of our own, with our one id. */
static bool enter_namespaces(void) {
    char line[64];
    int uid = geteuid(), gid = getegid();
    if (unshare(CLONE_NEWNS | (nested ? CLONE_NEWUSER : 0))) return false;
    if (nested) {
        write_file("/proc/self/setgroups", "deny", 4);
        int length = snprintf(line, sizeof line, "%d %d 1", gid, gid);
        if (!write_file("/proc/self/gid_map", line, length)) return false;
        length = snprintf(line, sizeof line, "%d %d 1", uid, uid);
        if (!write_file("/proc/self/uid_map", line, length)) return false;
    }
    return !mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL);
}

/* ``ways``: see mounts.c; an 'i' among them maps ids where the kernel does. The supervisor hears what was found. */
static void probe_mounts(const char *ways, const char *folder) {
    bool maps = !nested && strchr(ways, 'i');
    char found = 0, wanted[4] = "";
    for (const char *each = ways; *each && strlen(wanted) < 3; each++)
        if (*each != 'i') strncat(wanted, each, 1);
    const char *error = mounts_probe(wanted, folder, trusted, nested ? NULL : &maps, &found);
    int length = snprintf(mounts_found, sizeof mounts_found, "%c%c%s", error ? 'n' : found, maps ? 'i' : '-',
                          error ? error : "");
    tell('W', 0, mounts_found, length);
}

/* The supervisor's own cgroup folders, which hold its boxes', go last. ``listener`` -1: boxes die with it. */
int keeper_main(int control_fd, pid_t supervisor, bool one_id, int listener, int grace_s, const char *ways,
                const char *folder) {
    control = control_fd;
    nested = one_id;
    char all[64] = "";
    unsigned first = 1, mapped = 1, count = 0;
    trusted = !nested && read_small("/proc/self/uid_map", all, sizeof all) &&
              sscanf(all, "%u %u %u", &first, &mapped, &count) == 3 && !first && !mapped && count == ~0u;
    int owner = syscall(__NR_pidfd_open, supervisor, 0);
    if (owner < 0 || getppid() != supervisor) return 1;
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    fcntl(control, F_SETFD, FD_CLOEXEC);
    sigset_t mask;
    sigfillset(&mask);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    branch_ends = epoll_create1(EPOLL_CLOEXEC);
    int signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    prctl(PR_SET_NAME, "tandem-keeper");
    if (!enter_namespaces()) return 3;
    probe_mounts(ways, folder);
    bool waiting = false;
    int64_t end_us = INT64_MAX; /* of the grace */
    for (;;) {
        struct pollfd sources[5] = { { control, POLLIN, 0 }, { signals, POLLIN, 0 }, { owner, POLLIN, 0 },
                                     { listener, POLLIN, 0 }, { branch_ends, POLLIN, 0 } };
        int wait = waiting ? 2 : end_us == INT64_MAX ? -1 : 200;
        if (poll(sources, 5, wait) < 0 && errno != EINTR) break;
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) > 0) { }
        reap();
        reap_branches();
        int verdict = owner >= 0 && sources[0].revents ? on_control() : 0;
        waiting = bury();
        if (verdict == 2 || now_us() > end_us) break;
        if (owner >= 0 && (verdict == 1 || sources[2].revents)) {
            if (listener < 0) break;
            close(control);
            close(owner);
            control = owner = -1;
            for (struct box *box = boxes; box; box = box->next) hold_end(box->hold), box->hold = NULL;
            end_us = now_us() + grace_s * 1000000ll;
        }
        if (listener >= 0 && sources[3].revents) {
            int fd = take_over(listener, &owner);
            if (fd >= 0) {
                control = fd;
                end_us = INT64_MAX;
                tell_all();
            }
        }
    }
    end_all();
    while (num_folders) rmdir(folders[--num_folders]);
    return 0;
}
