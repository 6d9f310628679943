/* What folders hold: metadata, listings to a depth, making, moving, removing. As the box's own user, like files.c;
 * below the path that was asked for no symbolic link is followed. */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DEPTH = 64 };

static int put(const char *data, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t part = write(1, data + done, length - done);
        if (part < 0 && errno != EINTR) return errno;
        if (part > 0) done += part;
    }
    return 0;
}

/* "mode uid gid size seconds nanoseconds" NUL path NUL target NUL; mode in octal with the type. */
static int tell(int folder, const char *name, const char *path) {
    struct stat info;
    char text[160], target[PATH_MAX] = "";
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW)) return errno;
    if (S_ISLNK(info.st_mode)) {
        ssize_t length = readlinkat(folder, name, target, sizeof target - 1);
        if (length < 0) return errno;
        target[length] = 0;
    }
    int length = snprintf(text, sizeof text, "%o %u %u %lld %lld %ld", info.st_mode, info.st_uid, info.st_gid,
                          (long long)info.st_size, (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
    int error = put(text, length + 1);
    if (!error) error = put(path, strlen(path) + 1);
    return error ? error : put(target, strlen(target) + 1);
}

static int list(int fd, const char *path, int depth) {
    DIR *folder = fdopendir(fd);
    if (!folder) return errno;
    struct dirent *entry;
    int error = 0;
    while (!error && (errno = 0, entry = readdir(folder))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        char inner[PATH_MAX];
        if (snprintf(inner, sizeof inner, "%s/%s", strcmp(path, "/") ? path : "", entry->d_name) >= (int)sizeof inner) {
            error = ENAMETOOLONG;
            break;
        }
        error = tell(dirfd(folder), entry->d_name, inner);
        if (error == ENOENT) error = 0; /* gone meanwhile */
        if (error || depth <= 1) continue;
        int below = openat(dirfd(folder), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (below >= 0) error = list(below, inner, depth - 1); /* a folder we may not read shows no more than itself */
    }
    if (!error && !entry) error = errno;
    closedir(folder);
    return error;
}

static int remove_below(int parent, const char *name, int depth) {
    if (!unlinkat(parent, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return errno;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    DIR *folder = fdopendir(fd);
    struct dirent *entry;
    int error = !folder ? errno : depth >= MAX_DEPTH ? ENAMETOOLONG : 0;
    while (!error && (errno = 0, entry = readdir(folder)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            error = remove_below(fd, entry->d_name, depth + 1);
    if (folder) closedir(folder);
    if (error) return error;
    return unlinkat(parent, name, AT_REMOVEDIR) ? errno : 0;
}

int entry_operation(int kind, char **arguments) {
    const char *path = arguments[0], *more = arguments[1] ? arguments[1] : "";
    int error, fd;
    switch (kind) {
    case ENTRY_STAT: return tell(AT_FDCWD, path, path);
    case ENTRY_LIST:
        fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        return fd < 0 ? errno : list(fd, path, atoi(more) < MAX_DEPTH ? atoi(more) : MAX_DEPTH);
    case ENTRY_MAKE: return (error = make_parents(path)) ? error : mkdir(path, 0755) ? errno : 0;
    case ENTRY_MOVE: return (error = make_parents(more)) ? error : rename(path, more) ? errno : 0;
    case ENTRY_REMOVE: return remove_below(AT_FDCWD, path, 0);
    default: return ENOSYS;
    }
}
