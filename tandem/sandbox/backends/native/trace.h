/* trace.c: one stopped process that makes system calls for us. */
#ifndef TANDEM_TRACE_H
#define TANDEM_TRACE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>

struct traced {
    pid_t pid;                     /* 0: let go */
    struct user_regs_struct saved; /* where it was stopped */
    uint64_t mask, site;           /* its signal mask; the address of a system call instruction */
    uint64_t room;                 /* a page of code and calls, 0: none */
    int pending;                   /* a signal that waits for its release */
    pid_t born;                    /* by the last call, as the host counts */
    bool lost;                     /* it died, or did not stop in time */
};

void trace_begin(void); /* before, and trace_end after, anything that waits */
void trace_end(void);
bool trace_stop(struct traced *task, pid_t pid);  /* or errno */
bool trace_born(struct traced *task, pid_t pid);  /* the first stop of a child of a traced process */
bool trace_arm(struct traced *task);              /* its signals wait, and its filter is lifted */
bool trace_waits_for_input(struct traced *task);  /* only then calls can be made */
long trace_call(struct traced *task, long number, long a, long b, long c, long d, long e); /* its result or -errno */
/* Several calls with two stops in all: ``trace_room`` first, which takes a page of its memory, and ``trace_unroom``. False:
 * it is lost; what each call gave is in ``result``. */
struct call { int64_t number, a, b, c, d, e, f, result; };
bool trace_room(struct traced *task);
bool trace_calls(struct traced *task, struct call *calls, size_t count);
void trace_unroom(struct traced *task);
bool trace_go_on(struct traced *task, bool copied); /* as if nothing had been; ``copied``: it is the copy */
bool trace_leave(struct traced *task);
uint64_t trace_stack(const struct traced *task);
bool trace_write(const struct traced *task, uint64_t at, const void *data, size_t length);
bool trace_read(const struct traced *task, uint64_t at, void *data, size_t length);
#endif
