/* shim.c: a process that becomes the shim of a command, or a file operation. command.c: what it is told. */
#ifndef TANDEM_SHIM_H
#define TANDEM_SHIM_H
#include "box.h"

enum { MAX_STRINGS = 4096, MOST_IDS = 34 };
struct plan { /* of one command; strings are in the message */
    int kind;
    uint32_t timeout_ms; /* 0: none */
    uint64_t max_bytes, max_error_bytes;
    bool has_input, switch_user, is_long, on_terminal, lingers;
    uint32_t columns, rows, work_id;
    uint32_t num_ids, ids[MOST_IDS]; /* of another user: its own, its group's, those of its other groups */
    const char *folder;
    char *argv[MAX_STRINGS], *envp[MAX_STRINGS];
};
bool plan_read(struct plan *plan, struct cursor *c, uint32_t work_id, bool switch_user); /* or errno */

/* In a new process. ``status`` -1: its exit code says all. */
void shim_main(const struct plan *plan, int in, int out, int error, int status) __attribute__((noreturn));

/* One that waits for its plan and its streams on ``fd``, on which it then tells what became of it. */
struct spare { pid_t pid; int fd; }; /* fd -1: there is none */
struct spare spare_make(uint32_t work_id, bool switch_user);
bool spare_send(const struct spare *spare, struct cursor message, const int *streams); /* false: it does not take it */
#endif
