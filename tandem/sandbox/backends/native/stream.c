/* File operations that go on: a file in parts, and what changes in a folder (watch.c). In the box as the user that was
 * asked for, like files.c. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PART = 1 << 20 };

int stream_put(const char *data, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t part = write(1, data + done, length - done);
        if (part < 0 && errno != EINTR) return errno;
        if (part > 0) done += part;
    }
    return 0;
}

/* A part for each byte of stdin, so that no more is on its way than its reader takes. */
static int read_parts(const char *path) {
    static char buffer[1 << 16];
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), error;
    if (fd < 0) return errno;
    struct stat info;
    if (fstat(fd, &info)) return errno;
    if (S_ISDIR(info.st_mode)) return EISDIR;
    if (!S_ISREG(info.st_mode)) return EINVAL;
    char word = 0;
    for (ssize_t asked; (asked = read(0, &word, 1)) != 0;) {
        if (asked < 0 && errno != EINTR) return errno;
        for (size_t done = 0; asked > 0 && done < PART;) {
            ssize_t length = read(fd, buffer, sizeof buffer);
            if (length < 0 && errno == EINTR) continue;
            if (length <= 0) return length ? errno : 0;
            if ((error = stream_put(buffer, length))) return error;
            done += length;
        }
    }
    return ECANCELED;
}

int stream_operation(int kind, char **arguments) {
    switch (kind) {
    case STREAM_READ: return read_parts(arguments[0]);
    case STREAM_WATCH: return watch_folders(arguments[0], arguments[1] && !strcmp(arguments[1], "1"));
    default: return ENOSYS;
    }
}
