/* Norm, rotation and gate: operations on single rows, and the loops over rows for those who call one at a time. */
#include "kernels.h"

#define WORTH_A_TEAM 16384 /* elements below which one thread does it all */

float norm_row(const void *x, const void *weight, void *out, int64_t size, float eps, int offset, int type) {
  const int64_t whole = size / LANES * LANES;
  vec sum = {0};
  for (int64_t d = 0; d < whole; d += LANES) {
    vec value = load16(x, d, type);
    sum += value * value;
  }
  float total = lane_sum(sum);
  for (int64_t d = whole; d < size; d++) {
    float value = load1(x, d, type);
    total += value * value;
  }
  const float scale = 1.0f / sqrtf(total / (float)size + eps), extra = offset ? 1.0f : 0.0f;
  if (type == FLOAT32) {
    const float *in = x, *w = weight;
    float *to = out;
    for (int64_t d = 0; d < size; d++) to[d] = in[d] * scale * (extra + w[d]);
  } else {
    const uint16_t *in = x, *w = weight;
    uint16_t *to = out;
    if (offset)
      for (int64_t d = 0; d < size; d++) to[d] = narrow(widen(in[d]) * scale * (1.0f + widen(w[d])));
    else
      for (int64_t d = 0; d < size; d++) to[d] = narrow(widen(narrow(widen(in[d]) * scale)) * widen(w[d]));
  }
  return scale;
}

void turn_head(const void *x, const float *cosine, const float *sine, void *out, int64_t size, float sign, int type) {
  const int64_t half = size / 2, whole = half / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES) {
    const vec a = load16(x, d, type), b = load16(x, half + d, type), turn = sign * *(const vec *)(sine + d);
    const vec c = *(const vec *)(cosine + d);
    store16(out, d, a * c - b * turn, type);
    store16(out, half + d, b * c + a * turn, type);
  }
  for (int64_t d = whole; d < half; d++) {
    const float a = load1(x, d, type), b = load1(x, half + d, type), turn = sign * sine[d];
    store1(out, d, a * cosine[d] - b * turn, type);
    store1(out, half + d, b * cosine[d] + a * turn, type);
  }
}

/* silu(x) = x sigmoid(x); the tanh form of gelu is x sigmoid(y), y = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
static inline vec activated(vec x, int activation) {
  const vec y = activation == GELU ? x * (x * x * 0.044715f + 1.0f) * 1.5957691216057308f : x;
  return x / (1.0f + exp16(-y));
}

static inline vec gated(vec gate, vec up, int activation, int type) {
  vec value = activated(gate, activation);
  if (type == BFLOAT16) {
    uint16_t half[LANES];
    store16(half, 0, value, type);
    value = load16(half, 0, type);
  }
  return value * up;
}

void gate_row(const void *gate, const void *up, void *out, int64_t size, int activation, int type) {
  const int64_t whole = size / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES)
    store16(out, d, gated(load16(gate, d, type), load16(up, d, type), activation, type), type);
  if (whole == size) return;
  float g[LANES] = {0}, u[LANES] = {0};
  for (int64_t j = 0; j < size - whole; j++) {
    g[j] = load1(gate, whole + j, type);
    u[j] = load1(up, whole + j, type);
  }
  const vec value = gated(*(vec *)g, *(vec *)u, activation, type);
  for (int64_t j = 0; j < size - whole; j++) store1(out, whole + j, value[j], type);
}

static inline int64_t width(int type) { return type == FLOAT32 ? 4 : 2; }

/* inverse: [rows], may be null. Row strides are in elements; outputs are contiguous. */
void rms_norm(const char *x, int64_t x_row, const void *weight, char *out, float *inverse, int64_t rows, int64_t size,
              float eps, int64_t offset, int64_t type, int64_t threads) {
  const int64_t bytes = width((int)type);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * size > WORTH_A_TEAM)
  for (int64_t row = 0; row < rows; row++) {
    const float scale = norm_row(x + row * x_row * bytes, weight, out + row * size * bytes, size, eps, (int)offset, (int)type);
    if (inverse) inverse[row] = scale;
  }
}

/* Rotary embedding of the two halves of each head; cos, sin: float32 [T, D]; sign -1 turns back (the gradient). */
void rope(const char *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, char *out, int64_t rows,
          int64_t heads, int64_t size, float sign, int64_t type, int64_t threads) {
  const int64_t bytes = width((int)type);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * heads * size > WORTH_A_TEAM)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++)
      turn_head(x + (row * x_row + head * x_head) * bytes, cosine + row * size, sine + row * size,
                out + (row * heads + head) * size * bytes, size, sign, (int)type);
}

void gate_mul(const char *gate, const char *up, int64_t in_row, char *out, int64_t rows, int64_t size,
              int64_t activation, int64_t type, int64_t threads) {
  const int64_t bytes = width((int)type);
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * size > WORTH_A_TEAM)
  for (int64_t row = 0; row < rows; row++)
    gate_row(gate + row * in_row * bytes, up + row * in_row * bytes, out + row * size * bytes, size, (int)activation,
             (int)type);
}
