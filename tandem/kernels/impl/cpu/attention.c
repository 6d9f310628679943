/* Attention of rows over key lists, forward and backward. */
#include "kernels.h"

static inline float dot(const float *a, const void *b, int64_t at, int size, int type) {
  vec sum = {0};
  for (int d = 0; d < size; d += LANES) sum += *(const vec *)(a + d) * load16(b, at + d, type);
  return lane_sum(sum);
}

static inline int64_t first_key(const Attention *a, int64_t row) {
  int64_t count = a->counts[row];
  return a->window && count > a->window ? count - a->window : 0;
}

/* out += weights[j] * values[j], in order of j, for ``width`` rows of values. */
static inline void weigh(float *out, const float *weights, const float *values, int64_t width, int size) {
  int d = 0;
  for (; d + 4 * LANES <= size; d += 4 * LANES) {
    vec *o = (vec *)(out + d), s0 = o[0], s1 = o[1], s2 = o[2], s3 = o[3];
    for (int64_t j = 0; j < width; j++) {
      const vec *v = (const vec *)(values + j * size + d);
      const float p = weights[j];
      s0 += p * v[0];
      s1 += p * v[1];
      s2 += p * v[2];
      s3 += p * v[3];
    }
    o[0] = s0, o[1] = s1, o[2] = s2, o[3] = s3;
  }
  for (; d < size; d += LANES) {
    vec sum = *(vec *)(out + d);
    for (int64_t j = 0; j < width; j++) sum += weights[j] * *(const vec *)(values + j * size + d);
    *(vec *)(out + d) = sum;
  }
}

/* Any type and head dimension of whole vectors: keys and values are widened, 16 at a time, for all heads of a group. */
static void attend_wide(const Attention *a, int64_t row, int64_t group, float *scratch, int64_t padded) {
  const int type = (int)a->type, size = (int)a->size;
  const int64_t per_group = a->heads / a->groups, first = first_key(a, row), count = a->counts[row] - first;
  const int32_t *slots = a->slots + a->starts[row] + first;
  const int64_t full = (count + LANES - 1) / LANES * LANES;
  float *q = scratch, *scores = q + per_group * size, *out = scores + per_group * padded;
  float *wide = out + per_group * size; /* 16 keys or values in float32 */
  vec *parts = (vec *)(wide + LANES * size);
  float highest[per_group], total[per_group];
  for (int64_t h = 0; h < per_group; h++)
    for (int d = 0; d < size; d++)
      q[h * size + d] = load1(a->q, row * a->q_row + (group * per_group + h) * a->q_head + d, type) * a->scale;
  for (int64_t block = 0; block < count; block += LANES) {
    const int64_t width = count - block < LANES ? count - block : LANES;
    for (int64_t j = 0; j < width; j++) {
      const int64_t at = slots[block + j] * a->k_row + group * a->k_head;
      for (int d = 0; d < size; d += LANES) *(vec *)(wide + d) = load16(a->k, at + d, type);
      for (int64_t h = 0; h < per_group; h++) {
        vec sum = {0};
        for (int d = 0; d < size; d += LANES) sum += *(const vec *)(q + h * size + d) * *(const vec *)(wide + d);
        parts[h * LANES + j] = sum;
      }
    }
    for (int64_t h = 0; h < per_group; h++) {
      float *s = scores + h * padded + block;
      for (int64_t j = width; j < LANES; j++) parts[h * LANES + j] = (vec){0};
      *(vec *)s = lane_sums(parts + h * LANES);
      for (int64_t j = width; j < LANES; j++) s[j] = -INFINITY;
    }
  }
  for (int64_t h = 0; h < per_group; h++) {
    float *s = scores + h * padded;
    vec most = (vec){0} - INFINITY, sum = {0};
    for (int64_t j = 0; j < full; j += LANES) {
      vec value = *(vec *)(s + j);
      ivec larger = value > most;
      most = (vec)(((ivec)value & larger) | ((ivec)most & ~larger));
    }
    highest[h] = -INFINITY;
    for (int j = 0; j < LANES; j++) highest[h] = most[j] > highest[h] ? most[j] : highest[h];
    for (int64_t j = 0; j < full; j += LANES) {
      vec e = exp16(*(vec *)(s + j) - highest[h]);
      *(vec *)(s + j) = e;
      sum += e;
    }
    total[h] = lane_sum(sum);
  }
  memset(out, 0, (size_t)(per_group * size) * sizeof(float));
  for (int64_t block = 0; block < count; block += LANES) {
    const int64_t width = count - block < LANES ? count - block : LANES;
    for (int64_t j = 0; j < width; j++) {
      const int64_t at = slots[block + j] * a->v_row + group * a->v_head;
      for (int d = 0; d < size; d += LANES) *(vec *)(wide + j * size + d) = load16(a->v, at + d, type);
    }
    for (int64_t h = 0; h < per_group; h++) weigh(out + h * size, scores + h * padded + block, wide, width, size);
  }
  for (int64_t h = 0; h < per_group; h++) {
    const int64_t head = group * per_group + h;
    const float inverse = 1.0f / total[h];
    for (int d = 0; d < size; d += LANES)
      store16(a->out, (row * a->heads + head) * size + d, *(const vec *)(out + h * size + d) * inverse, type);
    if (a->lse) a->lse[row * a->heads + head] = highest[h] + logf(total[h]);
  }
}

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define AHEAD 24 /* keys that are fetched before they are used */
#define HEADS 4  /* most query heads that are computed together */
#define CHUNKS 8 /* 32 dimensions each */

/* The sum of products of bfloat16 pairs, added to each lane of ``sum``. */
static inline vec add_pairs(vec sum, __m512i left, __m512i right) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

/* Scores of ``heads`` query heads over one list of keys, 16 keys at a time, into rows of ``padded``. */
static inline __attribute__((always_inline)) void score(const Attention *a, const uint16_t *q, const int32_t *slots,
                                                        int64_t count, int64_t group, float *scores, int64_t padded,
                                                        int heads, int chunks) {
  __m512i query[HEADS][CHUNKS];
  for (int h = 0; h < heads; h++)
    for (int c = 0; c < chunks; c++) query[h][c] = _mm512_loadu_si512(q + h * a->q_head + c * 32);
  const uint16_t *keys = (const uint16_t *)a->k + group * a->k_head;
  const uint16_t *values = (const uint16_t *)a->v + group * a->v_head;
  for (int64_t block = 0; block < count; block += LANES) {
    const int64_t width = count - block < LANES ? count - block : LANES;
    vec parts[HEADS][LANES];
    for (int64_t j = 0; j < LANES; j++) {
      /* Slots lie apart, so nothing else would fetch the next keys, or the values for later. */
      const int64_t ahead = block + j + AHEAD < count ? block + j + AHEAD : count - 1;
      for (int c = 0; c < chunks; c++) {
        _mm_prefetch(keys + slots[ahead] * a->k_row + c * 32, _MM_HINT_T0);
        _mm_prefetch(values + slots[ahead] * a->v_row + c * 32, _MM_HINT_T0);
      }
      const uint16_t *key = keys + slots[block + (j < width ? j : 0)] * a->k_row;
      __m512i k[CHUNKS];
      for (int c = 0; c < chunks; c++) k[c] = _mm512_loadu_si512(key + c * 32);
      for (int h = 0; h < heads; h++) {
        vec sum = {0};
        for (int c = 0; c < chunks; c++) sum = add_pairs(sum, query[h][c], k[c]);
        parts[h][j] = sum;
      }
    }
    for (int h = 0; h < heads; h++) {
      float *s = scores + h * padded + block;
      *(vec *)s = lane_sums(parts[h]) * a->scale;
      for (int64_t j = width; j < LANES; j++) s[j] = -INFINITY;
    }
  }
}

/* Sums of values weighted by ``weights`` in order of the list, 64 dimensions at a time; even and odd dimensions in
 * vectors of their own. */
static inline __attribute__((always_inline)) void mix(const Attention *a, const float *weights, const float *inverse,
                                                      const int32_t *slots, int64_t count, int64_t group,
                                                      uint16_t *out, int64_t padded, int heads, int chunks) {
  const uint16_t *values = (const uint16_t *)a->v + group * a->v_head;
  for (int begin = 0; begin < chunks; begin += 2) {
    const int now = chunks - begin < 2 ? 1 : 2;
    vec even[HEADS][2], odd[HEADS][2];
    for (int h = 0; h < heads; h++)
      for (int c = 0; c < now; c++) even[h][c] = odd[h][c] = (vec){0};
    for (int64_t j = 0; j < count; j++) {
      const uint16_t *value = values + slots[j] * a->v_row + begin * 32;
      for (int c = 0; c < now; c++) {
        const word_vec both = (word_vec)_mm512_loadu_si512(value + c * 32);
        const vec low = (vec)(both << 16), high = (vec)(both & 0xffff0000u);
        for (int h = 0; h < heads; h++) {
          const float weight = weights[h * padded + j];
          even[h][c] += weight * low;
          odd[h][c] += weight * high;
        }
      }
    }
    for (int h = 0; h < heads; h++)
      for (int c = 0; c < now; c++) {
        uint16_t halves[2][LANES];
        store16(halves[0], 0, even[h][c] * inverse[h], BFLOAT16);
        store16(halves[1], 0, odd[h][c] * inverse[h], BFLOAT16);
        const word_vec low = __builtin_convertvector(*(half_vec *)halves[0], word_vec);
        const word_vec high = __builtin_convertvector(*(half_vec *)halves[1], word_vec);
        *(word_vec *)(out + h * a->size + (begin + c) * 32) = low | (high << 16);
      }
  }
}

/* Scores become their exponentials below the highest; returns the sum. */
static inline float exponentiate(float *s, int64_t full, float *highest) {
  vec most = (vec){0} - INFINITY, sum = {0};
  for (int64_t j = 0; j < full; j += LANES) most = (vec)_mm512_max_ps((__m512)most, *(__m512_u *)(s + j));
  *highest = _mm512_reduce_max_ps((__m512)most);
  for (int64_t j = 0; j < full; j += LANES) {
    const vec e = exp16(*(vec *)(s + j) - *highest);
    *(vec *)(s + j) = e;
    sum += e;
  }
  return lane_sum(sum);
}

#define EACH(heads, chunks)                                                                                    \
  static __attribute__((noinline)) void score_##heads##_##chunks(                                              \
      const Attention *a, const uint16_t *q, const int32_t *slots, int64_t count, int64_t group, float *s,     \
      int64_t padded) {                                                                                        \
    score(a, q, slots, count, group, s, padded, heads, chunks);                                                \
  }                                                                                                            \
  static __attribute__((noinline)) void mix_##heads##_##chunks(                                                \
      const Attention *a, const float *w, const float *inverse, const int32_t *slots, int64_t count,           \
      int64_t group, uint16_t *out, int64_t padded) {                                                          \
    mix(a, w, inverse, slots, count, group, out, padded, heads, chunks);                                       \
  }
#define EACH_SIZE(chunks) EACH(1, chunks) EACH(2, chunks) EACH(3, chunks) EACH(4, chunks)
EACH_SIZE(1) EACH_SIZE(2) EACH_SIZE(3) EACH_SIZE(4) EACH_SIZE(8)
typedef void Score(const Attention *, const uint16_t *, const int32_t *, int64_t, int64_t, float *, int64_t);
typedef void Mix(const Attention *, const float *, const float *, const int32_t *, int64_t, int64_t, uint16_t *, int64_t);
#define ROW(what, chunks) {what##_1_##chunks, what##_2_##chunks, what##_3_##chunks, what##_4_##chunks}
#define ROWS(what) {ROW(what, 1), ROW(what, 2), ROW(what, 3), ROW(what, 4), {0}, {0}, {0}, ROW(what, 8)}
static Score *const SCORES[CHUNKS][HEADS] = ROWS(score);
static Mix *const MIXES[CHUNKS][HEADS] = ROWS(mix);

static int narrow_road(const Attention *a) { 
  return a->type == BFLOAT16 && a->size % 32 == 0 && a->size <= 32 * CHUNKS && SCORES[a->size / 32 - 1][0];
}

/* bfloat16: products of pairs of dimensions for the scores, weights in float32. */
static void attend_pairs(const Attention *a, int64_t row, int64_t group, float *scores, int64_t padded) {
  const int64_t per_group = a->heads / a->groups, first = first_key(a, row), count = a->counts[row] - first;
  const int32_t *slots = a->slots + a->starts[row] + first;
  const int64_t full = (count + LANES - 1) / LANES * LANES;
  const int kind = (int)(a->size / 32) - 1;
  for (int64_t done = 0; done < per_group; done += HEADS) {
    const int64_t head = group * per_group + done;
    const int heads = per_group - done < HEADS ? (int)(per_group - done) : HEADS;
    float highest[HEADS], total[HEADS], inverse[HEADS];
    SCORES[kind][heads - 1](a, (const uint16_t *)a->q + row * a->q_row + head * a->q_head, slots, count, group, scores,
                            padded);
    for (int h = 0; h < heads; h++) {
      total[h] = exponentiate(scores + h * padded, full, highest + h);
      inverse[h] = 1.0f / total[h];
      if (a->lse) a->lse[row * a->heads + head + h] = highest[h] + logf(total[h]);
    }
    MIXES[kind][heads - 1](a, scores, inverse, slots, count, group,
                           (uint16_t *)a->out + (row * a->heads + head) * a->size, padded);
  }
}
#else
#define HEADS 1
static int narrow_road(const Attention *a) {
  (void)a;
  return 0;
}
static void attend_pairs(const Attention *a, int64_t row, int64_t group, float *scores, int64_t padded) {
  (void)a, (void)row, (void)group, (void)scores, (void)padded;
}
#endif

void attend(const Attention *a, int64_t row, int64_t group, float *scratch, int64_t padded) {
  if (narrow_road(a)) attend_pairs(a, row, group, scratch, padded);
  else attend_wide(a, row, group, scratch, padded);
}

int64_t attention_longest(const Attention *a) {
  int64_t most = 0;
  for (int64_t row = 0; row < a->rows; row++) most = a->counts[row] > most ? a->counts[row] : most;
  return (most + LANES - 1) / LANES * LANES;
}

int64_t attention_scratch(const Attention *a, int64_t padded) {
  if (narrow_road(a)) return HEADS * padded;
  return a->heads / a->groups * (2 * a->size + padded + LANES * LANES) + LANES * a->size;
}

/* Returns 0, or 1 when memory ran out. */
int attention_forward(const Attention *a) {
  const int64_t padded = attention_longest(a);
  int failed = 0;
#pragma omp parallel num_threads((int)a->threads)
  {
    float *scratch = malloc((size_t)attention_scratch(a, padded) * sizeof(float) + 64);
    if (!scratch) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp barrier
    if (!failed) {
#pragma omp for schedule(dynamic, 4)
      for (int64_t unit = 0; unit < a->rows * a->groups; unit++)
        attend(a, unit / a->groups, unit % a->groups, scratch, padded);
    }
    free(scratch);
  }
  return failed;
}

/* Gradients. q_scaled, grad: float32 [T, H, D], q with the scale in it; k, v as in the forward pass.
 * Two passes so that no two threads ever add to one place: rows gather dq, then slots gather dk and dv from the
 * rows that list them, in order of row (readers: rows by slot; reader_starts: [S + 1]). */
typedef struct {
  const float *q_scaled, *grad;
  float *dq, *dk, *dv, *delta;
  const int32_t *readers;
  const int64_t *reader_starts;
  int64_t slots;
} Backward;

static void gather_dq(const Attention *a, const Backward *b, int64_t row, int64_t group) {
  const int type = (int)a->type, size = (int)a->size;
  const int64_t per_group = a->heads / a->groups, first = first_key(a, row), count = a->counts[row] - first;
  const int32_t *slots = a->slots + a->starts[row] + first;
  for (int64_t h = 0; h < per_group; h++) {
    const int64_t head = row * a->heads + group * per_group + h;
    const float *q = b->q_scaled + head * size, *grad = b->grad + head * size;
    float *dq = b->dq + head * size;
    const float lse = a->lse[head], delta = b->delta[head];
    for (int d = 0; d < size; d++) dq[d] = 0;
    for (int64_t block = 0; block < count; block += LANES) {
      const int64_t width = count - block < LANES ? count - block : LANES;
      float s[LANES], dp[LANES], ds[LANES];
      for (int64_t j = 0; j < LANES; j++) s[j] = -INFINITY, dp[j] = 0;
      for (int64_t j = 0; j < width; j++) {
        const int64_t slot = slots[block + j];
        s[j] = dot(q, a->k, slot * a->k_row + group * a->k_head, size, type) - lse;
        dp[j] = dot(grad, a->v, slot * a->v_row + group * a->v_head, size, type) - delta;
      }
      *(vec *)ds = exp16(*(vec *)s) * *(vec *)dp;
      for (int64_t j = 0; j < width; j++) {
        const int64_t at = slots[block + j] * a->k_row + group * a->k_head;
        for (int d = 0; d < size; d += LANES) *(vec *)(dq + d) += ds[j] * load16(a->k, at + d, type);
      }
    }
    for (int d = 0; d < size; d++) dq[d] *= a->scale;
  }
}

static void gather_dkv(const Attention *a, const Backward *b, int64_t slot, int64_t group, float *k, float *v) {
  const int type = (int)a->type, size = (int)a->size;
  const int64_t per_group = a->heads / a->groups;
  float *dk = b->dk + (slot * a->groups + group) * size, *dv = b->dv + (slot * a->groups + group) * size;
  for (int d = 0; d < size; d++) {
    dk[d] = dv[d] = 0;
    k[d] = load1(a->k, slot * a->k_row + group * a->k_head + d, type);
    v[d] = load1(a->v, slot * a->v_row + group * a->v_head + d, type);
  }
  const int64_t begin = b->reader_starts[slot], end = b->reader_starts[slot + 1], pairs = (end - begin) * per_group;
  for (int64_t block = 0; block < pairs; block += LANES) {
    const int64_t width = pairs - block < LANES ? pairs - block : LANES;
    float s[LANES], dp[LANES], p[LANES];
    int64_t heads[LANES];
    for (int64_t j = 0; j < LANES; j++) s[j] = -INFINITY, dp[j] = 0;
    for (int64_t j = 0; j < width; j++) {
      const int64_t pair = block + j;
      const int64_t head = b->readers[begin + pair / per_group] * a->heads + group * per_group + pair % per_group;
      heads[j] = head;
      s[j] = dot(k, b->q_scaled, head * size, size, FLOAT32) - a->lse[head];
      dp[j] = dot(v, b->grad, head * size, size, FLOAT32) - b->delta[head];
    }
    *(vec *)p = exp16(*(vec *)s);
    for (int64_t j = 0; j < width; j++) {
      const float *q = b->q_scaled + heads[j] * size, *grad = b->grad + heads[j] * size;
      const float ds = p[j] * dp[j];
      for (int d = 0; d < size; d += LANES) {
        *(vec *)(dk + d) += ds * *(const vec *)(q + d);
        *(vec *)(dv + d) += p[j] * *(const vec *)(grad + d);
      }
    }
  }
}

void attention_backward(const Attention *a, const Backward *b) {
  const int64_t size = a->size;
#pragma omp parallel num_threads((int)a->threads)
  {
#pragma omp for schedule(dynamic, 16)
    for (int64_t head = 0; head < a->rows * a->heads; head++)
      b->delta[head] = dot(b->grad + head * size, a->out, head * size, (int)size, (int)a->type);
#pragma omp for schedule(dynamic, 4)
    for (int64_t unit = 0; unit < a->rows * a->groups; unit++)
      gather_dq(a, b, unit / a->groups, unit % a->groups);
    float k[size] __attribute__((aligned(64))), v[size] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 4)
    for (int64_t unit = 0; unit < b->slots * a->groups; unit++)
      gather_dkv(a, b, unit / a->groups, unit % a->groups, k, v);
  }
}
