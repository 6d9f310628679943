/* Keeper side: the next supervisor, and what it hears of the boxes that it finds. */
#include "box.h"
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MESSAGE_MAX = 256 * 1024 };

int handover_accept(int listener, int *owner) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (fd < 0) return -1;
    int held = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) ? -1 : (int)syscall(__NR_pidfd_open, peer.pid, 0);
    if (*owner >= 0 || held < 0 || (peer.uid != geteuid() && peer.uid != 0)) { /* one supervisor at a time */
        if (held >= 0) close(held);
        close(fd);
        return -1;
    }
    *owner = held;
    return fd;
}

void handover_tell(int control, const struct box *boxes, const char *mounts_found) {
    static uint8_t out[MESSAGE_MAX + 16];
    uint8_t own[4];
    put_u32(own, getpid());
    keeper_tell('V', PROTOCOL, own, 4);
    keeper_tell('W', 0, mounts_found, strlen(mounts_found));
    for (const struct box *box = boxes; box; box = box->next) {
        if (!box->pid || box->socket < 0) continue;
        struct cursor c = { box->message + 1, box->message + box->length, false };
        struct box_spec spec;
        box_read_spec(c, &spec);
        uint32_t length;
        struct cursor tail = { spec.layers.end + 1, box->message + box->length, false };
        const char *words = get_str(&tail, &length);
        out[0] = 'A';
        put_u32(out + 1, box->id);
        put_u32(out + 5, box->pid);
        memcpy(out + 9, words, length);
        union { struct cmsghdr head; char space[CMSG_SPACE(sizeof(int))]; } extra = { .space = { 0 } };
        struct iovec part = { out, 9 + length };
        struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &extra,
                               .msg_controllen = sizeof extra };
        extra.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
                                       .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(&extra.head), &box->socket, sizeof(int));
        if (sendmsg(control, &head, MSG_NOSIGNAL) < 0) return;
    }
    keeper_tell('D', 0, NULL, 0);
}
