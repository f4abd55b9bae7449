/* Rows of a matrix times some vectors: what linear layers and attention scores are made of.
 *
 * A tile is a few rows times a few vectors, as many as there are registers for their sums. Every element, one row times
 * one vector, has LANES sums of its own, which run through the row in its order: which tile it is computed in changes
 * nothing about it. Rows lie as they are stored and are widened in registers; vectors are fp32 in the order of
 * load_half, with zeros up to a whole number of steps.
 */
#ifndef LOCKSTEP_TILES_H
#define LOCKSTEP_TILES_H

#include "numbers.h"

#define STEP (2 * LANES) /* numbers that load_half gives the two halves of */
#define MOST_ROWS 8      /* of a tile */
#define MOST_VECTORS 6   /* of a tile */
#define MOST_SUMS 32     /* of a tile; sum_lanes takes them by fours */
#define BYTES_AHEAD 4096
#define CLOSE_BYTES 16384 /* a tile's rows are short if they are together within this */

/* Adds `steps` steps of rows x vectors elements to their sums, or begins `fresh` ones with them. With `ahead` it
 * fetches into the second cache, byte for byte, what comes some way behind the last row: the next tiles. The CPU does
 * not do that by itself if rows are short; with long ones it does better alone. */
INLINE void add_tile(int dtype, int rows, int vectors, int ahead, int fresh, const char *w, long w_bytes,
                     const float *x, long x_stride, long steps, floats *sums) {
    /* Of fp32 one half at a time: with two, compilers run out of registers. */
    const int halves = dtype == FLOAT32 ? 1 : 2;
    const long bytes = halves * LANES * bytes_of(dtype), turns = 2 * steps / halves;
    const int close = rows * w_bytes <= CLOSE_BYTES;
    const char *next = close ? w + rows * w_bytes + BYTES_AHEAD : w;
    const long next_bytes = close ? rows * bytes : 0;
    floats sum[MOST_ROWS][MOST_VECTORS], kept[MOST_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = fresh ? (floats){0} : sums[r * vectors + v];
    for (long turn = 0; turn < turns; turn++, w += bytes, x += halves * LANES, next += next_bytes) {
        if (ahead)
#pragma GCC unroll 16
            for (long at = 0; at < rows * bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                kept[v] = load_floats(x + v * x_stride + half * LANES);
                KEEP(kept[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                floats weights = load_half(dtype, half, w + r * w_bytes);
                KEEP(weights);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(weights, kept[v], sum[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r * vectors + v] = sum[r][v];
}

static inline long steps_of(long width) { return (width + STEP - 1) / STEP; }

/* One vector, from how it is stored to how tiles want it: times `scale`, [steps_of(width) * STEP]. */
INLINE void widen_vector(int dtype, long width, float scale, const char *from, float *to) {
    const long pair = (long)STEP * bytes_of(dtype);
    for (long step = 0; step < steps_of(width); step++, from += pair, to += STEP) {
        char rest[STEP * sizeof(float)] = {0};
        const char *at = from;
        if ((step + 1) * STEP > width) at = memcpy(rest, from, (size_t)(width % STEP * bytes_of(dtype)));
        for (int half = 0; half < 2; half++) store_floats(to + half * LANES, load_half(dtype, half, at) * scale);
    }
}

#endif
