/* Vectors of 16 floats, and rows of float32 or bfloat16 as such.
 * They are GCC vector extensions: the compiler splits them on narrower machines, with the same lane arithmetic. Rows of
 * bfloat16 are widened on load and rounded once on store (to nearest, ties to even). */
#ifndef TANDEM_VECTORS_H
#define TANDEM_VECTORS_H
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

#endif
