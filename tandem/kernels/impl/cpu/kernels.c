/* Row-exact CPU kernels. Each output row is computed by one thread in one fixed order of operations, so its bits
 * depend on its own inputs only: not on the batch, the chunking, the number of threads, or where keys lie.
 * Built with -ffp-contract=fast (one rounding a multiply-add, everywhere) and without -ffast-math.
 * Vectors are GCC vector extensions of 16 floats: the compiler splits them on narrower machines, with the same
 * lane arithmetic. Rows of bfloat16 are widened on load and rounded once on store (to nearest, ties to even). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half_vec __attribute__((vector_size(32), aligned(2)));
typedef uint32_t word_vec __attribute__((vector_size(64), aligned(4)));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

static inline float widen(uint16_t half) {
  uint32_t word = (uint32_t)half << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

static inline uint16_t narrow(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

static inline vec load16(const void *base, int64_t at, int type) {
  if (type == FLOAT32) return *(const vec *)((const float *)base + at);
  half_vec half = *(const half_vec *)((const uint16_t *)base + at);
  return (vec)(__builtin_convertvector(half, word_vec) << 16);
}

static inline float load1(const void *base, int64_t at, int type) {
  return type == FLOAT32 ? ((const float *)base)[at] : widen(((const uint16_t *)base)[at]);
}

static inline void store1(void *base, int64_t at, float value, int type) {
  if (type == FLOAT32) ((float *)base)[at] = value;
  else ((uint16_t *)base)[at] = narrow(value);
}

static inline void store16(void *base, int64_t at, vec value, int type) {
  if (type == FLOAT32) {
    *(vec *)((float *)base + at) = value;
    return;
  }
  word_vec word = (word_vec)value, up = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  word_vec odd = (word_vec)((word & 0x7fffffffu) > 0x7f800000u); /* not a number */
  *(half_vec *)((uint16_t *)base + at) = __builtin_convertvector((up & ~odd) | (odd & 0x7fc0u), half_vec);
}

/* Each folds two vectors once, lower onto upper parts of 8, 4, 2 and 1 lanes, and puts the results side by side. */
static inline vec fold8(vec a, vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline vec fold4(vec a, vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
static inline vec fold2(vec a, vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
static inline vec fold1(vec a, vec b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* Sum of the lanes in one fixed tree. */
static inline float lane_sum(vec v) {
  v = fold8(v, v);
  v = fold4(v, v);
  v = fold2(v, v);
  return fold1(v, v)[0];
}

/* The lane sums of 16 vectors, each in the tree of ``lane_sum``. */
static inline vec lane_sums(const vec *v) {
  vec a[8], b[4];
  for (int i = 0; i < 8; i++) a[i] = fold8(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < 4; i++) b[i] = fold4(a[2 * i], a[2 * i + 1]);
  return fold1(fold2(b[0], b[1]), fold2(b[2], b[3]));
}

/* exp of 16 floats by range reduction and a polynomial of degree 6; below -87 the result is 0. */
static inline vec exp16(vec x) {
  vec low = (vec){0} - 87.0f;
  ivec alive = x > low;
  x = (vec)(((ivec)x & alive) | ((ivec)low & ~alive));
  vec high = (vec){0} + 88.0f;
  ivec small = x < high;
  x = (vec)(((ivec)x & small) | ((ivec)high & ~small));
  vec shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the integer part lands in the low bits */
  vec whole = shifted - 12582912.0f;
  vec r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  vec p = (vec){0} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
  return (vec)((ivec)(p * (vec)power) & alive);
}

static inline float dot(const float *a, const void *b, int64_t at, int size, int type) {
  vec sum = {0};
  for (int d = 0; d < size; d += LANES) sum += *(const vec *)(a + d) * load16(b, at + d, type);
  return lane_sum(sum);
}

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

static void attend(const Attention *a, int64_t row, int64_t group, float *scratch, int64_t padded) {
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

static int64_t longest(const Attention *a) {
  int64_t most = 0;
  for (int64_t row = 0; row < a->rows; row++) most = a->counts[row] > most ? a->counts[row] : most;
  return (most + LANES - 1) / LANES * LANES;
}

/* Returns 0, or 1 when memory ran out. */
int attention_forward(const Attention *a) {
  const int64_t padded = longest(a), per_group = a->heads / a->groups;
  int failed = 0;
#pragma omp parallel num_threads((int)a->threads)
  {
    float *scratch = malloc((size_t)(per_group * (2 * a->size + padded + LANES * LANES) + LANES * a->size) * sizeof(float) + 64);
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

/* out = round(x / rms(x)) * weight, rounded again, as the reference library does; inverse: [rows], may be null. */
void rms_norm(const void *x, int64_t x_row, const void *weight, void *out, float *inverse, int64_t rows,
              int64_t size, float eps, int64_t type, int64_t threads) {
  const int t = (int)type;
  const int64_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * size > 16384)
  for (int64_t row = 0; row < rows; row++) {
    vec sum = {0};
    for (int64_t d = 0; d < whole; d += LANES) {
      vec value = load16(x, row * x_row + d, t);
      sum += value * value;
    }
    float total = lane_sum(sum);
    for (int64_t d = whole; d < size; d++) {
      float value = load1(x, row * x_row + d, t);
      total += value * value;
    }
    const float scale = 1.0f / sqrtf(total / (float)size + eps);
    if (inverse) inverse[row] = scale;
    if (t == FLOAT32) {
      const float *in = (const float *)x + row * x_row, *w = weight;
      float *to = (float *)out + row * size;
      for (int64_t d = 0; d < size; d++) to[d] = in[d] * scale * w[d];
    } else {
      const uint16_t *in = (const uint16_t *)x + row * x_row, *w = weight;
      uint16_t *to = (uint16_t *)out + row * size;
      for (int64_t d = 0; d < size; d++) to[d] = narrow(widen(narrow(widen(in[d]) * scale)) * widen(w[d]));
    }
  }
}

/* Rotary embedding of the two halves of each head; cos, sin: float32 [T, D]; sign -1 turns back (the gradient). */
void rope(const void *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, void *out,
          int64_t rows, int64_t heads, int64_t size, float sign, int64_t type, int64_t threads) {
  const int t = (int)type;
  const int64_t half = size / 2;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * heads * size > 16384)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++) {
      const int64_t from = row * x_row + head * x_head, to = (row * heads + head) * size;
      const float *c = cosine + row * size, *s = sine + row * size;
      for (int64_t d = 0; d < half; d++) {
        const float a = load1(x, from + d, t), b = load1(x, from + half + d, t);
        const float turn = sign * s[d];
        store1(out, to + d, a * c[d] - b * turn, t);
        store1(out, to + half + d, b * c[d] + a * turn, t);
      }
    }
}

/* out = silu(gate) * up; silu is rounded to the type before the product, as separate operations would. */
void silu_mul(const void *gate, const void *up, int64_t in_row, void *out, int64_t rows, int64_t size, int64_t type,
              int64_t threads) {
  const int t = (int)type;
  const int64_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * size > 16384)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t d = 0; d < whole; d += LANES) {
      const vec g = load16(gate, row * in_row + d, t), u = load16(up, row * in_row + d, t);
      vec value = g / (1.0f + exp16(-g));
      if (t == BFLOAT16) {
        uint16_t half[LANES];
        store16(half, 0, value, t);
        value = load16(half, 0, t);
      }
      store16(out, row * size + d, value * u, t);
    }
    for (int64_t d = whole; d < size; d += LANES) {
      float g[LANES], u[LANES];
      const int64_t width = size - d;
      memset(g, 0, sizeof g);
      memset(u, 0, sizeof u);
      for (int64_t j = 0; j < width; j++) {
        g[j] = load1(gate, row * in_row + d + j, t);
        u[j] = load1(up, row * in_row + d + j, t);
      }
      vec value = *(vec *)g / (1.0f + exp16(-*(vec *)g));
      memcpy(g, &value, sizeof g);
      if (t == BFLOAT16)
        for (int j = 0; j < LANES; j++) g[j] = widen(narrow(g[j]));
      for (int64_t j = 0; j < width; j++) store1(out, row * size + d + j, g[j] * u[j], t);
    }
  }
}
