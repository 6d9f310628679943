#include "box.h"
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static const uint8_t *take(struct cursor *c, size_t length) {
    if (c->bad || (size_t)(c->end - c->at) < length) {
        c->bad = true;
        return NULL;
    }
    const uint8_t *at = c->at;
    c->at += length;
    return at;
}

uint8_t get_u8(struct cursor *c) {
    const uint8_t *at = take(c, 1);
    return at ? *at : 0;
}

uint32_t get_u32(struct cursor *c) {
    const uint8_t *at = take(c, 4);
    uint32_t value = 0;
    if (at) memcpy(&value, at, 4);
    return value;
}

uint64_t get_u64(struct cursor *c) {
    const uint8_t *at = take(c, 8);
    uint64_t value = 0;
    if (at) memcpy(&value, at, 8);
    return value;
}

const char *get_str(struct cursor *c, uint32_t *length) {
    uint32_t size = get_u32(c);
    const uint8_t *at = take(c, (size_t)size + 1);
    if (!at || at[size] != 0) {
        c->bad = true;
        size = 0;
        at = (const uint8_t *)"";
    }
    if (length) *length = size;
    return (const char *)at;
}

void put_u32(uint8_t *at, uint32_t value) { memcpy(at, &value, 4); }
void put_u64(uint8_t *at, uint64_t value) { memcpy(at, &value, 8); }

bool write_file(const char *path, const void *data, size_t length) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t done = write(fd, data, length);
    close(fd);
    return done == (ssize_t)length;
}

bool read_small(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t length = read(fd, buffer, size - 1);
    close(fd);
    buffer[length < 0 ? 0 : length] = 0;
    return length >= 0;
}
