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

/* Sum of the lanes in one fixed tree. */
static inline float lane_sum(vec v) {
  float a[LANES];
  memcpy(a, &v, sizeof a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) a[i] += a[i + width];
  return a[0];
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

static void attend(const Attention *a, int64_t row, int64_t group, float *scratch, int64_t padded) {
  const int type = (int)a->type, size = (int)a->size;
  const int64_t per_group = a->heads / a->groups, first = first_key(a, row), count = a->counts[row] - first;
  const int32_t *slots = a->slots + a->starts[row] + first;
  const int64_t full = (count + LANES - 1) / LANES * LANES;
  float *q = scratch, *scores = q + per_group * size, *out = scores + per_group * padded;
  float highest[per_group], total[per_group];
  for (int64_t h = 0; h < per_group; h++) {
    highest[h] = -INFINITY;
    for (int d = 0; d < size; d++)
      q[h * size + d] = load1(a->q, row * a->q_row + (group * per_group + h) * a->q_head + d, type) * a->scale;
  }
  for (int64_t j = 0; j < count; j++) {
    const int64_t at = slots[j] * a->k_row + group * a->k_head;
    for (int64_t h = 0; h < per_group; h++) {
      float s = dot(q + h * size, a->k, at, size, type);
      scores[h * padded + j] = s;
      highest[h] = s > highest[h] ? s : highest[h];
    }
  }
  for (int64_t h = 0; h < per_group; h++) {
    float *s = scores + h * padded;
    for (int64_t j = count; j < full; j++) s[j] = -INFINITY;
    vec sum = {0};
    for (int64_t j = 0; j < full; j += LANES) {
      vec e = exp16(*(vec *)(s + j) - highest[h]);
      *(vec *)(s + j) = e;
      sum += e;
    }
    total[h] = lane_sum(sum);
  }
  memset(out, 0, (size_t)(per_group * size) * sizeof(float));
  for (int64_t j = 0; j < count; j++) {
    const int64_t at = slots[j] * a->v_row + group * a->v_head;
    for (int64_t h = 0; h < per_group; h++) {
      const float p = scores[h * padded + j];
      for (int d = 0; d < size; d += LANES) *(vec *)(out + h * size + d) += p * load16(a->v, at + d, type);
    }
  }
  for (int64_t h = 0; h < per_group; h++) {
    const int64_t head = group * per_group + h;
    const float inverse = 1.0f / total[h];
    for (int d = 0; d < size; d++)
      store1(a->out, (row * a->heads + head) * size + d, out[h * size + d] * inverse, type);
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
    float *scratch = malloc((size_t)(per_group * (2 * a->size + padded)) * sizeof(float) + 64);
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
    for (int64_t d = 0; d < size; d += LANES) {
      float g[LANES], u[LANES];
      const int64_t width = d < whole ? LANES : size - d;
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
