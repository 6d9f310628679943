/* Keeper side: how mounts become the parts of an overlay on this kernel. Linux 6.15 takes detached mounts as they
 * are. Before it a part must be a mount of the keeper's own namespace: each then hangs in a tmpfs that only the
 * keeper has, over an empty folder (not over "/": who has something there makes no user namespaces). Where an overlay has no ``lowerdir+`` (before 6.7) the parts go into one
 * option string: as short names relative to that folder, since mount(2) takes 4 KiB. Nothing here asks for a version:
 * ``mounts_probe`` tries. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONFIG_FLAG = 0, CONFIG_STRING = 1, CONFIG_CREATE = 6, OPTIONS_MAX = 4096 };
enum { PROBE_ID = 0x10000000, PROBE_IDS = 65536 };

static char way = MOUNTS_DETACHED;
static bool maps_ids;
static int hidden = -1;
static char place[4096]; /* the empty folder */
static char reason[256]; /* the overlay's own, of the last try */

bool mount_set(int context, const char *key, const char *value) {
    return !syscall(__NR_fsconfig, context, value ? CONFIG_STRING : CONFIG_FLAG, key, value, 0);
}

/* The detached mount that a context was set up for; -1 and errno. Takes the context. */
int mount_made(int context, uint64_t attributes) {
    int fd = -1;
    if (!syscall(__NR_fsconfig, context, CONFIG_CREATE, NULL, NULL, 0))
        fd = syscall(__NR_fsmount, context, FSMOUNT_CLOEXEC, attributes);
    int error = errno;
    if (fd < 0) {
        ssize_t length = read(context, reason, sizeof reason - 1);
        reason[length > 0 ? length : 0] = 0;
    }
    close(context);
    errno = error;
    return fd;
}

int mount_copy(int place, const char *path) {
    return syscall(__NR_open_tree, place, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (*path ? 0 : AT_EMPTY_PATH));
}

static int open_hidden(void) {
    if (hidden >= 0) return 0;
    int context = syscall(__NR_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (context < 0) return -1;
    mount_set(context, "mode", "0700");
    int fd = mount_made(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    if (fd < 0) return -1;
    if (syscall(__NR_move_mount, fd, "", AT_FDCWD, place, MOVE_MOUNT_F_EMPTY_PATH)) {
        close(fd);
        return -1;
    }
    hidden = fd;
    return 0;
}

/* A mount to be used as a part or to make parts from: where it must be attached it is. Returns it; -1, errno, and it
 * is closed. */
int mounts_keep(int fd) {
    char name[16];
    if (way == MOUNTS_DETACHED || fd < 0) return fd;
    snprintf(name, sizeof name, "%d", fd);
    if (!open_hidden() && (!mkdirat(hidden, name, 0700) || errno == EEXIST) &&
        !syscall(__NR_move_mount, fd, "", hidden, name, MOVE_MOUNT_F_EMPTY_PATH))
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

void mounts_lose(int fd) {
    if (way != MOUNTS_DETACHED && hidden >= 0) {
        char name[16], path[64];
        snprintf(name, sizeof name, "%d", fd);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        umount2(path, MNT_DETACH);
        unlinkat(hidden, name, AT_REMOVEDIR);
    }
    close(fd);
}

/* ``parts``: lower ones top first, then the upper's mount. */
static int by_context(const int *parts, int num_lower, const char *upper, const char *work, bool trusted) {
    char text[160];
    int context = syscall(__NR_fsopen, "overlay", FSOPEN_CLOEXEC);
    if (context < 0) return -1;
    bool good = true;
    for (int i = 0; good && i < num_lower; i++) {
        snprintf(text, sizeof text, "/proc/self/fd/%d", parts[i]);
        good = mount_set(context, "lowerdir+", text);
    }
    snprintf(text, sizeof text, "/proc/self/fd/%d/%s", parts[num_lower], upper);
    good = good && mount_set(context, "upperdir", text);
    snprintf(text, sizeof text, "/proc/self/fd/%d/%s", parts[num_lower], work);
    good = good && mount_set(context, "workdir", text) && mount_set(context, "volatile", NULL);
    if (good && !trusted) good = mount_set(context, "userxattr", NULL);
    if (good && trusted) good = mount_set(context, "redirect_dir", "off") && mount_set(context, "metacopy", "off");
    if (good) return mount_made(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int error = errno;
    close(context);
    errno = error;
    return -1;
}

static int by_string(const int *parts, int num_lower, const char *upper, const char *work, bool trusted) {
    char options[OPTIONS_MAX];
    size_t length = 0;
    for (int i = 0; i < num_lower && length < sizeof options; i++)
        length += snprintf(options + length, sizeof options - length, "%s%d", i ? ":" : "lowerdir=", parts[i]);
    if (length < sizeof options)
        length += snprintf(options + length, sizeof options - length, ",upperdir=%d/%s,workdir=%d/%s,volatile,%s",
                           parts[num_lower], upper, parts[num_lower], work,
                           trusted ? "redirect_dir=off,metacopy=off" : "userxattr");
    if (length >= sizeof options) {
        errno = E2BIG;
        return -1;
    }
    int fd = -1, error;
    if (fchdir(hidden)) return -1;
    if ((!mkdir("made", 0700) || errno == EEXIST) &&
        !mount("overlay", "made", "overlay", MS_NOSUID | MS_NODEV, options)) {
        fd = mount_copy(AT_FDCWD, "made");
        error = errno;
        umount2("made", MNT_DETACH);
        errno = error;
    }
    error = errno;
    if (chdir("/") && fd >= 0) close(fd), fd = -1;
    errno = error;
    return fd;
}

int mounts_overlay(const int *parts, int num_lower, const char *upper, const char *work, bool trusted) {
    reason[0] = 0;
    return way == MOUNTS_STRING ? by_string(parts, num_lower, upper, work, trusted)
                                : by_context(parts, num_lower, upper, work, trusted);
}

const char *mounts_reason(void) { return reason; }

bool mounts_map_ids(void) { return maps_ids; }

/* A process in a user namespace whose ids are mapped, for its descriptor. */
static int probe_ids(void) {
    char path[64], line[64];
    int fd = -1;
    pid_t pid = syscall(__NR_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        for (;;) pause();
    }
    if (pid < 0) return -1;
    int length = snprintf(line, sizeof line, "0 %u %u", PROBE_ID, PROBE_IDS);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    bool good = write_file(path, line, length);
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    good = good && write_file(path, line, length);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (good) fd = open(path, O_RDONLY | O_CLOEXEC);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return fd;
}

static const char *try(char candidate, int userns, bool trusted) {
    static const uint8_t nothing[4];
    static char text[512];
    way = candidate;
    maps_ids = userns >= 0;
    struct box_spec spec = { .ops = { nothing, nothing + 4, false }, .id_count = userns >= 0 ? PROBE_IDS : 1,
                             .outer_uid = PROBE_ID, .outer_gid = PROBE_ID };
    struct box_root root = { .tmpfs = root_tmpfs(1 << 20, 100) };
    const char *error = "tmpfs";
    int made = root_tmpfs(1 << 20, 100), overlay = -1;
    struct layer *layer = made < 0 ? NULL : layer_take("probe", "", 'f', made, true);
    if (layer && root.tmpfs >= 0) {
        root.layers[root.num_layers++] = layer;
        overlay = root_overlay(&root, &spec, userns, trusted, &error);
    } else if (layer) {
        layer_drop(layer);
    }
    struct statvfs info;
    if (overlay >= 0 && (fstatvfs(overlay, &info) || info.f_flag & ST_RDONLY)) error = "the overlay cannot be written";
    else if (overlay >= 0) error = NULL;
    if (overlay >= 0) close(overlay);
    snprintf(text, sizeof text, "%s", error ? error : "");
    root_drop(&root);
    root_forget_bases();
    return error ? text : NULL;
}

/* Find the way of this kernel among ``ways``, and whether it maps ids; these (``maps`` null: one id, nothing to map)
 * stay set. Returns NULL, or why there is none. */
const char *mounts_probe(const char *ways, const char *folder, bool trusted, bool *maps, char *found) {
    snprintf(place, sizeof place, "%s", folder);
    const char *error = "no way is allowed";
    int userns = maps && *maps ? probe_ids() : -1;
    for (int mapping = userns >= 0; mapping >= 0; mapping--)
        for (const char *each = ways; *each; each++) {
            error = try(*each, mapping ? userns : -1, trusted);
            if (error) continue;
            *found = *each;
            if (maps) *maps = mapping;
            if (userns >= 0) close(userns);
            return NULL;
        }
    if (userns >= 0) close(userns);
    return error;
}

/* Not root of the machine: mounts are ours to make in a user namespace of our own, with our one id. */
bool mounts_alone(bool nested) {
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
