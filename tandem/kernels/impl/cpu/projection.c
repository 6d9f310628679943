/* Projections of bfloat16 rows, with packed weights. Every sum has one order of its terms, whatever the number of rows
 * or threads, so a row's bits depend on that row alone; it stays in float32 and is rounded once.
 * With tile instructions: a tile product adds its 32 terms to each sum in one fixed order and keeps rows apart, and the
 * tiles of a sum follow each other in order of k. With instructions for pairs: the pairs follow in order of k.
 * The two give different bits: a machine keeps to one.
 * Packed weights: for 16 outputs and 32 inputs a tile of 1 KiB, 16 pairs of inputs by 16 outputs, the tiles of one
 * set of outputs behind each other; missing outputs and inputs are zero. */
#include "kernels.h"
#include "moving.h"

#define OUTS 16
#define INS 32
#define TILE (OUTS * INS)

static inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Swaps bit ``bit`` of a word's row with that of its lane, for 16 rows of 16 words. */
#define SWAP(bit, low, high)                                                          \
  for (int r = 0; r < 16; r++)                                                        \
    if (!(r & bit)) {                                                                 \
      const word_vec a = rows[r], b = rows[r + bit];                                  \
      rows[r] = __builtin_shufflevector(a, b, low);                                   \
      rows[r + bit] = __builtin_shufflevector(a, b, high);                            \
    }

/* 16 whole rows of 32 inputs become the rows of a tile. */
static inline __attribute__((always_inline)) void turn_tile(const uint16_t *from, int64_t row, word_vec *rows) {
  for (int r = 0; r < 16; r++) rows[r] = *(const word_vec *)(from + r * row);
#define LIST(...) __VA_ARGS__
  SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
       LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
  SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
       LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
       LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
       LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#undef LIST
}

static void pack_set(const uint16_t *from, uint16_t *packed, int64_t outs, int64_t k, int64_t deep) {
  for (int64_t d = 0; d < deep; d++) {
    uint16_t *tile = packed + d * TILE;
    const int64_t ins = k - d * INS < INS ? k - d * INS : INS;
    if (outs == OUTS && ins == INS) {
      word_vec rows[16];
      turn_tile(from + d * INS, k, rows);
      for (int r = 0; r < 16; r++) *(word_vec *)(tile + r * INS) = rows[r];
      continue;
    }
    memset(tile, 0, TILE * sizeof *tile);
    for (int64_t o = 0; o < outs; o++)
      for (int64_t i = 0; i < ins; i++) tile[(i / 2) * INS + 2 * o + i % 2] = from[o * k + d * INS + i];
  }
}

/* A row of the sums is half a row of a tile's pairs: 32 numbers of 2 bytes. */
#define SET_ROWS(deep) ((deep) * OUTS)

static int pack_by_scratch(const Move *m, int64_t first, int64_t count, uint64_t *sums) {
  const int64_t k = m->ins, deep = tiles_of(k, INS);
  uint16_t *scratch = aligned_alloc(64, (size_t)(deep * TILE) * sizeof *scratch);
  if (!scratch) return 1;
  for (int64_t s = first; s < first + count; s++) {
    uint64_t own[WORDS];
    pack_set((const uint16_t *)m->from + s * OUTS * k, scratch, m->outs - s * OUTS < OUTS ? m->outs - s * OUTS : OUTS, k,
             deep);
    const Part part = {.from = (const uint8_t *)scratch, .to = m->to + s * deep * TILE * 2, .sums = own,
                       .rows = SET_ROWS(deep), .first_row = s * SET_ROWS(deep)};
    move_rows(&part);
    for (int w = 0; w < WORDS; w++) sums[w] += own[w];
  }
  free(scratch);
  return 0;
}

#if defined(__AVX512F__)
#include <immintrin.h>

/* Whole tiles go from registers past the cache to where they belong: the reader is another core. */
static void pack_past(const Move *m, int64_t first, int64_t count, uint64_t *sums) {
  const int64_t k = m->ins, deep = k / INS;
  const uint16_t *from = (const uint16_t *)m->from + first * OUTS * k, *end = (const uint16_t *)m->from + m->outs * k;
  uint8_t *to = m->to + first * deep * TILE * 2;
  const __m512i step = _mm512_set1_epi64((long long)MOVING_STEP);
  __m512i sum = _mm512_loadu_si512(sums), key = _mm512_loadu_si512(MOVING_KEYS);
  key = _mm512_add_epi64(key, _mm512_set1_epi64((long long)(MOVING_STEP * (uint64_t)(first * SET_ROWS(deep)))));
  for (int64_t s = 0; s < count; s++, from += OUTS * k) {
    const uint16_t *ahead = from + OUTS * k;
    for (int64_t d = 0; d < deep; d++, to += 2 * TILE) {
      if (ahead < end)
        for (int r = 0; r < 16; r++) _mm_prefetch((const char *)(ahead + d * TILE + r * INS), _MM_HINT_T0);
      word_vec rows[16];
      turn_tile(from + d * INS, k, rows);
      for (int r = 0; r < 16; r++) {
        const __m512i words = (__m512i)rows[r], mixed = _mm512_xor_si512(words, key);
        _mm512_stream_si512((void *)(to + r * 64), words);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(words, _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32))));
        key = _mm512_add_epi64(key, step);
      }
    }
  }
  _mm_sfence();
  _mm512_storeu_si512(sums, sum);
}
#endif

int pack_sets(const Move *m, int64_t first, int64_t count, uint64_t *sums) {
#if defined(__AVX512F__)
  const int is_whole = m->ins % INS == 0 && m->to != m->from && ((uintptr_t)m->to & 63) == 0;
  const int64_t left = m->outs / OUTS - first, full = !is_whole || left < 0 ? 0 : left < count ? left : count;
  if (full) pack_past(m, first, full, sums);
#else
  const int64_t full = 0;
#endif
  return full < count ? pack_by_scratch(m, first + full, count - full, sums) : 0;
}

/* Rows of a packed weight as they were: out[t] = weight[ids[t]]. */
void tiles_rows(const uint16_t *packed, const int64_t *ids, uint16_t *out, int64_t rows, int64_t k, int64_t threads) {
  const int64_t deep = tiles_of(k, INS);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows > 16)
  for (int64_t row = 0; row < rows; row++) {
    const uint16_t *block = packed + ids[row] / OUTS * deep * TILE + 2 * (ids[row] % OUTS);
    uint16_t *to = out + row * k;
    for (int64_t pair = 0; pair < k / 2; pair++) memcpy(to + 2 * pair, block + pair * INS, 4);
    if (k % 2) to[k - 1] = block[k / 2 * INS];
  }
}

#if defined(__AVX512BF16__)

static inline __m512i rounded(__m512 value) {
  const __m512i word = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

static inline __m512 widened(const uint16_t *half, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, half)), 16));
}

/* A sum rounded, plus the bias and rounded again: the halves in the low parts of words. */
static inline __m512i settled(const Projection *p, const float *sum, int64_t column, __mmask16 mask) {
  const __m512i half = rounded(_mm512_load_ps(sum));
  if (!p->bias) return half;
  return rounded(_mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(half, 16)), widened(p->bias + column, mask)));
}

/* ``rows`` sums of 16 outputs each go where they belong; ``up``: the second factor's, with GATE. */
static void put(const Projection *p, const float *sums, const float *up, int64_t row, int64_t rows, int64_t block) {
  const int64_t column = block * OUTS, columns = p->n - column < OUTS ? p->n - column : OUTS;
  const __mmask16 mask = (__mmask16)((1u << columns) - 1);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (row + r) * p->out_row + column;
    __m512i half = settled(p, sums + r * OUTS, column, mask);
    if (p->kind == GATE) {
      uint16_t gates[OUTS], ups[OUTS];
      _mm256_storeu_si256((__m256i *)gates, _mm512_cvtepi32_epi16(half));
      _mm256_storeu_si256((__m256i *)ups, _mm512_cvtepi32_epi16(settled(p, up + r * OUTS, p->n + column, mask)));
      gate_row(gates, ups, (uint16_t *)p->out + at, OUTS, (int)p->activation, BFLOAT16);
      continue;
    }
    if (p->kind == ADD)
      half = rounded(_mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(half, 16)),
                                   widened((const uint16_t *)p->out + at, mask)));
    if (p->wide) _mm512_mask_storeu_epi32((float *)p->out + at, mask, _mm512_slli_epi32(half, 16));
    else _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, _mm512_cvtepi32_epi16(half));
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

void project(const Projection *p, int64_t unit) {
  const Blocks b = blocks_in(p, unit);
  if (p->road == TILES) project_tiles(p, &b);
  else project_pairs(p, &b);
}
#else
int tiles_ready(void) { return 0; }
int pairs_ready(void) { return 0; }
int64_t projection_units(const Projection *p) { (void)p; abort(); }
void project(const Projection *p, int64_t unit) { (void)p, (void)unit, abort(); }
void projection_end(const Projection *p) { (void)p; }
#endif

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
