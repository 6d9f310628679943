/* Projections of bfloat16 rows on tile instructions (AMX). A tile product adds its 32 terms to each sum in one fixed
 * order and keeps rows apart, and the tiles of a sum follow each other in order of k, so a row's bits do not depend
 * on how many rows a call has, or on the number of threads. (The sums stay in float32 and are rounded once.)
 * Packed weights: for 16 outputs and 32 inputs a tile of 1 KiB, 16 pairs of inputs by 16 outputs, the tiles of one
 * set of outputs behind each other; missing outputs and inputs are zero. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OUTS 16
#define INS 32
#define TILE (OUTS * INS)

static inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* weight: [n, k] with contiguous rows; packed: as said above. */
void tiles_pack(const uint16_t *weight, uint16_t *packed, int64_t n, int64_t k, int64_t threads) {
  const int64_t across = tiles_of(n, OUTS), deep = tiles_of(k, INS);
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t block = 0; block < across; block++)
    for (int64_t d = 0; d < deep; d++) {
      uint16_t *tile = packed + (block * deep + d) * TILE;
      const int64_t outs = n - block * OUTS < OUTS ? n - block * OUTS : OUTS;
      const int64_t ins = k - d * INS < INS ? k - d * INS : INS;
      if (outs < OUTS || ins < INS) memset(tile, 0, TILE * sizeof *tile);
      const uint16_t *from = weight + block * OUTS * k + d * INS;
      for (int64_t o = 0; o < outs; o++)
        for (int64_t i = 0; i < ins; i++) tile[(i / 2) * INS + 2 * o + i % 2] = from[o * k + i];
    }
}

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} __attribute__((aligned(64))) Shapes;

/* Sums are tiles 0 to 3, the two sets of rows 4 and 5, the two sets of outputs 6 and 7. */
static void shape(int64_t first_rows, int64_t second_rows) {
  Shapes shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    const int64_t rows = t >= 6 ? 16 : t == 4 || t < 2 ? first_rows : second_rows;
    shapes.rows[t] = (uint8_t)(rows ? rows : 1);
    shapes.row_bytes[t] = 64;
  }
  _tile_loadconfig(&shapes);
}

/* Asks the kernel for the tile registers of this process. Returns 1 when they may be used. */
int tiles_ready(void) {
  return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

typedef struct {
  const uint16_t *x, *packed;
  void *out;
  int64_t x_row, out_row; /* in elements */
  int64_t m, n, k, wide;  /* wide: sums are written as float32, rounded to bfloat16 all the same */
  int64_t threads;
} Projection;

static inline __m512i rounded(__m512 value) {
  const __m512i word = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

static inline void put(const Projection *p, const float *sums, int64_t row, int64_t rows, int64_t column) {
  const int64_t columns = p->n - column < OUTS ? p->n - column : OUTS;
  const __mmask16 mask = (__mmask16)((1u << columns) - 1);
  for (int64_t r = 0; r < rows; r++) {
    const __m512i half = rounded(_mm512_load_ps(sums + r * OUTS));
    const int64_t at = (row + r) * p->out_row + column;
    if (p->wide) _mm512_mask_storeu_epi32((float *)p->out + at, mask, _mm512_slli_epi32(half, 16));
    else _mm256_mask_storeu_epi16((uint16_t *)p->out + at, mask, _mm512_cvtepi32_epi16(half));
  }
}

/* Rows row to row + first + second by the outputs of one pair of tile columns. */
static void product(const Projection *p, int64_t pair, int64_t row, int64_t first, int64_t second) {
  const int64_t deep = p->k / INS, across = tiles_of(p->n, OUTS);
  const int both = 2 * pair + 1 < across;
  const uint16_t *b0 = p->packed + 2 * pair * deep * TILE, *b1 = both ? b0 + deep * TILE : b0;
  const uint16_t *a0 = p->x + row * p->x_row, *a1 = second ? a0 + 16 * p->x_row : a0;
  const int64_t stride = p->x_row * 2;
  float sums[4][16 * OUTS] __attribute__((aligned(64)));
  _tile_zero(0);
  _tile_zero(1);
  if (second) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < deep; d++) {
      _tile_loadd(6, b0 + d * TILE, 64);
      _tile_loadd(4, a0 + d * INS, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + d * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a1 + d * INS, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  } else
    for (int64_t d = 0; d < deep; d++) {
      _tile_loadd(6, b0 + d * TILE, 64);
      _tile_loadd(4, a0 + d * INS, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + d * TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  for (int half = 0; half < 1 + both; half++) {
    put(p, sums[half], row, first, (2 * pair + half) * OUTS);
    if (second) put(p, sums[2 + half], row + 16, second, (2 * pair + half) * OUTS);
  }
}

/* out[m, n] = x[m, k] @ weight.T; k is a multiple of 32. */
void tiles_linear(const Projection *p) {
  const int64_t pairs = tiles_of(tiles_of(p->n, OUTS), 2), whole = p->m / 32 * 32, left = p->m - whole;
#pragma omp parallel num_threads((int)p->threads)
  {
    const int64_t first = left < 16 ? left : 16, second = left - first;
    if (!whole) shape(first, second);
#pragma omp for schedule(dynamic, 4)
    for (int64_t pair = 0; pair < pairs; pair++) {
      if (whole) shape(16, 16);
      for (int64_t row = 0; row < whole; row += 32) product(p, pair, row, 16, 16);
      if (whole && left) shape(first, second);
      if (left) product(p, pair, whole, first, second);
    }
    _tile_release();
  }
}
#else
int tiles_ready(void) { return 0; }
void tiles_linear(const void *p) { (void)p; abort(); }
#endif
