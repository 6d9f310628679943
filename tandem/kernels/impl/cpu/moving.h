/* Copies that are summed on their way (moving.c). */
#ifndef TANDEM_MOVING_H
#define TANDEM_MOVING_H
#include <stdint.h>

#define WORDS 8
#define MOVING_STEP 0x9e3779b97f4a7c15ull /* the golden ratio: keys of different rows differ in all their bits */

typedef struct {
  const uint8_t *from;
  uint8_t *to;     /* NULL: sums only */
  uint64_t *sums;  /* WORDS of them, written */
  int64_t rows, first_row;
} Part;

/* A buffer, and what becomes of it: a copy, or with ``outs`` a weight of bfloat16, [outs, ins], packed for projections
 * (projection.c), where ``to`` may be ``from`` if nothing is filled up. */
typedef struct {
  const uint8_t *from;
  uint8_t *to;     /* NULL: sums only */
  uint64_t *sums;  /* WORDS of them, written: of what is at ``to`` */
  int64_t bytes, outs, ins;
} Move;

__attribute__((visibility("hidden"))) extern const uint64_t MOVING_KEYS[WORDS];
/* By one thread. */
__attribute__((visibility("hidden"))) void move_rows(const Part *part);
/* Sets of 16 outputs from the first on, with the sums of what is written added to ``sums``. 1: memory ran out. */
__attribute__((visibility("hidden"))) int pack_sets(const Move *move, int64_t first, int64_t count, uint64_t *sums);

#endif
