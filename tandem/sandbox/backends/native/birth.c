/* Keeper side: one box is made. Its groups, its namespaces, its ids and its root; what it makes of them itself is in
 * setup.c. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

const char *box_make_cgroups(struct box *box, struct cursor c, int *unified_fd) {
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

/* For a process that is there already. */
const char *box_enter_cgroups(const struct box *box, struct cursor c) {
    static char text[PATH_MAX + 300];
    char number[16], path[PATH_MAX];
    int length = snprintf(number, sizeof number, "%d", box->pid);
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        const char *folder = get_str(&c, NULL);
        get_u8(&c);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) get_str(&c, NULL), get_str(&c, NULL);
        snprintf(path, sizeof path, "%s/cgroup.procs", folder);
        if (!write_file(path, number, length)) {
            snprintf(text, sizeof text, "enter cgroup %s: %s", folder, strerror(errno));
            return text;
        }
    }
    return NULL;
}

/* The unified group is entered at birth. Into those of version 1 a box moves itself, by "0" and as a thread: that alone
 * needs no lock over all processes of the machine, which after a pause costs a grace period of the kernel's (7 ms and
 * more). The right to do so is the keeper's, who opened the files. ``entries`` ends with -1. */
static const char *open_entries(struct cursor c, int *entries) {
    static char text[PATH_MAX + 300];
    char path[PATH_MAX];
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        const char *folder = get_str(&c, NULL);
        bool unified = get_u8(&c);
        for (uint32_t writes = get_u32(&c); writes && !c.bad; writes--) get_str(&c, NULL), get_str(&c, NULL);
        if (unified) continue;
        snprintf(path, sizeof path, "%s/tasks", folder);
        if ((*entries = open(path, O_WRONLY | O_CLOEXEC)) < 0) {
            snprintf(text, sizeof text, "open %s: %s", path, strerror(errno));
            return text;
        }
        *++entries = -1;
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

bool box_read_spec(struct cursor c, struct box_spec *spec) {
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

static pid_t start(const struct box_spec *spec, int agent_fd, int unified_fd, const int *entries, int *go_fd) {
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
    /* What the kernel counts for a user (inotify's instances, namespaces) counts for the maker of his user namespace, too:
     * a box's root is its own maker, or one box would leave nothing to the others. */
    pid_t pid = root_become(spec) ? (pid_t)syscall(__NR_clone3, &arguments, sizeof arguments) : -1;
    if (pid == 0) {
        close(go[1]); /* so that the keeper's death ends the wait */
        box_main(spec, agent_fd, go[0], entries);
    }
    int error = errno;
    root_return();
    close(go[0]);
    if (pid < 0) close(go[1]);
    else *go_fd = go[1];
    errno = error;
    return pid;
}

int box_user_namespace(const struct box_spec *spec, pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    return spec->id_count > 1 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
}

static const char *hand_root(const struct box_spec *spec, struct box *box, int go_fd) {
    box->root.tmpfs = root_tmpfs(spec->disk_bytes, spec->disk_inodes);
    if (box->root.tmpfs < 0) return "mount tmpfs";
    const char *error = root_take(&box->root, spec->layers);
    if (error) return error;
    int userns = box_user_namespace(spec, box->pid);
    int overlay = root_overlay(&box->root, spec, userns, box->trusted, &error);
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

const char *box_make(const struct box_spec *spec, struct box *box, int agent_fd) {
    static char text[160];
    int unified_fd = -1, go_fd = -1, entries[MAX_CGROUPS + 1] = { -1 };
    const char *error = box_make_cgroups(box, spec->cgroups, &unified_fd);
    if (!error) error = open_entries(spec->cgroups, entries);
    if (!error) {
        box->pid = start(spec, agent_fd, unified_fd, entries, &go_fd);
        if (box->pid < 0) {
            snprintf(text, sizeof text, "make namespaces: %s", strerror(errno));
            error = text;
        }
    }
    if (unified_fd >= 0) close(unified_fd);
    for (const int *entry = entries; *entry >= 0; entry++) close(*entry);
    if (!error) error = map_ids(spec, box->pid);
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
