/* The two products of attention for adjacent rows of one block of the KV cache: scores of keys, and weighted sums of
 * values. attention.c calls them for the blocks of a KV split.
 */
#ifndef LOCKSTEP_ATTENTION_TILES_H
#define LOCKSTEP_ATTENTION_TILES_H

#include "tiles.h"

#include <math.h>

#define SPLIT 256 /* positions of a KV split */

/* Adjacent rows of keys or values. */
typedef struct {
    int dtype;
    const char *first;
    long bytes, width; /* of a row */
} row_block;

/* ---- scores */

INLINE void score_tile(int dtype, int rows, int vectors, long width, const char *keys, long row_bytes,
                       const float *queries, long stride, float *scores) {
    const long whole = width / STEP;
    vec_f32 sums[MAX_SUMS];
    add_tile(dtype, rows, vectors, 0, 1, keys, row_bytes, queries, stride, whole, sums);
    if (width % STEP) {
        char rest[MAX_ROWS][STEP * sizeof(float)] = {{0}};
        const size_t bytes = (size_t)(width % STEP * dtype_size(dtype));
        for (int r = 0; r < rows; r++) memcpy(rest[r], keys + r * row_bytes + whole * STEP * dtype_size(dtype), bytes);
        add_tile(dtype, rows, vectors, 0, 0, rest[0], sizeof rest[0], queries + whole * STEP, stride, 1, sums);
    }
    for (int v = 0; v < vectors; v++)
        for (int r = 0; r < rows; r += 4) {
            vec_f32 four[4] = {sums[r * vectors + v]};
            float summed[4];
            for (int i = 1; i < 4 && r + i < rows; i++) four[i] = sums[(r + i) * vectors + v];
            sum_lanes4(four, summed);
            memcpy(scores + v * SPLIT + r, summed, sizeof(float) * (size_t)min_long(4, rows - r));
        }
}

typedef void score_function(long width, const char *keys, long row_bytes, const float *queries, long stride,
                            float *scores);
#define SCORES(dtype, rows, vectors)                                                                                   \
    static void scores_##dtype##_##rows##_##vectors(long width, const char *keys, long row_bytes,                      \
                                                    const float *queries, long stride, float *scores) {                \
        score_tile(dtype, rows, vectors, width, keys, row_bytes, queries, stride, scores);                             \
    }
/* Rows of a tile with 1, 2 and 3 vectors: fp32 needs no register for the conversion. */
#define EACH_WIDE_SCORE(macro) macro(0, 8, 1) macro(0, 4, 2) macro(0, 4, 3)
#define EACH_SCORE(macro, dtype) macro(dtype, 8, 1) macro(dtype, 4, 2) macro(dtype, 3, 3)
#define EACH_ROW(macro, dtype) macro(dtype, 1, 1) macro(dtype, 1, 2) macro(dtype, 1, 3)
EACH_WIDE_SCORE(SCORES)
EACH_SCORE(SCORES, 1)
EACH_SCORE(SCORES, 2)
EACH_ROW(SCORES, 0)
EACH_ROW(SCORES, 1)
EACH_ROW(SCORES, 2)
#define SCORE_NAME(dtype, rows, vectors) [vectors] = scores_##dtype##_##rows##_##vectors,
static score_function *const tile_scores[3][4] = {
    {EACH_WIDE_SCORE(SCORE_NAME)}, {EACH_SCORE(SCORE_NAME, 1)}, {EACH_SCORE(SCORE_NAME, 2)}};
static score_function *const row_scores[3][4] = {
    {EACH_ROW(SCORE_NAME, 0)}, {EACH_ROW(SCORE_NAME, 1)}, {EACH_ROW(SCORE_NAME, 2)}};

/* Scores of `count` keys and all vectors: scores[vector * SPLIT + row]. */
static void score_rows(const row_block *keys, long count, const float *queries, long stride, long vectors,
                       float *scores) {
    for (long vector = 0, count_at_once; vector < vectors; vector += count_at_once) {
        count_at_once = vectors - vector == 4 ? 2 : min_long(vectors - vector, 3);
        const long tile_rows = count_at_once == 1 ? 8 : count_at_once == 2 || keys->dtype == FLOAT32 ? 4 : 3;
        for (long row = 0, rows; row < count; row += rows) {
            rows = count - row >= tile_rows ? tile_rows : 1;
            (rows == tile_rows ? tile_scores : row_scores)[keys->dtype][count_at_once](
                keys->width, keys->first + row * keys->bytes, keys->bytes, queries + vector * stride, stride,
                scores + vector * SPLIT + row);
        }
    }
}

/* Replaces scores `begin` to `end` of one vector by exponentials relative to their maximum. */
static void softmax_weights(float *scores, long begin, long end, float *maximum, float *sum) {
    const long first = begin / LANES * LANES, last = (end + LANES - 1) / LANES * LANES;
    for (long i = first; i < begin; i++) scores[i] = -INFINITY;
    for (long i = end; i < last; i++) scores[i] = -INFINITY;
    vec_f32 lane_maxima = broadcast(-INFINITY), sums[4] = {0};
    for (long i = first; i < last; i += LANES) {
        const vec_f32 score = load_f32(scores + i);
        lane_maxima = blend((vec_u32)(score > lane_maxima), score, lane_maxima);
    }
    *maximum = lane_maxima[0];
    for (int lane = 1; lane < LANES; lane++) *maximum = lane_maxima[lane] > *maximum ? lane_maxima[lane] : *maximum;
    for (long i = first; i < last; i += LANES) {
        const vec_f32 weight = vec_exp(load_f32(scores + i) - broadcast(*maximum));
        store_f32(scores + i, weight);
        sums[0] += weight;
    }
    float summed[4];
    sum_lanes4(sums, summed);
    *sum = summed[0];
}

/* ---- values */

/* Accumulates `rows` values, times the weights of each vector, into `pairs` steps of columns. */
INLINE void value_tile(int dtype, int vectors, int pairs, long rows, const char *values, long row_bytes,
                       const float *weights, float *sums, long stride) {
    vec_f32 sum[3][8];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) sum[v][half] = load_f32(sums + v * stride + half * LANES);
    for (long row = 0; row < rows; row++, values += row_bytes) {
        vec_f32 weight[3];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            weight[v] = broadcast(weights[v * SPLIT + row]);
            KEEP_IN_REGISTER(weight[v]);
        }
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) {
            vec_f32 value = load_part(dtype, half % 2, values + (long)(half / 2) * STEP * dtype_size(dtype));
            KEEP_IN_REGISTER(value);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[v][half] = multiply_add(weight[v], value, sum[v][half]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) store_f32(sums + v * stride + half * LANES, sum[v][half]);
}

typedef void value_function(long rows, const char *values, long row_bytes, const float *weights, float *sums,
                            long stride);
#define VALUES(dtype, vectors, pairs)                                                                                  \
    static void values_##dtype##_##vectors##_##pairs(long rows, const char *values, long row_bytes,                    \
                                                     const float *weights, float *sums, long stride) {                 \
        value_tile(dtype, vectors, pairs, rows, values, row_bytes, weights, sums, stride);                             \
    }
#define EACH_VALUE(macro, dtype) macro(dtype, 1, 4) macro(dtype, 2, 2) macro(dtype, 3, 2)
#define EACH_PAIR(macro, dtype) macro(dtype, 1, 1) macro(dtype, 2, 1) macro(dtype, 3, 1)
EACH_VALUE(VALUES, 0)
EACH_VALUE(VALUES, 1)
EACH_VALUE(VALUES, 2)
EACH_PAIR(VALUES, 0)
EACH_PAIR(VALUES, 1)
EACH_PAIR(VALUES, 2)
#define VALUE_NAME(dtype, vectors, pairs) [vectors] = values_##dtype##_##vectors##_##pairs,
static value_function *const wide_values[3][4] = {
    {EACH_VALUE(VALUE_NAME, 0)}, {EACH_VALUE(VALUE_NAME, 1)}, {EACH_VALUE(VALUE_NAME, 2)}};
static value_function *const pair_values[3][4] = {
    {EACH_PAIR(VALUE_NAME, 0)}, {EACH_PAIR(VALUE_NAME, 1)}, {EACH_PAIR(VALUE_NAME, 2)}};

/* Accumulates values `begin` to `end` into 1 to 3 vectors that attend to all of them. */
static void add_values(const row_block *values, long begin, long end, int vectors, const float *weights, float *sums,
                       long stride) {
    const int dtype = values->dtype;
    const char *first = values->first + begin * values->bytes;
    const long whole = values->width / STEP, step_bytes = (long)STEP * dtype_size(dtype), count = end - begin;
    if (count <= 0) return;
    long pair = 0;
    for (const long wide = vectors == 1 ? 4 : 2; pair + wide <= whole; pair += wide)
        wide_values[dtype][vectors](count, first + pair * step_bytes, values->bytes, weights + begin,
                                    sums + pair * STEP, stride);
    for (; pair < whole; pair++)
        pair_values[dtype][vectors](count, first + pair * step_bytes, values->bytes, weights + begin,
                                    sums + pair * STEP, stride);
    for (long row = begin; values->width % STEP && row < end; row++, first += values->bytes) {
        char rest[STEP * sizeof(float)] = {0};
        memcpy(rest, first + whole * step_bytes, (size_t)(values->width % STEP * dtype_size(dtype)));
        pair_values[dtype][vectors](1, rest, 0, weights + row, sums + whole * STEP, stride);
    }
}

#endif
