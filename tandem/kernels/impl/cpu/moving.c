// Copies of weights and their digests in one pass over the memory.
//
// The digest of a buffer is the sum, over its 64-byte rows, of a mix of the row's eight words with keys that depend on
// the row's number (the accumulation of XXH3, Yann Collet 2019, with a counter instead of a scramble). A sum may be
// taken in parts and in any order, so threads share a buffer, and the numbers do not depend on how. It finds faults; it
// is no defence against somebody who makes them.
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define WORDS 8
static const uint64_t KEYS[WORDS] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
};
#define LANES 4
#define AHEAD 2048
#define STEP 0x9e3779b97f4a7c15ull  // the golden ratio: keys of different rows differ in all their bits

typedef struct {
  const uint8_t *from;
  uint8_t *to;  // NULL: digest only
  uint64_t *sums;  // WORDS of them, added to
  int64_t rows, first_row;
} Part;

static void move_rows(const Part *part) {
  const int64_t rows = part->rows;
  const uint8_t *from = part->from;
  uint8_t *to = part->to;
  uint64_t sums[WORDS] = {0}, keys[WORDS];
  for (int w = 0; w < WORDS; w++) keys[w] = KEYS[w] + STEP * (uint64_t)part->first_row;
#if defined(__AVX512F__)
  // LANES places of the part at once: one place alone waits for each new page of the memory.
  const int64_t each = rows / LANES;
  const __m512i step = _mm512_set1_epi64((long long)STEP), first = _mm512_loadu_si512(keys);
  const int stream = to != NULL && ((uintptr_t)to & 63) == 0;
  __m512i sum[LANES], key[LANES];
  for (int l = 0; l < LANES; l++) {
    sum[l] = _mm512_setzero_si512();
    key[l] = _mm512_add_epi64(first, _mm512_set1_epi64((long long)(STEP * (uint64_t)(l * each))));
  }
  for (int64_t r = 0; r < each; r++)
    for (int l = 0; l < LANES; l++) {
      const int64_t at = (l * each + r) * 64;
      _mm_prefetch((const char *)(from + at + AHEAD), _MM_HINT_T0);
      const __m512i words = _mm512_loadu_si512(from + at), mixed = _mm512_xor_si512(words, key[l]);
      sum[l] = _mm512_add_epi64(sum[l], _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
      sum[l] = _mm512_add_epi64(sum[l], words);
      key[l] = _mm512_add_epi64(key[l], step);
      if (stream) _mm512_stream_si512((void *)(to + at), words);  // the reader is another core: pass the cache
      else if (to) _mm512_storeu_si512(to + at, words);
    }
  if (stream) _mm_sfence();
  for (int l = 1; l < LANES; l++) sum[0] = _mm512_add_epi64(sum[0], sum[l]);
  _mm512_storeu_si512(sums, sum[0]);
  const int64_t begin = each * LANES;
#else
  const int64_t begin = 0;
#endif
  for (int w = 0; w < WORDS; w++) keys[w] = KEYS[w] + STEP * (uint64_t)(part->first_row + begin);
  for (int64_t r = begin; r < rows; r++) {
    uint64_t words[WORDS];
    memcpy(words, from + r * 64, 64);
    for (int w = 0; w < WORDS; w++) {
      const uint64_t mixed = words[w] ^ keys[w];
      sums[w] += (mixed & 0xffffffffull) * (mixed >> 32) + words[w];
      keys[w] += STEP;
    }
    if (to) memcpy(to + r * 64, words, 64);
  }
  for (int w = 0; w < WORDS; w++) part->sums[w] = sums[w];
}

// Each part is done by one thread, with sums of its own.
void tandem_move(const Part *parts, int64_t num_parts, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
  for (int64_t p = 0; p < num_parts; p++) move_rows(parts + p);
}
