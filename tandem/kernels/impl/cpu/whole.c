/* Projections of bfloat16 rows by weights in whole numbers of 8 bits, one scale an output; decoding reads half the
 * bytes. A row is brought to whole numbers of 16 bits (of its own scale, its largest number 32639), in two halves of 8
 * bits, for whose products there are instructions. Sums of whole numbers are the same in any order: a row's bits depend
 * on that row alone, and the instructions (tiles, quads, none) give the same bits.
 * Packed: for 16 outputs and 64 inputs a tile of 1 KiB, 16 quads of inputs by 16 outputs; the tiles of one set of
 * outputs behind each other, missing ones zero; then float scales and int32 sums, one an output. Both halves of a row
 * lie there without a sign, 128 above what they are: what this adds is taken off by the outputs' sums. */
#include "kernels.h"

#undef INS
#undef TILE
#define INS 64
#define TILE (OUTS * INS)
#define MOST 32639
#define OFFSET (MOST + 257) /* 128 in both halves */

/* weight: [n, k] of bfloat16. Returns how many outputs have a weight that is not finite. */
int64_t whole_pack(const uint16_t *weight, int8_t *packed, int64_t n, int64_t k, int64_t threads) {
  const int64_t across = tiles_of(n, OUTS), deep = tiles_of(k, INS);
  float *scales = (float *)(packed + across * deep * TILE);
  int32_t *sums = (int32_t *)(scales + across * OUTS);
  int64_t broken = 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) reduction(+ : broken)
  for (int64_t out = 0; out < across * OUTS; out++) {
    int8_t *to = packed + out / OUTS * deep * TILE + out % OUTS * 4;
    const uint16_t *from = weight + out * k;
    float most = 0, nothing = 0;
    if (out < n)
      for (int64_t i = 0; i < k; i++) {
        const float size = fabsf(widen(from[i]));
        most = size > most ? size : most;
        nothing += size * 0.0f;
      }
    broken += nothing != 0;
    const float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < deep * INS; i++) {
      const int32_t value = out < n && i < k && nothing == 0 ? (int32_t)rintf(widen(from[i]) * inverse) : 0;
      to[i / 4 * INS + i % 4] = (int8_t)value;
      sum += value;
    }
    scales[out] = scale;
    sums[out] = sum;
  }
  return broken;
}

/* One row becomes two halves of ``padded`` bytes and a scale, which is not a number where one of the row is not. */
void whole_row(const uint16_t *x, int64_t k, int64_t padded, uint8_t *high, uint8_t *low, float *scale) {
  vec most = {0}, nothing = {0};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    const vec size = (vec)((ivec)load16(x, i, BFLOAT16) & 0x7fffffff);
    const ivec more = size > most;
    most = (vec)(((ivec)size & more) | ((ivec)most & ~more));
    nothing += size * 0.0f;
  }
  float top = 0, off = 0;
  for (int l = 0; l < LANES; l++) {
    top = most[l] > top ? most[l] : top;
    off += nothing[l];
  }
  for (int64_t j = i; j < k; j++) {
    const float size = fabsf(widen(x[j]));
    top = size > top ? size : top;
    off += size * 0.0f;
  }
  *scale = top / MOST + off;
  const float inverse = top > 0 && off == 0 ? MOST / top : 0;
  typedef uint8_t byte_vec __attribute__((vector_size(16), aligned(1)));
  for (i = 0; i + LANES <= k; i += LANES) {
    vec value = load16(x, i, BFLOAT16) * inverse;
    if (off != 0) value = (vec){0};
    for (int l = 0; l < LANES; l++) value[l] = rintf(value[l]); /* not by adding 1.5 * 2^23: that may be fused */
    const word_vec word = (word_vec)__builtin_convertvector(value, ivec) + OFFSET;
    *(byte_vec *)(high + i) = __builtin_convertvector(word >> 8, byte_vec);
    *(byte_vec *)(low + i) = __builtin_convertvector(word & 255u, byte_vec);
  }
  for (; i < padded; i++) {
    const int32_t word = (i < k && off == 0 ? (int32_t)rintf(widen(x[i]) * inverse) : 0) + OFFSET;
    high[i] = (uint8_t)(word >> 8);
    low[i] = (uint8_t)(word & 255);
  }
}

/* ---- outputs */

typedef struct {
  int32_t high[2][16 * OUTS], low[2][16 * OUTS];
} __attribute__((aligned(64))) Sums;

typedef struct {
  const int8_t *tiles;
  const float *scales;
  const int32_t *sums;
} Block;

static Block block_at(const Projection *p, int64_t block) {
  const int64_t across = tiles_of(p->kind == GATE ? 2 * p->n : p->n, OUTS), deep = p->k / INS;
  const int8_t *packed = (const int8_t *)p->packed;
  const float *scales = (const float *)(packed + across * deep * TILE);
  return (Block){.tiles = packed + block * deep * TILE, .scales = scales + block * OUTS,
                 .sums = (const int32_t *)(scales + across * OUTS) + block * OUTS};
}

/* 16 outputs of a row, rounded, and again behind the bias. */
static void settle(const Projection *p, const Block *b, const int32_t *high, const int32_t *low, float row_scale,
                   int64_t column, int64_t columns, uint16_t *out) {
  float values[OUTS];
  for (int o = 0; o < OUTS; o++) {
    const int64_t whole = (int64_t)high[o] * 256 + low[o] - (int64_t)OFFSET * b->sums[o];
    values[o] = (float)whole * row_scale * b->scales[o];
  }
  store16(out, 0, *(const vec *)values, BFLOAT16);
  if (p->bias)
    for (int64_t o = 0; o < columns; o++) out[o] = narrow(widen(out[o]) + widen(p->bias[column + o]));
}

static void put(const Projection *p, const Sums *s, const Block *b, int64_t row, int64_t rows, int64_t block, int one,
                int up) {
  const int64_t column = block * OUTS, columns = p->n - column < OUTS ? p->n - column : OUTS;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (row + r) * p->out_row + column;
    uint16_t half[OUTS], other[OUTS];
    settle(p, b + one, s->high[one] + r * OUTS, s->low[one] + r * OUTS, p->row_scales[row + r], column, columns, half);
    if (p->kind == GATE) {
      settle(p, b + up, s->high[up] + r * OUTS, s->low[up] + r * OUTS, p->row_scales[row + r], p->n + column, columns,
             other);
      gate_row(half, other, (uint16_t *)p->out + at, OUTS, (int)p->activation, BFLOAT16);
    } else if (p->wide)
      for (int64_t o = 0; o < columns; o++) ((float *)p->out)[at + o] = widen(half[o]);
    else {
      uint16_t *out = (uint16_t *)p->out + at;
      if (p->kind == ADD)
        for (int64_t o = 0; o < columns; o++) half[o] = narrow(widen(half[o]) + widen(out[o]));
      memcpy(out, half, (size_t)columns * sizeof *out);
    }
  }
}

/* ---- sums of up to 16 rows by one or two sets of outputs */

static void sum_plain(const Projection *p, const Block *b, int count, int64_t row, int64_t rows, Sums *s) {
  for (int c = 0; c < count; c++)
    for (int64_t r = 0; r < rows; r++) {
      const uint8_t *high = p->high + (row + r) * p->k, *low = p->low + (row + r) * p->k;
      int32_t *sh = s->high[c] + r * OUTS, *sl = s->low[c] + r * OUTS;
      memset(sh, 0, OUTS * sizeof *sh);
      memset(sl, 0, OUTS * sizeof *sl);
      for (int64_t i = 0; i < p->k; i++)
        for (int o = 0; o < OUTS; o++) {
          const int32_t weight = b[c].tiles[i / 4 * INS + 4 * o + i % 4];
          sh[o] += high[i] * weight;
          sl[o] += low[i] * weight;
        }
    }
}

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define MOST_ROWS 4

static inline __attribute__((always_inline)) void add_rows(const Projection *p, const Block *b, int64_t row, int64_t at,
                                                           Sums *s, int rows, int count) {
  __m512i high[MOST_ROWS][2], low[MOST_ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < count; c++) high[r][c] = low[r][c] = _mm512_setzero_si512();
  const uint8_t *xh = p->high + row * p->k, *xl = p->low + row * p->k;
  for (int64_t i = 0; i < p->k; i += 4) {
    __m512i weight[2];
    for (int c = 0; c < count; c++) {
      weight[c] = _mm512_loadu_si512(b[c].tiles + i * OUTS);
      _mm_prefetch((const char *)(b[c].tiles + i * OUTS + 2048), _MM_HINT_T0);
    }
    for (int r = 0; r < rows; r++) {
      int32_t four[2];
      memcpy(four, xh + r * p->k + i, 4);
      memcpy(four + 1, xl + r * p->k + i, 4);
      const __m512i h = _mm512_set1_epi32(four[0]), l = _mm512_set1_epi32(four[1]);
      for (int c = 0; c < count; c++) {
        high[r][c] = _mm512_dpbusd_epi32(high[r][c], h, weight[c]);
        low[r][c] = _mm512_dpbusd_epi32(low[r][c], l, weight[c]);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < count; c++) {
      _mm512_store_si512(s->high[c] + (at + r) * OUTS, high[r][c]);
      _mm512_store_si512(s->low[c] + (at + r) * OUTS, low[r][c]);
    }
}

static void sum_quads(const Projection *p, const Block *b, int count, int64_t row, int64_t rows, Sums *s) {
  for (int64_t at = 0; at < rows; at += MOST_ROWS) {
    const int64_t now = rows - at < MOST_ROWS ? rows - at : MOST_ROWS;
#define CASE(n)                                             \
  if (now == n) {                                           \
    if (count == 2) add_rows(p, b, row + at, at, s, n, 2);  \
    else add_rows(p, b, row + at, at, s, n, 1);             \
  }
    CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
  }
}

int whole_quads_ready(void) { return 1; }
#else
static void sum_quads(const Projection *p, const Block *b, int count, int64_t row, int64_t rows, Sums *s) {
  sum_plain(p, b, count, row, rows, s);
}
int whole_quads_ready(void) { return 0; }
#endif

#if defined(__AMX_INT8__) && defined(__linux__)
/* Tiles 0 to 3: sums of the halves for two sets of outputs; 4 and 5: the halves of rows; 6 and 7: weights. */
static void shape(int64_t rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } __attribute__((aligned(64))) shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    shapes.rows[t] = (uint8_t)(t >= 6 ? 16 : rows);
    shapes.row_bytes[t] = 64;
  }
  _tile_loadconfig(&shapes);
}

static void sum_tiles(const Projection *p, const Block *b, int count, int64_t row, int64_t rows, Sums *s) {
  const int64_t deep = p->k / INS;
  const uint8_t *high = p->high + row * p->k, *low = p->low + row * p->k;
  const int8_t *first = b[0].tiles, *second = b[count - 1].tiles;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < deep; d++) {
    _tile_loadd(4, high + d * INS, p->k);
    _tile_loadd(5, low + d * INS, p->k);
    _tile_loadd(6, first + d * TILE, 64);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 5, 6);
    if (count == 1) continue;
    _tile_loadd(7, second + d * TILE, 64);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, s->high[0], 64);
  _tile_stored(1, s->low[0], 64);
  _tile_stored(2, s->high[1], 64);
  _tile_stored(3, s->low[1], 64);
}
#else
static void shape(int64_t rows) { (void)rows; }
static void sum_tiles(const Projection *p, const Block *b, int count, int64_t row, int64_t rows, Sums *s) {
  sum_quads(p, b, count, row, rows, s);
}
#endif

int64_t whole_units(const Projection *p) {
  const int64_t blocks = tiles_of(p->n, OUTS);
  return p->kind == GATE ? blocks : tiles_of(blocks, 2);
}

void whole_project(const Projection *p, int64_t unit) {
  Sums sums;
  const int64_t blocks = tiles_of(p->n, OUTS), first = p->kind == GATE ? unit : 2 * unit;
  const int64_t second = p->kind == GATE ? blocks + unit : first + 1;
  const int count = p->kind == GATE || second < blocks ? 2 : 1;
  const Block b[2] = {block_at(p, first), block_at(p, count == 2 ? second : first)};
  /* Few rows leave most of a tile empty, and quads need no other order. */
  const int tiles = (p->road & TILES) && p->m > 4;
  int64_t shaped = 0;
  for (int64_t row = 0; row < p->m; row += 16) {
    const int64_t rows = p->m - row < 16 ? p->m - row : 16;
    if (tiles && rows != shaped) shape(shaped = rows);
    if (tiles) sum_tiles(p, b, count, row, rows, &sums);
    else if (p->road & (TILES | PAIRS)) sum_quads(p, b, count, row, rows, &sums);
    else sum_plain(p, b, count, row, rows, &sums);
    put(p, &sums, b, row, rows, first, 0, 1);
    if (p->kind != GATE && count == 2) put(p, &sums, b, row, rows, second, 1, 1);
  }
}

/* out[m, n] = x[m, k] @ weight.T; ``rows``: what a row of x has, of which k is a multiple of 64. */
void whole_projection(const Projection *p, int64_t rows_k) {
  const int64_t units = whole_units(p);
#pragma omp parallel num_threads((int)p->threads)
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < p->m; row++)
      whole_row(p->x + row * p->x_row, rows_k, p->k, (uint8_t *)p->high + row * p->k, (uint8_t *)p->low + row * p->k,
                (float *)p->row_scales + row);
#pragma omp for schedule(dynamic, 2)
    for (int64_t unit = 0; unit < units; unit++) whole_project(p, unit);
    projection_end(p);
  }
}
