/* Keeper side: the O(1) snapshot. A box at rest gets a new, empty upper over its old one, which nothing can write
 * any more: a new overlay is put in place of the old root, with everything that was mounted on it, and the old one is
 * made read-only by the kernel. That fails where anything of it is open for writing, also a mapping without a
 * descriptor or a descriptor on its way through a socket; and whoever kept a way to an old file cannot open it for
 * writing later. Processes keep their working folders only where these are the root itself or lie on other mounts;
 * push_refusal looks. */
#include "box.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char text[512];

static bool same_namespace(const char *pid, ino_t space) {
    char path[64];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%.16s/ns/mnt", pid);
    return !stat(path, &info) && info.st_ino == space;
}

/* What of a process lies on the old root and would be stale: its working folder (unless it is the root), folders that
 * it holds. What it reads stays as it was. */
static const char *look(const char *pid, dev_t device, ino_t root, pid_t movable) {
    char path[400];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%.16s/cwd", pid);
    if (atoi(pid) != movable && !stat(path, &info) && info.st_dev == device && info.st_ino != root) return "the working folder of a process";
    snprintf(path, sizeof path, "/proc/%.16s/fd", pid);
    DIR *folder = opendir(path);
    const char *found = NULL;
    struct dirent *entry;
    while (folder && !found && (entry = readdir(folder))) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        snprintf(path, sizeof path, "/proc/%.16s/fd/%.16s", pid, entry->d_name);
        if (!stat(path, &info) && info.st_dev == device && S_ISDIR(info.st_mode)) found = "a folder that a process holds open";
    }
    if (folder) closedir(folder);
    return found;
}

/* The mount of a box's root becomes read-only, or writable again. Its processes are at rest. */
static const char *turn(pid_t agent, unsigned long read_only) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", agent);
    int space = open(path, O_RDONLY | O_CLOEXEC), status = 0;
    if (space < 0) return "the box is gone";
    unsigned long flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | read_only;
    pid_t pid = vfork(); /* two calls, and no copy of the page tables */
    if (pid == 0) _exit(setns(space, CLONE_NEWNS) || mount(NULL, "/", NULL, flags, NULL) ? errno : 0);
    close(space);
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return "a helper process failed";
    if (!WEXITSTATUS(status)) return NULL;
    if (WEXITSTATUS(status) == EBUSY) return "a file that a process writes";
    snprintf(text, sizeof text, "its root does not become read-only: %s", strerror(WEXITSTATUS(status)));
    return text;
}

/* Processes of the box that would keep something stale. ``cgroup`` NULL: there is none, and all processes of the machine
 * are asked for their mounts. */
static const char *stale(pid_t agent, const char *cgroup, pid_t movable) {
    char path[64];
    struct stat info, root;
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", agent);
    if (stat(path, &info)) return "the box is gone";
    snprintf(path, sizeof path, "/proc/%d/root/", agent);
    if (stat(path, &root)) return "the box is gone";
    const char *found = NULL;
    if (cgroup) {
        char name[4096], line[32];
        snprintf(name, sizeof name, "%s/cgroup.procs", cgroup);
        FILE *members = fopen(name, "re");
        while (members && !found && fgets(line, sizeof line, members)) {
            line[strcspn(line, "\n")] = 0;
            found = look(line, root.st_dev, root.st_ino, movable);
        }
        if (!members) return "its group cannot be read";
        fclose(members);
        return found;
    }
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    while (folder && !found && (entry = readdir(folder)))
        if (isdigit((unsigned char)entry->d_name[0]) && same_namespace(entry->d_name, info.st_ino))
            found = look(entry->d_name, root.st_dev, root.st_ino, movable);
    if (folder) closedir(folder);
    return found;
}

const char *push_refusal(pid_t agent, const char *cgroup, pid_t movable) {
    const char *found = stale(agent, cgroup, movable);
    return found ? found : turn(agent, MS_RDONLY);
}

static int steps(int space, int overlay, struct cursor c) {
    if (setns(space, CLONE_NEWNS)) return 1;
    /* Held until this process ends: taking a large root apart takes milliseconds, and nobody waits for it. */
    if (open("/", O_PATH | O_DIRECTORY) < 0) return 1;
    if (syscall(__NR_move_mount, overlay, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH)) return 2;
    for (uint32_t count = get_u32(&c); count && !c.bad; count--) {
        uint8_t kind = get_u8(&c);
        const char *path = get_str(&c, NULL);
        get_str(&c, NULL);
        get_u32(&c);
        char old[4096];
        if (kind != 'b' && kind != 'n' && kind != 'p' && kind != 't') continue;
        snprintf(old, sizeof old, "/%s", path);
        if (syscall(__NR_move_mount, AT_FDCWD, old, overlay, path, 0)) return 3;
    }
    if (fchdir(overlay)) return 4;
    if (syscall(__NR_pivot_root, ".", ".")) return 5;
    return umount2(".", MNT_DETACH) ? 6 : 0;
}

static const char *push_mount(pid_t agent, int overlay, struct cursor ops) {
    static const char *const names[] = { "", "enter its mounts", "mount the root", "move a mount", "enter the root",
                                         "pivot_root", "leave the old root" };
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", agent);
    int space = open(path, O_RDONLY | O_CLOEXEC), told[2];
    if (space < 0 || pipe2(told, O_CLOEXEC)) return "the box is gone";
    pid_t pid = fork();
    if (pid == 0) {
        int step = steps(space, overlay, ops), answer[2] = { step, errno };
        _exit(write(told[1], answer, sizeof answer) == sizeof answer && !step ? 0 : 1);
    }
    close(told[1]);
    close(space);
    int answer[2] = { 1, EPROTO };
    bool heard = pid > 0 && read(told[0], answer, sizeof answer) == sizeof answer;
    close(told[0]);
    if (heard && !answer[0]) return NULL;
    snprintf(text, sizeof text, "%s: %s", heard ? names[answer[0]] : "a helper process", strerror(answer[1]));
    return text;
}

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
    int userns = box_user_namespace(spec, box->pid);
    int overlay = root_overlay(&next, spec, userns, box->trusted, &error);
    if (userns >= 0) close(userns);
    if (overlay >= 0) {
        error = push_mount(box->pid, overlay, spec->ops);
        close(overlay);
        if (error) kill(box->pid, SIGKILL); /* half moved: nobody may see it */
    }
    if (error) {
        layer_drop(layer);
        return error;
    }
    layer->references++;
    box->root = next;
    return NULL;
}

const char *push_layer(struct box *box, const struct box_spec *spec, char *path, size_t size) {
    const char *error = push(box, spec, path, size);
    if (error) turn(box->pid, 0);
    return error;
}
