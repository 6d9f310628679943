/* Projections of bfloat16 rows, with packed weights (pack.c). Every sum has one order of its terms, whatever the number of
 * rows or threads, so a row's bits depend on that row alone; it stays in float32 and is rounded once.
 * With tile instructions: a tile product adds its 32 terms to each sum in one fixed order and keeps rows apart, and the
 * tiles of a sum follow each other in order of k. With instructions for pairs: the pairs follow in order of k. On every
 * other processor: the numbers one by one, widened to float32, in order of k.
 * The three give different bits: a machine keeps to one. */
#include "kernels.h"

static inline vec rounded(vec value) {
  const word_vec word = (word_vec)value, odd = (word_vec)((word & 0x7fffffffu) > 0x7f800000u); /* not a number */
  return (vec)(((word + 0x7fffu + ((word >> 16) & 1u)) & 0xffff0000u & ~odd) | (odd & 0x7fc00000u));
}

/* Up to 16 numbers of bfloat16 in the low lanes. */
static inline vec some(const uint16_t *half, int64_t count) {
  if (count == OUTS) return load16(half, 0, BFLOAT16);
  uint16_t room[OUTS] = {0};
  for (int64_t i = 0; i < count; i++) room[i] = half[i];
  return load16(room, 0, BFLOAT16);
}

/* A sum rounded, plus the bias and rounded again. */
static inline vec settled(const Projection *p, const float *sum, int64_t column, int64_t columns) {
  const vec value = rounded(*(const vec *)sum);
  return p->bias ? rounded(value + some(p->bias + column, columns)) : value;
}

/* ``rows`` sums of 16 outputs each go where they belong; ``up``: the second factor's, with GATE. */
static void put(const Projection *p, const float *sums, const float *up, int64_t row, int64_t rows, int64_t block) {
  const int64_t column = block * OUTS, columns = p->n - column < OUTS ? p->n - column : OUTS;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (row + r) * p->out_row + column;
    vec value = settled(p, sums + r * OUTS, column, columns);
    if (p->kind == GATE) {
      uint16_t gates[OUTS], ups[OUTS];
      store16(gates, 0, value, BFLOAT16);
      store16(ups, 0, settled(p, up + r * OUTS, p->n + column, columns), BFLOAT16);
      gate_row(gates, ups, (uint16_t *)p->out + at, OUTS, (int)p->activation, BFLOAT16);
      continue;
    }
    if (p->kind == ADD) value = rounded(value + some((const uint16_t *)p->out + at, columns));
    const int type = p->wide ? FLOAT32 : BFLOAT16;
    if (columns == OUTS) store16(p->out, at, value, type);
    else
      for (int64_t i = 0; i < columns; i++) store1(p->out, at + i, value[i], type);
  }
}

/* Which sets of 16 outputs a unit has: up to 4; with GATE half of them are the second factor's. */
typedef struct {
  int64_t block[4];
  int count;
} Blocks;

static int64_t blocks_of(const Projection *p) { return tiles_of(p->n, OUTS); }

static int64_t per_unit(const Projection *p) {
  if (p->road == TILES && p->m > 16) return p->kind == GATE ? 1 : 2;
  /* Few outputs: smaller units, for the threads to end together. */
  const int64_t whole = p->kind == GATE ? 2 : 4;
  return p->m <= 16 && blocks_of(p) < 32 * p->threads ? whole / 2 : whole;
}

int64_t projection_units(const Projection *p) { return tiles_of(blocks_of(p), per_unit(p)); }

static Blocks blocks_in(const Projection *p, int64_t unit) {
  const int64_t per = per_unit(p), first = unit * per, all = blocks_of(p);
  const int64_t now = all - first < per ? all - first : per;
  Blocks b = {.count = 0};
  for (int64_t i = 0; i < now; i++) b.block[b.count++] = first + i;
  if (p->kind == GATE)
    for (int64_t i = 0; i < now; i++) b.block[b.count++] = all + first + i;
  return b;
}

typedef float Sums[4][16 * OUTS] __attribute__((aligned(64)));

static void put_all(const Projection *p, Sums sums, const Blocks *b, int64_t row, int64_t rows) {
  const int own = p->kind == GATE ? b->count / 2 : b->count;
  for (int i = 0; i < own; i++) put(p, sums[i], p->kind == GATE ? sums[own + i] : 0, row, rows, b->block[i]);
}

/* ---- numbers one by one */

#define MOST_SINGLES 4 /* rows whose sums of 16 outputs stay in the registers of a processor with 16 of 32 bytes */
#define CHUNK 256      /* inputs that are widened at a time */
typedef float part_vec __attribute__((vector_size(32), aligned(4)));
typedef uint32_t part_word __attribute__((vector_size(32), aligned(4)));

static inline __attribute__((always_inline)) void add_singles(const float (*x)[CHUNK], const uint16_t *weights,
                                                              int64_t count, float *sums, int rows) {
  part_vec acc[MOST_SINGLES][2];
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < 2; h++) acc[r][h] = *(const part_vec *)(sums + r * OUTS + h * 8);
  for (int64_t at = 0; at < count; at += 2)
    for (int h = 0; h < 2; h++) {
      const part_word pair = *(const part_word *)(weights + at * OUTS + h * 16);
      const part_vec even = (part_vec)(pair << 16), odd = (part_vec)(pair & 0xffff0000u);
      for (int r = 0; r < rows; r++) {
        acc[r][h] += even * x[r][at];
        acc[r][h] += odd * x[r][at + 1];
      }
    }
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < 2; h++) *(part_vec *)(sums + r * OUTS + h * 8) = acc[r][h];
}

static void project_singles(const Projection *p, const Blocks *b) {
  Sums sums;
  float x[MOST_SINGLES][CHUNK] __attribute__((aligned(64)));
  for (int64_t row = 0; row < p->m; row += MOST_SINGLES) {
    const int64_t rows = p->m - row < MOST_SINGLES ? p->m - row : MOST_SINGLES;
    for (int c = 0; c < b->count; c++) memset(sums[c], 0, (size_t)rows * OUTS * sizeof(float));
    for (int64_t start = 0; start < p->k; start += CHUNK) {
      const int64_t count = p->k - start < CHUNK ? p->k - start : CHUNK;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i += LANES)
          *(vec *)(x[r] + i) = load16(p->x + (row + r) * p->x_row + start, i, BFLOAT16);
      for (int c = 0; c < b->count; c++) {
        const uint16_t *weights = p->packed + (b->block[c] * p->k + start) * OUTS;
        if (rows == 4) add_singles(x, weights, count, sums[c], 4);
        else if (rows == 3) add_singles(x, weights, count, sums[c], 3);
        else if (rows == 2) add_singles(x, weights, count, sums[c], 2);
        else add_singles(x, weights, count, sums[c], 1);
      }
    }
    put_all(p, sums, b, row, rows);
  }
}

#if defined(__AVX512BF16__)
#include <immintrin.h>

/* ---- pairs */

#define MOST_ROWS 6

static inline __attribute__((always_inline)) void add_rows(const Projection *p, const Blocks *b, int64_t row, Sums sums,
                                                           int rows, int count) {
  __m512 acc[MOST_ROWS][4];
  const uint16_t *weights[4], *x = p->x + row * p->x_row;
  for (int c = 0; c < count; c++) weights[c] = p->packed + b->block[c] * p->k * OUTS;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < count; c++) acc[r][c] = _mm512_setzero_ps();
  for (int64_t at = 0; at < p->k; at += 2) {
    __m512i weight[4];
    for (int c = 0; c < count; c++) weight[c] = _mm512_loadu_si512(weights[c] + at * OUTS);
    for (int r = 0; r < rows; r++) {
      int32_t two;
      memcpy(&two, x + r * p->x_row + at, 4);
      const __m512i pair = _mm512_set1_epi32(two);
      for (int c = 0; c < count; c++)
        acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)pair, (__m512bh)weight[c]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < count; c++) _mm512_store_ps(sums[c] + r * OUTS, acc[r][c]);
}

#define ADD_ROWS(rows)                                                                               \
  static __attribute__((noinline)) void add_rows_##rows(const Projection *p, const Blocks *b, int64_t row, Sums sums) { \
    if (b->count == 4) add_rows(p, b, row, sums, rows, 4);                                           \
    else if (b->count == 3) add_rows(p, b, row, sums, rows, 3);                                      \
    else if (b->count == 2) add_rows(p, b, row, sums, rows, 2);                                      \
    else add_rows(p, b, row, sums, rows, 1);                                                         \
  }
ADD_ROWS(1) ADD_ROWS(2) ADD_ROWS(3) ADD_ROWS(4) ADD_ROWS(5) ADD_ROWS(6)
static void (*const ADDERS[MOST_ROWS])(const Projection *, const Blocks *, int64_t, Sums) = {
    add_rows_1, add_rows_2, add_rows_3, add_rows_4, add_rows_5, add_rows_6};

static void project_pairs(const Projection *p, const Blocks *b) {
  Sums sums;
  for (int64_t row = 0; row < p->m; row += MOST_ROWS) {
    const int64_t rows = p->m - row < MOST_ROWS ? p->m - row : MOST_ROWS;
    ADDERS[rows - 1](p, b, row, sums);
    put_all(p, sums, b, row, rows);
  }
}

int pairs_ready(void) { return 1; }

/* ---- tiles */

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} __attribute__((aligned(64))) Shapes;

/* Sums are tiles 0 to 3. Tiles 0, 1 and 4 have the first number of rows, 2, 3 and 5 the second; 6 and 7 are weights. */
static void shape(int64_t first_rows, int64_t second_rows) {
  Shapes shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    const int64_t rows = t >= 6 ? 16 : t == 4 || t < 2 ? first_rows : second_rows;
    shapes.rows[t] = (uint8_t)rows;
    shapes.row_bytes[t] = 64;
  }
  _tile_loadconfig(&shapes);
}

/* Asks the kernel for the tile registers of this process. Returns 1 when they may be used. */
int tiles_ready(void) {
  return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

/* Up to 16 rows by up to 4 sets of outputs. */
static void few_rows(const Projection *p, const Blocks *b, int64_t row, int64_t rows) {
  const int64_t deep = p->k / INS, stride = p->x_row * 2;
  const uint16_t *x = p->x + row * p->x_row, *w[4];
  Sums sums;
  for (int i = 0; i < 4; i++) w[i] = p->packed + b->block[i < b->count ? i : 0] * deep * TILE;
  _tile_zero(0);
  _tile_zero(1);
  if (b->count > 2) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < deep; d++) {
      _tile_loadd(4, x + d * INS, stride);
      _tile_loadd(6, w[0] + d * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w[1] + d * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, w[2] + d * TILE, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, w[3] + d * TILE, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  } else
    for (int64_t d = 0; d < deep; d++) {
      _tile_loadd(4, x + d * INS, stride);
      _tile_loadd(6, w[0] + d * TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w[1] + d * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  put_all(p, sums, b, row, rows);
}

static inline void fetch(const uint16_t *tile) {
  for (int line = 0; line < TILE; line += 32) _mm_prefetch((const char *)(tile + line), _MM_HINT_T1);
}

/* 16 + ``second`` rows by up to two sets of outputs. */
static void many_rows(const Projection *p, const Blocks *b, int64_t row, int64_t second) {
  const int64_t deep = p->k / INS, stride = p->x_row * 2;
  const uint16_t *b0 = p->packed + b->block[0] * deep * TILE;
  const uint16_t *b1 = b->count > 1 ? p->packed + b->block[1] * deep * TILE : b0;
  const uint16_t *a0 = p->x + row * p->x_row, *a1 = a0 + 16 * p->x_row;
  Sums low, high;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < deep; d++) {
    /* Products of many rows hide the way of the next unit's weights from memory; the last ones ask in vain. */
    if (!row) {
      fetch(b0 + (2 * deep + d) * TILE);
      fetch(b0 + (3 * deep + d) * TILE);
    }
    _tile_loadd(6, b0 + d * TILE, 64);
    _tile_loadd(4, a0 + d * INS, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + d * TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + d * INS, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, low[0], 64);
  _tile_stored(1, low[1], 64);
  _tile_stored(2, high[0], 64);
  _tile_stored(3, high[1], 64);
  put_all(p, low, b, row, 16);
  put_all(p, high, b, row + 16, second);
}

static void project_tiles(const Projection *p, const Blocks *b) {
  const int64_t whole = p->m / 32 * 32, left = p->m - whole;
  if (whole) shape(16, 16);
  for (int64_t row = 0; row < whole; row += 32) many_rows(p, b, row, 16);
  if (left > 16) {
    shape(16, left - 16);
    many_rows(p, b, whole, left - 16);
  } else if (left) {
    shape(left, left);
    few_rows(p, b, whole, left);
  }
}

void projection_end(const Projection *p) {
  if (p->road & TILES) _tile_release();
}
#else
int tiles_ready(void) { return 0; }
static void project_tiles(const Projection *p, const Blocks *b) { (void)p, (void)b, abort(); }
void projection_end(const Projection *p) { (void)p; }
#endif
#else
int tiles_ready(void) { return 0; }
int pairs_ready(void) { return 0; }
static void project_pairs(const Projection *p, const Blocks *b) { (void)p, (void)b, abort(); }
static void project_tiles(const Projection *p, const Blocks *b) { (void)p, (void)b, abort(); }
void projection_end(const Projection *p) { (void)p; }
#endif

void project(const Projection *p, int64_t unit) {
  const Blocks b = blocks_in(p, unit);
  if (p->road == TILES) project_tiles(p, &b);
  else if (p->road == PAIRS) project_pairs(p, &b);
  else project_singles(p, &b);
}

/* out[m, n] = x[m, k] @ weight.T */
void projection(const Projection *p) {
  const int64_t units = projection_units(p);
  const int64_t portion = units > 1024 ? 8 : 2; /* so that a thread mostly has the units it fetched ahead */
#pragma omp parallel num_threads((int)p->threads)
  {
#pragma omp for schedule(dynamic, portion)
    for (int64_t unit = 0; unit < units; unit++) project(p, unit);
    projection_end(p);
  }
}
