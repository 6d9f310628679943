/* Pseudo-terminals of the box: made by the agent in the box's own devpts, owned by the command's user. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <unistd.h>

bool terminal_resize(int master, uint32_t columns, uint32_t rows) {
    struct winsize size = { .ws_col = columns > 0xffff ? 0xffff : columns, .ws_row = rows > 0xffff ? 0xffff : rows };
    return !ioctl(master, TIOCSWINSZ, &size);
}

/* devpts gives a new terminal to the file-system user of whoever opens it: the agent has no power to chown. */
bool terminal_open(int *master, int *slave, uint32_t owner, uint32_t columns, uint32_t rows) {
    int unlock = 0;
    setfsuid(owner);
    *master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    int error = errno;
    setfsuid(geteuid());
    errno = error;
    if (*master < 0) return false;
    *slave = -1;
    if (!ioctl(*master, TIOCSPTLCK, &unlock)) *slave = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    unsigned number;
    char name[32];
    if (*slave < 0 && errno == ENOTTY && !ioctl(*master, TIOCGPTN, &number)) { /* gVisor: by its name */
        snprintf(name, sizeof name, "/dev/pts/%u", number);
        *slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    if (*slave >= 0 && terminal_resize(*master, columns, rows)) return true;
    error = errno;
    close(*master);
    if (*slave >= 0) close(*slave);
    *master = *slave = -1;
    errno = error;
    return false;
}
