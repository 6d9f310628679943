/* Keeper side: what is asked of the layers of a box, and the answers; see keeper.c for their form. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* After the path of a new layer: where its folder is, that of the upper before this one. */
size_t snapshot_place(const struct box *box, char *answer, size_t size) {
    size_t length = strlen(answer);
    return length + snprintf(answer + length, size - length, "%c/proc/%d/fd/%d%cupper%u", 0, getpid(), box->root.tmpfs, 0,
                             box->root.generation - 1);
}

void snapshot_take(uint32_t id) {
    char answer[512] = "y";
    struct box *box = keeper_box(id);
    struct box_spec spec = { 0 };
    const char *error = "it is gone", *busy = box ? push_refusal(box->pid, box_group(box), 0) : NULL;
    if (busy) {
        int length = snprintf(answer, sizeof answer, "c/proc/%d/fd/%d%cupper%u%c%s", getpid(), box->root.tmpfs, 0,
                              box->root.generation, 0, busy);
        keeper_tell('S', id, answer, length);
        return;
    }
    if (box && box_read_spec((struct cursor){ box->message + 1, box->message + box->length, false }, &spec))
        error = push_layer(box, &spec, answer + 1, sizeof answer - 1);
    if (error) snprintf(answer, sizeof answer, "n%s", error);
    keeper_tell('S', id, answer, error ? strlen(answer) : snapshot_place(box, answer, sizeof answer));
}

/* ``count`` layers of a box from ``first`` on are one, ``path``: its next root is made of that. */
void snapshot_merged(uint32_t id, const char *path, const char *first, uint32_t count) {
    struct box *box = keeper_box(id);
    struct layer *layer = layer_find(path);
    if (!box || !layer) return;
    struct box_root *root = &box->root;
    int at = 0;
    while (at < root->num_layers && strcmp(root->layers[at]->path, first)) at++;
    if (count < 1 || count > (uint32_t)(root->num_layers - at)) return;
    layer->references++;
    for (uint32_t i = 0; i < count; i++) layer_drop(root->layers[at + i]);
    root->layers[at] = layer;
    memmove(root->layers + at + 1, root->layers + at + count, (root->num_layers - at - count) * sizeof *root->layers);
    root->num_layers -= count - 1;
}

void snapshot_hold(uint32_t id, const char *folder) {
    char answer[512];
    int fd = syscall(__NR_open_tree, AT_FDCWD, folder, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    snprintf(answer, sizeof answer, "y/proc/%d/fd/%d", getpid(), fd);
    if (fd < 0 || !layer_take(answer + 1, "", 'f', fd, false)) snprintf(answer, sizeof answer, "nhold: %s", strerror(errno));
    keeper_tell('S', id, answer, strlen(answer));
}
