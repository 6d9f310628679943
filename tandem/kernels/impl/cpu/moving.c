// Copies of weights and their digests in one pass over the memory.
//
// The digest of a buffer is the sum, over its 64-byte rows, of a mix of the row's eight words with keys that depend on
// the row's number (the accumulation of XXH3, Yann Collet 2019, with a counter instead of a scramble). A sum may be
// taken in parts and in any order, so threads share a buffer, and the numbers do not depend on how. It finds faults; it
// is no defence against somebody who makes them.
#include "moving.h"

#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

const uint64_t MOVING_KEYS[WORDS] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
};
#define LANES 4
#define AHEAD 2048

void move_rows(const Part *part) {
  const int64_t rows = part->rows;
  const uint8_t *from = part->from;
  uint8_t *to = part->to;
  uint64_t sums[WORDS] = {0}, keys[WORDS];
  for (int w = 0; w < WORDS; w++) keys[w] = MOVING_KEYS[w] + MOVING_STEP * (uint64_t)part->first_row;
#if defined(__AVX512F__)
  // LANES places of the part at once: one place alone waits for each new page of the memory.
  const int64_t each = rows / LANES;
  const __m512i step = _mm512_set1_epi64((long long)MOVING_STEP), first = _mm512_loadu_si512(keys);
  const int stream = to != NULL && ((uintptr_t)to & 63) == 0;
  __m512i sum[LANES], key[LANES];
  for (int l = 0; l < LANES; l++) {
    sum[l] = _mm512_setzero_si512();
    key[l] = _mm512_add_epi64(first, _mm512_set1_epi64((long long)(MOVING_STEP * (uint64_t)(l * each))));
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
  for (int w = 0; w < WORDS; w++) keys[w] = MOVING_KEYS[w] + MOVING_STEP * (uint64_t)(part->first_row + begin);
  for (int64_t r = begin; r < rows; r++) {
    uint64_t words[WORDS];
    memcpy(words, from + r * 64, 64);
    for (int w = 0; w < WORDS; w++) {
      const uint64_t mixed = words[w] ^ keys[w];
      sums[w] += (mixed & 0xffffffffull) * (mixed >> 32) + words[w];
      keys[w] += MOVING_STEP;
    }
    if (to) memcpy(to + r * 64, words, 64);
  }
  for (int w = 0; w < WORDS; w++) part->sums[w] = sums[w];
}

#define PORTION (1 << 20)  // bytes that a thread takes at once

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t set_bytes(const Move *m) { return (m->ins + 31) / 32 * 32 * 16 * 2; }

// How many portions there are: of whole sets of outputs, or of rows and behind the last of them what fills none.
static int64_t portions_of(const Move *m) {
  const int64_t bytes = m->outs ? (m->outs + 15) / 16 * set_bytes(m) : m->bytes;
  const int64_t each = m->outs ? (PORTION + set_bytes(m) - 1) / set_bytes(m) * set_bytes(m) : PORTION;
  return (bytes + each - 1) / each;
}

static int do_portion(const Move *m, int64_t portion) {
  uint64_t own[WORDS] = {0};
  int failed = 0;
  if (m->outs) {
    const int64_t each = (PORTION + set_bytes(m) - 1) / set_bytes(m), first = portion * each;
    failed = pack_sets(m, first, least(each, (m->outs + 15) / 16 - first), own);
  } else {
    const int64_t at = portion * PORTION, bytes = least(PORTION, m->bytes - at), left = bytes % 64;
    const Part part = {.from = m->from + at, .to = m->to ? m->to + at : 0, .sums = own, .rows = bytes / 64,
                       .first_row = at / 64};
    move_rows(&part);
    if (left) {
      uint64_t row[WORDS] = {0}, more[WORDS];
      memcpy(row, m->from + at + bytes - left, (size_t)left);
      const Part last = {.from = (const uint8_t *)row, .sums = more, .rows = 1, .first_row = (at + bytes) / 64};
      move_rows(&last);
      for (int w = 0; w < WORDS; w++) own[w] += more[w];
      if (m->to) memcpy(m->to + at + bytes - left, row, (size_t)left);
    }
  }
  for (int w = 0; w < WORDS; w++) __atomic_fetch_add(m->sums + w, own[w], __ATOMIC_RELAXED);
  return failed;
}

// All of them, in one go of the threads. Returns 0, or 1 when memory ran out.
int tandem_move(const Move *moves, int64_t num_moves, int64_t threads) {
  int64_t *ends = malloc((size_t)(num_moves + 1) * sizeof *ends);
  int failed = !ends;
  if (failed) return 1;
  int64_t total = 0;
  for (int64_t m = 0; m < num_moves; m++) {
    ends[m] = total += portions_of(moves + m);
    for (int w = 0; w < WORDS; w++) moves[m].sums[w] = 0;
  }
#pragma omp parallel num_threads((int)threads) reduction(| : failed)
  {
    int64_t m = 0;
#pragma omp for schedule(dynamic, 1)
    for (int64_t p = 0; p < total; p++) {
      while (ends[m] <= p) m++; /* a thread's portions come in ascending order */
      failed |= do_portion(moves + m, p - (m ? ends[m - 1] : 0));
    }
  }
  free(ends);
  return failed;
}
