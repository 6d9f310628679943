/* Sockets made in the box's network namespace for the host, which gets them by SCM_RIGHTS: connections to servers
 * on the box's loopback, and listeners there that the host serves. */
#include "box.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int port_connect(uint32_t port, bool v6) {
    int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    struct sockaddr_in name = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
    struct sockaddr_in6 name6 = { .sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    int failed = v6 ? connect(fd, (void *)&name6, sizeof name6) : connect(fd, (void *)&name, sizeof name);
    if (!failed || errno == EINPROGRESS) return fd; /* the host waits for the rest */
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

int port_listen(uint32_t port, bool datagrams) {
    int on = 1, fd = socket(AF_INET, (datagrams ? SOCK_DGRAM : SOCK_STREAM) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    struct sockaddr_in name = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
    /* Datagrams of a name that is taken would be shared with its holder under SO_REUSEADDR. */
    if ((datagrams || !setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on)) &&
        !bind(fd, (void *)&name, sizeof name) && (datagrams || !listen(fd, 128)))
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}
