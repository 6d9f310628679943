/* hold.c: a box that stands still for its live fork. branch.c: what is made of it. */
#ifndef TANDEM_HOLD_H
#define TANDEM_HOLD_H
#include "trace.h"

enum { SCRATCH = 2048, FOLDER_MAX = 1024, MAX_ON_TERMINAL = 8 };

struct hold {
    struct traced main, shim, agent;
    pid_t target, between;     /* the process that is copied; its shim, 0 if it has none */
    pid_t number;              /* what a copy shall have in its box */
    uint64_t permitted, effective; /* its powers, which a copy has in its box */
    int nice;                  /* what it has when it is not held */
    int streams[3];            /* where its 0, 1 and 2 lead: -1 nowhere that matters, 1 for 2: the same as stdout */
    int on_terminal[MAX_ON_TERMINAL], num_on_terminal; /* descriptors that lead to its one terminal, 0 among them ... */
    uint8_t termios[64], window[8];                    /* ... whose settings these are, as the kernel has them */
    char folder[FOLDER_MAX];
    uint64_t scratch;          /* on its stack, unused: we write there, and put back ... */
    uint8_t old[SCRATCH];      /* ... this */
    uint64_t tid_at, rseq_at, robust_at; /* what its C library told the kernel about itself, as a copy must again */
    size_t robust_size;
    uint32_t rseq_size, rseq_signature;
};

/* NULL: why not; ``busy``: it may do in a moment. ``inner``: the process as the box counts. */
struct hold *hold_take(pid_t agent, const char *cgroup, pid_t inner, const char **problem, bool *busy);
const char *hold_return_folder(struct hold *hold);
void hold_end(struct hold *hold); /* all go on as if nothing had been */
#endif
