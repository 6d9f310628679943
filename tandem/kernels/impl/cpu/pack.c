/* Weights of bfloat16 in the order in which projections read them, and rows of them as they were.
 * For 16 outputs and 32 inputs a tile of 1 KiB, 16 pairs of inputs by 16 outputs, the tiles of one set of outputs behind
 * each other; missing outputs and inputs are zero. */
#include "kernels.h"
#include "moving.h"

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
