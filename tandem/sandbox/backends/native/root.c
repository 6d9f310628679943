/* Keeper side: what a box's root is made of. An overlay: the box's own upper on its quota tmpfs, immutable layers,
 * and at the bottom a base of folders, small files and mount points that the template names. Everything is made as
 * detached mounts; a box sees only the finished overlay. Layers keep plain ids (0 to 65535) and are seen by each box
 * through its own id map, so that they can be shared. */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char problem[512];

static const char *say(const char *step, const char *what) {
    snprintf(problem, sizeof problem, "%s %.400s: %s", step, what, strerror(errno));
    return problem;
}

int root_tmpfs(uint64_t bytes, uint64_t inodes) {
    char text[32];
    int context = syscall(__NR_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (context < 0) return -1;
    mount_set(context, "mode", "0755");
    snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    if (bytes) mount_set(context, "size", text);
    snprintf(text, sizeof text, "%llu", (unsigned long long)inodes);
    if (inodes) mount_set(context, "nr_inodes", text);
    return mounts_keep(mount_made(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV));
}

/* A copy of a mount that a box with this user namespace sees with its own ids; -1 (as is): one id only. */
static int mapped(int place, const char *path, int userns, bool read_only) {
    int fd = mount_copy(place, path);
    if (fd < 0) return -1;
    struct mount_attr attributes = { .attr_set = read_only ? MOUNT_ATTR_RDONLY : 0 };
    if (userns >= 0 && mounts_map_ids()) {
        attributes.attr_set |= MOUNT_ATTR_IDMAP;
        attributes.userns_fd = userns;
    }
    if (attributes.attr_set &&
        syscall(__NR_mount_setattr, fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes)) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return mounts_keep(fd);
}

/* ---- layers, shared by boxes and counted */
static struct layer *layers;

struct layer *layer_take(const char *path, const char *device, int kind, int made_fd, bool kept) {
    for (struct layer *layer = layers; layer; layer = layer->next)
        if (!strcmp(layer->path, path) && !strcmp(layer->device, device)) {
            layer->references++;
            return layer;
        }
    int fd = made_fd;
    if (fd < 0 && kind == 'f') {
        fd = mount_copy(AT_FDCWD, path);
    } else if (fd < 0) {
        int context = syscall(__NR_fsopen, "erofs", FSOPEN_CLOEXEC);
        if (context < 0) return NULL;
        mount_set(context, "ro", NULL);
        mount_set(context, "source", path);
        if (*device) mount_set(context, "device", device);
        fd = mount_made(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_RDONLY);
    }
    if (!kept) fd = mounts_keep(fd);
    struct layer *layer = fd < 0 ? NULL : calloc(1, sizeof *layer);
    if (!layer) return NULL;
    *layer = (struct layer){ layers, strdup(path), strdup(device), fd, 1 };
    layers = layer;
    return layer;
}

void layer_drop(struct layer *layer) {
    if (--layer->references) return;
    for (struct layer **link = &layers; *link; link = &(*link)->next)
        if (*link == layer) {
            *link = layer->next;
            break;
        }
    mounts_lose(layer->fd);
    free(layer->path);
    free(layer->device);
    free(layer);
}

struct layer *layer_find(const char *path) {
    for (struct layer *layer = layers; layer; layer = layer->next)
        if (!strcmp(layer->path, path)) return layer;
    return NULL;
}

/* ---- bases, one a template and owner */
struct base { struct base *next; uint8_t *key; size_t length; int fd; };
static struct base *bases;

static const char *base_op(int at, uint8_t kind, const char *path, const char *argument, uint32_t length, uint32_t mode,
                           uint32_t work_id, bool own) {
    struct stat info;
    int fd;
    switch (kind) {
    case 'd': case 'h': case 'p':
        if (kind == 'p') mode = 0755;
        if ((mkdirat(at, path, mode) && errno != EEXIST) || fchmodat(at, path, mode, 0)) return say("make", path);
        if (kind == 'h' && own && fchownat(at, path, work_id, work_id, 0)) return say("own", path);
        return NULL;
    case 'f':
        fd = openat(at, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (fd < 0 || write(fd, argument, length) != (ssize_t)length) return say("write", path);
        close(fd);
        return NULL;
    case 'l':
        return symlinkat(argument, at, path) ? say("link", path) : NULL;
    case 'b': case 'n': /* mount points */
        if (stat(argument, &info)) return say("look at", argument);
        if (S_ISDIR(info.st_mode)) return mkdirat(at, path, 0755) && errno != EEXIST ? say("make", path) : NULL;
        fd = openat(at, path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        if (fd < 0) return say("make", path);
        close(fd);
        return NULL;
    default:
        return NULL;
    }
}

static const char *base_for(const struct box_spec *spec, int *fd) {
    struct cursor c = spec->ops;
    size_t length = c.end - c.at;
    for (struct base *base = bases; base; base = base->next)
        if (base->length == length && !memcmp(base->key, c.at, length)) {
            *fd = base->fd;
            return NULL;
        }
    int made = root_tmpfs(1 << 20, 4096);
    if (made < 0) return say("make", "base");
    const char *error = NULL;
    mode_t old = umask(0);
    for (uint32_t count = get_u32(&c); count && !error && !c.bad; count--) {
        uint32_t size;
        uint8_t kind = get_u8(&c);
        const char *path = get_str(&c, NULL), *argument = get_str(&c, &size);
        uint32_t mode = get_u32(&c);
        if (!c.bad) error = base_op(made, kind, path, argument, size, mode, spec->work_id, spec->id_count > 1);
    }
    umask(old);
    struct base *base = error ? NULL : calloc(1, sizeof *base);
    if (!base) {
        mounts_lose(made);
        return error ? error : "no memory";
    }
    base->key = malloc(length);
    memcpy(base->key, spec->ops.at, length);
    base->length = length;
    base->next = bases;
    base->fd = *fd = made;
    bases = base;
    return NULL;
}

void root_forget_bases(void) {
    while (bases) {
        struct base *next = bases->next;
        mounts_lose(bases->fd);
        free(bases->key);
        free(bases);
        bases = next;
    }
}

/* ---- overlays */
static bool powers(void) { /* changing an id away from 0 takes them: they are put back */
    struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct data[2];
    if (syscall(__NR_capget, &head, data)) return false;
    for (int i = 0; i < 2; i++) data[i].effective = data[i].permitted;
    return !syscall(__NR_capset, &head, data);
}

bool root_become(const struct box_spec *spec) {
    if (spec->id_count <= 1 || spec->outer_uid == geteuid()) return true;
    return !syscall(__NR_setresuid, -1, spec->outer_uid, -1) && powers();
}

void root_return(void) {
    if (geteuid() != getuid() && syscall(__NR_setresuid, -1, getuid(), -1)) abort(); /* never on with another's id */
}

/* Of the box's layers (top first) and its upper number ``generation``, which is made, or was by a try that failed. Returns the
 * detached mount. */
int root_overlay(const struct box_root *root, const struct box_spec *spec, int userns, bool trusted, const char **error) {
    char name[64], work[64];
    int parts[MAX_LAYERS + 2], count = 0, made = -1, base = -1;
    *error = base_for(spec, &base);
    if (*error) return -1;
    snprintf(name, sizeof name, "upper%u", root->generation);
    snprintf(work, sizeof work, "work%u", root->generation);
    if ((mkdirat(root->tmpfs, name, 0755) && errno != EEXIST) || (mkdirat(root->tmpfs, work, 0700) && errno != EEXIST)) {
        *error = say("make", name);
        return -1;
    }
    for (int i = 0; !*error && i <= root->num_layers; i++) {
        parts[count] = mapped(i < root->num_layers ? root->layers[i]->fd : base, "", userns, true);
        if (parts[count] < 0) *error = say("map", i < root->num_layers ? root->layers[i]->path : "base");
        else count++;
    }
    if (!*error && (parts[count] = mapped(root->tmpfs, "", userns, false)) < 0) *error = say("map", "upper");
    if (!*error) {
        if (spec->id_count > 1) {
            setfsgid(spec->outer_gid);
            setfsuid(spec->outer_uid);
            powers();
        }
        made = mounts_overlay(parts, count++, name, work, trusted);
        int keep = errno;
        if (spec->id_count > 1) {
            setfsuid(0);
            setfsgid(0);
            powers();
        }
        errno = keep;
        if (made < 0) *error = say("mount overlay", mounts_reason());
    }
    while (count) mounts_lose(parts[--count]);
    return made;
}

int root_upper(const struct box_root *root) {
    char name[64];
    snprintf(name, sizeof name, "upper%u", root->generation);
    return mount_copy(root->tmpfs, name);
}

bool root_untouched(const struct box_root *root) {
    char name[64];
    snprintf(name, sizeof name, "upper%u", root->generation);
    int fd = root->num_layers ? openat(root->tmpfs, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;
    int count = 0;
    while (folder && (entry = readdir(folder))) count++;
    if (folder) closedir(folder);
    return count == 2; /* itself and its parent */
}

const char *root_take(struct box_root *root, struct cursor c) {
    uint32_t count = get_u32(&c);
    if (c.bad || count > MAX_LAYERS) return "too many layers";
    for (uint32_t i = 0; i < count; i++) {
        uint8_t kind = get_u8(&c);
        const char *path = get_str(&c, NULL), *device = get_str(&c, NULL);
        if (c.bad) return "broken layer list";
        struct layer *layer = layer_take(path, device, kind, -1, false);
        if (!layer) return say("open layer", path);
        root->layers[root->num_layers++] = layer;
    }
    return NULL;
}

void root_drop(struct box_root *root) {
    while (root->num_layers) layer_drop(root->layers[--root->num_layers]);
    if (root->tmpfs > 0) mounts_lose(root->tmpfs);
    root->tmpfs = -1;
}
