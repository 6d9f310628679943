/* Rows of float32 logits: log-probabilities at a temperature, and draws from them.
 * A row's exponentials below its highest logit are added in blocks of 1024, each in one fixed tree in float32, the
 * blocks in order in float64. A draw finds its block by these sums, then its place in it by adding one by one. */
#include "kernels.h"

#define BLOCK 1024

typedef struct {
  const float *logits;
  const float *temperature;
  const int64_t *targets; /* tokens asked for; null in a draw */
  const double *uniform;  /* in [0, 1); below 0: the highest logit, the first of equals */
  int64_t *tokens;        /* drawn */
  float *logprobs, *entropies;
  float *all; /* [rows, size] */
  int64_t row, rows, size, threads;
} Head;

static inline vec at16(const float *logits, int64_t place, int64_t size) {
  if (place + LANES <= size) return *(const vec *)(logits + place);
  vec value = (vec){0} - INFINITY;
  for (int64_t j = 0; place + j < size; j++) value[j] = logits[place + j];
  return value;
}

static float highest_of(const float *logits, int64_t size) {
  vec most[4];
  for (int i = 0; i < 4; i++) most[i] = (vec){0} - INFINITY;
  for (int64_t place = 0; place < size; place += 4 * LANES)
    for (int i = 0; i < 4; i++) {
      const vec value = at16(logits, place + i * LANES, size);
      const ivec larger = value > most[i];
      most[i] = (vec)(((ivec)value & larger) | ((ivec)most[i] & ~larger));
    }
  float highest = -INFINITY;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < LANES; j++) highest = most[i][j] > highest ? most[i][j] : highest;
  return highest;
}

/* Sum of the exponentials of one block; ``pull``: of each times its scaled logit, if wanted. */
static float block_sum(const float *logits, int64_t begin, int64_t end, float highest, float inverse, float *pull) {
  vec sums[4] = {0}, pulls[4] = {0};
  for (int64_t place = begin; place < end; place += 4 * LANES)
    for (int i = 0; i < 4; i++) {
      if (place + i * LANES >= end) break;
      vec scaled = (at16(logits, place + i * LANES, end) - highest) * inverse;
      const vec e = exp16(scaled);
      sums[i] += e;
      if (pull) {
        const ivec alive = scaled > -100.0f; /* else the product is 0 times minus infinity */
        pulls[i] += e * (vec)((ivec)scaled & alive);
      }
    }
  if (pull) *pull = lane_sum((pulls[0] + pulls[1]) + (pulls[2] + pulls[3]));
  return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static inline float logprob_of(float logit, float highest, float inverse, float log_total) {
  return __builtin_fmaf(logit - highest, inverse, -log_total);
}

static int64_t first_of(const float *logits, int64_t size, float value) {
  for (int64_t place = 0; place < size; place++)
    if (logits[place] == value) return place;
  return 0;
}

/* The first place at which the running sum of probabilities passes ``uniform``; never one without probability. */
static int64_t drawn(const float *logits, int64_t size, const double *sums, double total, double uniform, float highest,
                     float inverse) {
  double aim = uniform * total, passed = 0, sum = 0;
  if (aim >= total) aim = nextafter(total, 0.0);
  int64_t block = 0;
  for (int64_t b = 0; b * BLOCK < size && sum <= aim; b++) {
    if (sums[b] <= 0) continue;
    block = b;
    passed = sum;
    sum += sums[b];
  }
  const int64_t begin = block * BLOCK, end = begin + BLOCK < size ? begin + BLOCK : size;
  int64_t possible = begin;
  for (int64_t place = begin; place < end; place += LANES) {
    const vec e = exp16((at16(logits, place, end) - highest) * inverse);
    for (int64_t j = 0; j < LANES && place + j < end; j++) {
      if (e[j] <= 0) continue;
      possible = place + j;
      passed += (double)e[j];
      if (passed > aim) return possible;
    }
  }
  return possible; /* the block's sum was rounded up */
}

/* Returns how many rows have no finite distribution; nothing is said of those. */
int64_t head_rows(const Head *h) {
  int64_t broken = 0;
  const int64_t blocks = (h->size + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)h->threads) if (h->rows > 1) reduction(+ : broken)
  for (int64_t row = 0; row < h->rows; row++) {
    const float *logits = h->logits + row * h->row, inverse = 1.0f / h->temperature[row];
    const float highest = highest_of(logits, h->size);
    double sums[blocks], total = 0, pull = 0;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t end = (b + 1) * BLOCK < h->size ? (b + 1) * BLOCK : h->size;
      float part;
      sums[b] = block_sum(logits, b * BLOCK, end, highest, inverse, h->entropies ? &part : 0);
      total += sums[b];
      if (h->entropies) pull += part;
    }
    if (!(total > 0 && total < INFINITY)) {
      broken++;
      continue;
    }
    const float log_total = (float)log(total);
    if (h->entropies) h->entropies[row] = (float)(log(total) - pull / total);
    int64_t token = h->targets ? h->targets[row] : -1;
    if (h->uniform) {
      const double uniform = h->uniform[row];
      token = uniform < 0 ? first_of(logits, h->size, highest)
                          : drawn(logits, h->size, sums, total, uniform, highest, inverse);
      h->tokens[row] = token;
    }
    if (token >= 0) h->logprobs[row] = logprob_of(logits[token], highest, inverse, log_total);
    if (h->all) {
      float *out = h->all + row * h->size;
      for (int64_t place = 0; place < h->size; place++)
        out[place] = logprob_of(logits[place], highest, inverse, log_total);
    }
  }
  return broken;
}
