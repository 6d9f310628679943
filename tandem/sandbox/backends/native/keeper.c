/* The keeper: a small process beside the supervisor that makes boxes and buries them. It dies with the
 * supervisor (a pidfd tells it, however the supervisor went), and its boxes die with it: it removes their
 * cgroups on the way out, so that even a SIGKILLed supervisor leaves nothing.
 *
 * With a listening socket it instead keeps all boxes for a grace time and gives them to the next supervisor.
 *
 * Control socket (SOCK_SEQPACKET). To the keeper: 'C' create + agent socket + supervisor's end of it, 'K' u32 box, 'S'
 * u32 box (at rest: make its upper a layer), 'L' u32 box, u32 process (stop it for a live fork), 'B' u32 box, u32
 * command, u32 timeout_ms, and all of a 'C' (a branch of it, with its process as this command), 'l' u32 box (go on),
 * 'H' u32 box, str (make this folder one), 'M' u32 box, str, str, u32 (see snapshots.c), 'R' str (a layer is held by
 * one less), '+' str (by one more), 'O' str (a cgroup folder of the supervisor), 'X' (end, whoever listens). From it:
 * 'P' u32 box, u32 pid; 'E' u32 box, text (no box was made); 'L' u32 box, 'y' and the layer's path, (none: nothing new
 * was written), or 'b' (not now) or 'n' and why; 'S' u32 box, 'y' and the layer's path, or 'n' (nothing happened) and
 * why, or 'c' (copy it), tmpfs, upper and why; 'G' u32 box, u32 wait status (gone, cgroups removed); to a later
 * supervisor 'V' u32 protocol, u32 keeper's pid, 'A' u32 box, u32 pid, what the create message said for it, and the
 * socket, for each box; 'D' u32 0. First of all to each 'W' u32 0, the way of mounts (see mounts.c; 'n': none, and why)
 * and 'i' where ids are mapped, else '-'. */
#include "box.h"
#include "hold.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
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
#include <sys/syscall.h>
#include <sys/wait.h>
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

void keeper_tell(char kind, uint32_t id, const void *data, size_t length) {
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

/* A box that starts as a copy of its mother's process. */
static const char *branch(const struct box_spec *spec, struct box *box, int agent_fd, struct box *mother,
                          struct carried *carried) {
    if (!mother || !mother->hold || mother->ending) return "its parent is gone";
    carried->work_id = spec->work_id;
    carried->watch_bytes = spec->watch_bytes;
    const char *error = box_make_cgroups(box, spec->cgroups, NULL);
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
    bool good = box_read_spec((struct cursor){ data + 1, data + length, false }, &spec);
    struct box *box = calloc(1, sizeof *box);
    if (box) box->socket = socket, box->root.tmpfs = box->pidfd = -1, box->trusted = trusted;
    const char *error = "broken create message";
    if (good && agent_fd >= 0 && box)
        error = carried ? branch(&spec, box, agent_fd, mother, carried) : box_make(&spec, box, agent_fd);
    if (agent_fd >= 0) close(agent_fd);
    if (box) box->message = malloc(length);
    if (!error && !box->message) error = "no memory";
    if (!box) {
        keeper_tell('E', spec.id, error, strlen(error));
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
    keeper_tell('P', box->id, pid, 4);
}

struct box *keeper_box(uint32_t id) {
    for (struct box *box = boxes; box; box = box->next)
        if (box->id == id && box->pid && !box->retired) return box;
    return NULL;
}

/* A group that names the box's processes, whatever its hierarchy. */
const char *box_group(const struct box *box) { return box->num_cgroups ? box->cgroups[0] : NULL; }

/* Stops a box and makes its files a layer, for branches that follow. */
static void on_still(uint32_t id, pid_t inner) {
    char answer[512] = "y";
    bool busy = false;
    struct box *box = keeper_box(id);
    struct box_spec spec = { 0 };
    const char *error = box && !box->hold ? NULL : "it is gone";
    if (!error && (box->hold = hold_take(box->pid, box_group(box), inner, &error, &busy))) {
        if (root_untouched(&box->root)) { } /* its layers are its files: many forks make no deep stack */
        else if ((error = push_refusal(box->pid, box_group(box), box->hold->target))) { }
        else if (!box_read_spec((struct cursor){ box->message + 1, box->message + box->length, false }, &spec)) error = "no spec";
        else if (!(error = push_layer(box, &spec, answer + 1, sizeof answer - 1)) && (error = hold_return_folder(box->hold)))
            end_agent(box); /* half moved: nobody may see it */
        if (error) hold_end(box->hold), box->hold = NULL;
    }
    if (error) snprintf(answer, sizeof answer, "%c%s", busy ? 'b' : 'n', error);
    keeper_tell('L', id, answer, error || !answer[1] ? strlen(answer) : snapshot_place(box, answer, sizeof answer));
}

static void on_branch(const uint8_t *data, size_t length, int agent_fd, int socket) {
    struct cursor c = { data + 1, data + length, false };
    struct box *mother = keeper_box(get_u32(&c));
    struct carried carried = { 0 };
    carried.id = get_u32(&c);
    carried.timeout_ms = get_u32(&c);
    on_create(c.at, c.end - c.at, agent_fd, socket, mother, &carried);
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
    snprintf(path, sizeof path, "%s/cgroup.procs", box_group(box));
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
    keeper_tell('G', box->id, status, 4);
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
        uint32_t id = box->id;
        bool told = box->retired;
        char *error = box->error;
        put_u32(status, box->status);
        box->error = NULL;
        forget(box); /* first: who hears of its end finds nothing of it, our descriptors neither */
        if (error) keeper_tell('E', id, error, strlen(error));
        else if (!told) keeper_tell('G', id, status, 4);
        free(error);
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
        if ((box = keeper_box(get_u32(&c)))) box->num_branches ? retire(box) : end_agent(box);
        break;
    case 'L': {
        uint32_t id = get_u32(&c);
        on_still(id, get_u32(&c));
        break;
    }
    case 'l':
        if ((box = keeper_box(get_u32(&c)))) hold_end(box->hold), box->hold = NULL;
        break;
    case 'S': snapshot_take(get_u32(&c)); break;
    case 'H': {
        uint32_t id = get_u32(&c);
        snapshot_hold(id, get_str(&c, NULL));
        break;
    }
    case 'M': {
        uint32_t id = get_u32(&c);
        const char *path = get_str(&c, NULL), *first = get_str(&c, NULL);
        uint32_t count = get_u32(&c);
        if (!c.bad) snapshot_merged(id, path, first, count);
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

/* ``ways``: see mounts.c; an 'i' among them maps ids where the kernel does. The supervisor hears what was found. */
static void probe_mounts(const char *ways, const char *folder) {
    bool maps = !nested && strchr(ways, 'i');
    char found = 0, wanted[4] = "";
    for (const char *each = ways; *each && strlen(wanted) < 3; each++)
        if (*each != 'i') strncat(wanted, each, 1);
    const char *error = mounts_probe(wanted, folder, trusted, nested ? NULL : &maps, &found);
    int length = snprintf(mounts_found, sizeof mounts_found, "%c%c%s", error ? 'n' : found, maps ? 'i' : '-',
                          error ? error : "");
    keeper_tell('W', 0, mounts_found, length);
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
    if (!mounts_alone(nested)) return 3;
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
            int fd = handover_accept(listener, &owner);
            if (fd >= 0) {
                control = fd;
                end_us = INT64_MAX;
                handover_tell(control, boxes, mounts_found);
            }
        }
    }
    end_all();
    while (num_folders) rmdir(folders[--num_folders]);
    return 0;
}
