/* Products of matrix rows and vectors: the inner loops of linear layers and attention scores.
 *
 * A tile is several rows times several vectors, as many as there are registers for their sums. Every element, one row
 * times one vector, has LANES sums of its own, which run through the row in its order, independent of the tile that
 * computes it. Rows are in their stored dtype and converted in registers; vectors are fp32 in the order of load_part,
 * padded with zeros to whole steps.
 */
#ifndef LOCKSTEP_TILES_H
#define LOCKSTEP_TILES_H

#include "numbers.h"

#define STEP (2 * LANES) /* scalars of the two parts of load_part */
#define MAX_ROWS 8       /* of a tile */
#define MAX_VECTORS 6    /* of a tile */
#define MAX_SUMS 32      /* of a tile; a multiple of 4 for sum_lanes4 */
#define PREFETCH_BYTES 4096
#define CLOSE_BYTES 16384 /* rows of a tile within this distance are short */

/* Accumulates `steps` steps of rows x vectors elements; `fresh` starts from zero. `ahead` prefetches the rows of the next
 * tiles into the L2 cache: hardware prefetchers do not follow short rows, and do better alone with long ones. */
INLINE void add_tile(int dtype, int rows, int vectors, int ahead, int fresh, const char *w, long w_bytes,
                     const float *x, long x_stride, long steps, vec_f32 *sums) {
    /* fp32: one part at a time, two exceed the registers. */
    const int halves = dtype == FLOAT32 ? 1 : 2;
    const long bytes = halves * LANES * dtype_size(dtype), turns = 2 * steps / halves;
    const int close = rows * w_bytes <= CLOSE_BYTES;
    const char *next = close ? w + rows * w_bytes + PREFETCH_BYTES : w;
    const long next_bytes = close ? rows * bytes : 0;
    vec_f32 sum[MAX_ROWS][MAX_VECTORS], kept[MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[r][v] = fresh ? (vec_f32){0} : sums[r * vectors + v];
    for (long turn = 0; turn < turns; turn++, w += bytes, x += halves * LANES, next += next_bytes) {
        if (ahead)
#pragma GCC unroll 16
            for (long at = 0; at < rows * bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                kept[v] = load_f32(x + v * x_stride + half * LANES);
                KEEP_IN_REGISTER(kept[v]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec_f32 weights = load_part(dtype, half, w + r * w_bytes);
                KEEP_IN_REGISTER(weights);
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

/* Converts a stored row to a vector, [steps_of(width) * STEP], times `scale`. */
INLINE void convert_vector(int dtype, long width, float scale, const char *from, float *to) {
    const long pair = (long)STEP * dtype_size(dtype);
    for (long step = 0; step < steps_of(width); step++, from += pair, to += STEP) {
        char rest[STEP * sizeof(float)] = {0};
        const char *at = from;
        if ((step + 1) * STEP > width) at = memcpy(rest, from, (size_t)(width % STEP * dtype_size(dtype)));
        for (int half = 0; half < 2; half++) store_f32(to + half * LANES, load_part(dtype, half, at) * scale);
    }
}

#endif
