/* What the units of the CPU kernels share. Each output row is computed by one thread in one fixed order of operations,
 * so its bits depend on its own inputs only: not on the batch, the chunking, the number of threads, or where keys lie.
 * Built with -ffp-contract=fast (one rounding a multiply-add) and without -ffast-math. A row function is compiled once
 * and called by all who need it: inlined twice, the compiler may fuse other multiply-adds in each place. */
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H
#include "vectors.h"

#define HIDDEN __attribute__((visibility("hidden")))

/* What every attention function is told. Strides are in elements; head dimension is a multiple of 16. */
typedef struct {
  const void *q, *k, *v;
  void *out;
  float *lse;             /* [T, H]: log of the sum of exponentials, scores included the scale */
  const int32_t *slots;
  const int64_t *starts;
  const int32_t *counts;
  int64_t rows, heads, groups, size;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  int64_t window, type, threads;
  float scale;
} Attention;

/* Floats of scratch memory that a thread needs for ``attend``; ``padded``: the longest row in whole vectors. */
HIDDEN int64_t attention_longest(const Attention *a);
HIDDEN int64_t attention_scratch(const Attention *a, int64_t padded);
/* Projections of bfloat16 rows. */
/* Instructions: of whole tiles (AMX), of pairs of numbers (AVX512_BF16), of single numbers (any processor); WHOLE beside
 * them: weights in whole numbers. */
enum { TILES = 1, PAIRS = 2, WHOLE = 4, SINGLES = 8 };
/* The tiles of a packed weight: outputs, inputs, numbers. */
#define OUTS 16
#define INS 32
#define TILE (OUTS * INS)
static inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
enum { STORE = 0, ADD = 1, GATE = 2 };  /* what becomes of a sum */
typedef struct {
  const uint16_t *x, *packed;
  void *out;
  const uint16_t *bias;   /* [n], may be null */
  int64_t x_row, out_row; /* in elements */
  int64_t m, n, k;        /* k is a multiple of 32; with GATE the weight has 2 n outputs, n a multiple of 16 */
  int64_t wide;           /* sums are written as float32, rounded to bfloat16 all the same */
  int64_t threads, road, kind, activation;
  const uint8_t *high, *low; /* with WHOLE: rows in two halves, [m, k], and their scales; k is a multiple of 64 */
  const float *row_scales;
} Projection;
HIDDEN int64_t projection_units(const Projection *p);
HIDDEN void project(const Projection *p, int64_t unit);
/* What a thread calls behind its last unit. */
HIDDEN void projection_end(const Projection *p);

/* With WHOLE (whole.c). */
HIDDEN int64_t whole_units(const Projection *p);
HIDDEN void whole_project(const Projection *p, int64_t unit);
HIDDEN void whole_row(const uint16_t *x, int64_t k, int64_t padded, uint8_t *high, uint8_t *low, float *scale);

/* One row and group of query heads. */
HIDDEN void attend(const Attention *a, int64_t row, int64_t group, float *scratch, int64_t padded);

/* out = round(x / rms(x)) * weight, rounded again, as the reference library does; with ``offset``:
 * round(x / rms(x) * (1 + weight)). Returns 1 / rms. */
HIDDEN float norm_row(const void *x, const void *weight, void *out, int64_t size, float eps, int offset, int type);
/* One head turned by its angles; sign -1 turns back. */
HIDDEN void turn_head(const void *x, const float *cosine, const float *sine, void *out, int64_t size, float sign, int type);
/* out = activation(gate) * up; the activation is rounded to the type before the product, as separate operations
 * would do. */
enum { SILU = 0, GELU = 1 };
HIDDEN void gate_row(const void *gate, const void *up, void *out, int64_t size, int activation, int type);

#endif
