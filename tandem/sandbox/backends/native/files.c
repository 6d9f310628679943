/* File operations, done inside the box as the box's own user: whatever a path leads to, it can reach nothing that
 * a command could not. Data goes through stdin and stdout; the result is an errno. */
#include "box.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char buffer[1 << 16];

static int pour(int from, int to) {
    for (;;) {
        ssize_t length = read(from, buffer, sizeof buffer);
        if (length == 0) return 0;
        if (length < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        for (ssize_t done = 0; done < length;) {
            ssize_t part = write(to, buffer + done, length - done);
            if (part < 0 && errno != EINTR) return errno;
            if (part > 0) done += part;
        }
    }
}

int make_parents(const char *path) {
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof part) return ENAMETOOLONG;
    memcpy(part, path, length + 1);
    for (char *slash = part + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (mkdir(part, 0755) && errno != EEXIST) {
            struct stat info; /* a folder that is there may sit in one we cannot write to */
            int error = errno;
            if (stat(part, &info) || !S_ISDIR(info.st_mode)) return error;
        }
        *slash = '/';
    }
    return 0;
}

static int write_whole(const char *path) {
    int error = make_parents(path);
    if (error) return error;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0644);
    if (fd < 0) return errno;
    struct stat info;
    if (fstat(fd, &info)) return errno;
    if (!S_ISREG(info.st_mode)) return EINVAL;
    error = pour(0, fd);
    return close(fd) && !error ? errno : error;
}

static int read_whole(const char *path, uint64_t max_bytes) {
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return errno;
    struct stat info;
    if (fstat(fd, &info)) return errno;
    if (S_ISDIR(info.st_mode)) return EISDIR;
    if (!S_ISREG(info.st_mode)) return EINVAL;
    if ((uint64_t)info.st_size > max_bytes) return EFBIG;
    return pour(fd, 1);
}

static int list_names(const char *path) {
    DIR *folder = opendir(path);
    if (!folder) return errno;
    struct dirent *entry;
    while ((errno = 0, entry = readdir(folder))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t length = strlen(entry->d_name) + 1;
        for (size_t done = 0; done < length;) {
            ssize_t part = write(1, entry->d_name + done, length - done);
            if (part < 0 && errno != EINTR) return errno;
            if (part > 0) done += part;
        }
    }
    return errno;
}

int file_operation(int kind, const char *path, uint64_t max_bytes) {
    switch (kind) {
    case FILE_WRITE: return write_whole(path);
    case FILE_READ: return read_whole(path, max_bytes);
    case FILE_LIST: return list_names(path);
    default: return ENOSYS;
    }
}
