/* The layers of a dense decoder over packed rows, in one call: what the operations one by one compute, bit for bit
 * (they share every function), without the time between them. One team of threads goes through all of it; between two
 * phases it meets, spinning for some microseconds and then asleep, since a thread that spins on a busy machine holds
 * up the one it waits for. */
#include "kernels.h"

#include <limits.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef struct {
  const uint16_t *attention_norm, *attention_post, *mlp_norm, *mlp_post, *query_norm, *key_norm; /* or null */
  const uint16_t *qkv, *out, *gate_up, *down;                                                    /* packed */
  const uint16_t *qkv_bias, *out_bias, *gate_up_bias, *down_bias;                                /* or null */
  uint16_t *keys, *values;     /* the layer's cache, [slots, groups, size] */
  int64_t window, local;       /* local: turned by the second pair of tables */
} Layer;

typedef struct {
  const Layer *layers;
  const uint16_t *last_norm;
  uint16_t *x, *normed;                 /* [rows, hidden]: embeddings, and afterwards the last norm of the rows */
  uint16_t *qkv, *attended, *inner;     /* scratch: [rows, (heads + 2 groups) size], [rows, heads size], [rows, mlp] */
  const float *cosine[2], *sine[2];     /* [rows, size] */
  const int64_t *write_slots;           /* where each row's keys and values go */
  const int32_t *slots;
  const int64_t *starts;
  const int32_t *counts;
  int64_t num_layers, rows, hidden, heads, groups, size, mlp, offset, activation, threads, road;
  uint8_t *high, *low;                  /* scratch, with WHOLE: [rows, the most inputs in whole tiles of 64] */
  float *row_scales;
  float eps, scale;
} Decoder;

int omp_get_num_threads(void); /* not by its header, which clang may lack */

/* ---- a team's meetings */

#define SPINS 2000
#define PHASES 10

typedef struct {
  int64_t taken __attribute__((aligned(64)));
} Counter;

typedef struct {
  unsigned meeting __attribute__((aligned(64))); /* counts meetings; sleepers wait for it to change */
  int arrived, sleepers, size;
} Team;

static void meet(Team *team) {
  const unsigned now = __atomic_load_n(&team->meeting, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->meeting, now + 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &team->meeting, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
#endif
    return;
  }
  for (int64_t spin = 0; __atomic_load_n(&team->meeting, __ATOMIC_ACQUIRE) == now; spin++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
#if defined(__linux__)
    if (spin < SPINS) continue;
    __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->meeting, __ATOMIC_SEQ_CST) == now)
      syscall(SYS_futex, &team->meeting, FUTEX_WAIT_PRIVATE, now, 0, 0, 0);
    __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
#endif
  }
}

/* ---- phases */

static void add_row(uint16_t *x, const uint16_t *more, int64_t size) {
  for (int64_t d = 0; d < size; d++) x[d] = narrow(widen(x[d]) + widen(more[d]));
}

/* A row's residual takes what is left of the part before (``post``: behind its norm), then is normed for the next. */
static void between(const Decoder *d, int64_t row, const uint16_t *post, const uint16_t *next) {
  uint16_t *x = d->x + row * d->hidden, *normed = d->normed + row * d->hidden;
  if (post) {
    norm_row(normed, post, normed, d->hidden, d->eps, (int)d->offset, BFLOAT16);
    add_row(x, normed, d->hidden);
  }
  norm_row(x, next, normed, d->hidden, d->eps, (int)d->offset, BFLOAT16);
}

static int64_t whole_size(const Decoder *d, int64_t ins) { return d->road & WHOLE ? (ins + 63) / 64 * 64 : ins; }

/* A row of ``ins`` numbers as projections of whole numbers read it. */
static void halve(const Decoder *d, const uint16_t *x, int64_t ins, int64_t row) {
  const int64_t padded = whole_size(d, ins);
  whole_row(x + row * ins, ins, padded, d->high + row * padded, d->low + row * padded, d->row_scales + row);
}

/* Queries and keys are normed and turned in place; keys and values go to their slots. */
static void place(const Decoder *d, const Layer *l, int64_t row) {
  const int64_t size = d->size, heads = d->heads, groups = d->groups;
  uint16_t *all = d->qkv + row * (heads + 2 * groups) * size;
  const float *cosine = d->cosine[l->local] + row * size, *sine = d->sine[l->local] + row * size;
  const int64_t at = d->write_slots[row] * groups * size;
  for (int64_t head = 0; head < heads + groups; head++) {
    uint16_t *x = all + head * size;
    const uint16_t *norm = head < heads ? l->query_norm : l->key_norm;
    if (norm) norm_row(x, norm, x, size, d->eps, (int)d->offset, BFLOAT16);
    turn_head(x, cosine, sine, head < heads ? x : l->keys + at + (head - heads) * size, size, 1.0f, BFLOAT16);
  }
  memcpy(l->values + at, all + (heads + groups) * size, (size_t)(groups * size) * sizeof *all);
}

static Projection projecting(const Decoder *d, const uint16_t *x, const uint16_t *packed, const uint16_t *bias,
                             void *out, int64_t ins, int64_t outs, int64_t kind) {
  return (Projection){.x = x, .packed = packed, .out = out, .bias = bias, .x_row = ins, .out_row = outs, .m = d->rows,
                      .n = outs, .k = whole_size(d, ins), .threads = d->threads, .road = d->road, .kind = kind,
                      .activation = d->activation, .high = d->high, .low = d->low, .row_scales = d->row_scales};
}

static Attention attending(const Decoder *d, const Layer *l) {
  const int64_t size = d->size, row = (d->heads + 2 * d->groups) * size;
  return (Attention){.q = d->qkv, .k = l->keys, .v = l->values, .out = d->attended, .slots = d->slots,
                     .starts = d->starts, .counts = d->counts, .rows = d->rows, .heads = d->heads, .groups = d->groups,
                     .size = size, .q_row = row, .q_head = size, .k_row = d->groups * size, .k_head = size,
                     .v_row = d->groups * size, .v_head = size, .window = l->window, .type = BFLOAT16,
                     .threads = d->threads, .scale = d->scale};
}

#define TAKE(counter, count) \
  for (int64_t unit; (unit = __atomic_fetch_add(&(counter)->taken, 1, __ATOMIC_RELAXED)) < (count);)

static void run_projection(Projection p, Counter *counter) {
  if (p.road & WHOLE) {
    const int64_t units = whole_units(&p);
    TAKE(counter, units) whole_project(&p, unit);
    return;
  }
  const int64_t units = projection_units(&p);
  TAKE(counter, units) project(&p, unit);
}

/* What a projection reads is written; with WHOLE it is brought to whole numbers first. */
static void made(const Decoder *d, const uint16_t *x, int64_t ins, Counter *counter, Team *team) {
  meet(team);
  if (!(d->road & WHOLE)) return;
  TAKE(counter, d->rows) halve(d, x, ins, unit);
  meet(team);
}

static void run_layer(const Decoder *d, const Layer *l, const uint16_t *post_before, Counter *counters, Team *team,
                      float *scratch, int64_t padded) {
  const int64_t query = d->heads * d->size, qkv = query + 2 * d->groups * d->size;
  TAKE(counters, d->rows) {
    between(d, unit, post_before, l->attention_norm);
    if (d->road & WHOLE) halve(d, d->normed, d->hidden, unit);
  }
  meet(team);
  run_projection(projecting(d, d->normed, l->qkv, l->qkv_bias, d->qkv, d->hidden, qkv, STORE), counters + 1);
  meet(team);
  TAKE(counters + 2, d->rows) place(d, l, unit);
  meet(team);
  const Attention a = attending(d, l);
  TAKE(counters + 3, d->rows * d->groups) attend(&a, unit / d->groups, unit % d->groups, scratch, padded);
  made(d, d->attended, query, counters + 8, team);
  uint16_t *out = l->attention_post ? d->normed : d->x;
  run_projection(projecting(d, d->attended, l->out, l->out_bias, out, query, d->hidden, l->attention_post ? STORE : ADD),
                 counters + 4);
  meet(team);
  TAKE(counters + 5, d->rows) {
    between(d, unit, l->attention_post, l->mlp_norm);
    if (d->road & WHOLE) halve(d, d->normed, d->hidden, unit);
  }
  meet(team);
  run_projection(projecting(d, d->normed, l->gate_up, l->gate_up_bias, d->inner, d->hidden, d->mlp, GATE), counters + 6);
  made(d, d->inner, d->mlp, counters + 9, team);
  out = l->mlp_post ? d->normed : d->x;
  run_projection(projecting(d, d->inner, l->down, l->down_bias, out, d->mlp, d->hidden, l->mlp_post ? STORE : ADD),
                 counters + 7);
  meet(team);
}

/* Returns 0, or 1 when memory ran out. */
int decode(const Decoder *d) {
  const Attention any = attending(d, d->layers);
  const int64_t padded = attention_longest(&any);
  Counter *counters = aligned_alloc(64, (size_t)(d->num_layers * PHASES + 1) * sizeof *counters);
  if (!counters) return 1;
  memset(counters, 0, (size_t)(d->num_layers * PHASES + 1) * sizeof *counters);
  Team team = {0};
  int failed = 0;
#pragma omp parallel num_threads((int)d->threads)
  {
#pragma omp single
    team.size = omp_get_num_threads();
    float *scratch = malloc((size_t)attention_scratch(&any, padded) * sizeof(float) + 64);
    if (!scratch) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    meet(&team);
    if (!__atomic_load_n(&failed, __ATOMIC_RELAXED)) {
      const uint16_t *post = 0;
      for (int64_t layer = 0; layer < d->num_layers; layer++) {
        run_layer(d, d->layers + layer, post, counters + layer * PHASES, &team, scratch, padded);
        post = d->layers[layer].mlp_post;
      }
      TAKE(counters + d->num_layers * PHASES, d->rows) between(d, unit, post, d->last_norm);
      const Projection any_projection = {.road = d->road};
      projection_end(&any_projection);
    }
    free(scratch);
  }
  free(counters);
  return failed;
}
