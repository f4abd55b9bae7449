/* One row of logits on its way to a token: block maxima, weights, and the thresholds of top-k, top-p and min-p. Included
 * by sampling.c only, which explains the algorithm.
 */
#ifndef LOCKSTEP_SAMPLING_ROW_H
#define LOCKSTEP_SAMPLING_ROW_H

#include "numbers.h"
#include "shared_struct.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK 64              /* as in gumbel_max.py */
#define SUMS_AT_ONCE 4        /* by sum_lanes4 */
#define MIN_LOG_WEIGHT -87.0f /* vec_exp of less is 0 */
#define BINS 2048

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Packed by native_sampling.py. */
typedef struct {
    double temperature, top_p, min_p; /* temperature 0: argmax, the lowest id of equals */
    int64_t top_k;
    uint32_t key[2];
} sampling_params;

typedef struct {
    const float *logits;                  /* [rows, width] */
    int64_t *token_ids;                   /* [rows]; sampling: the result; logprobs: the tokens */
    float *token_logprobs, *top_logprobs; /* logprobs only: [rows] and [rows, num_top] */
    int64_t *top_ids;                     /* [rows, num_top], most probable first, the lowest id of equals */
    int64_t rows, stride, width, num_top;
} logits_args;

EXPORT_SIZE(sampling_params);
EXPORT_SIZE(logits_args);
_Static_assert(sizeof(sampling_params) == 3 * 8 + 8 + 2 * 4, "as packed by native_sampling.py");
_Static_assert(sizeof(logits_args) == 9 * 8, "as packed by native_sampling.py");

/* A row in progress. Values are log-weights: 0 for the most probable token, negative for the others. */
typedef struct {
    const float *logits;
    long width, blocks;
    float max_logit, temperature;
    float *block_max, *block_sums; /* [blocks]: maxima of logits, later of values; sums of weights */
    float *values, *weights;
    uint32_t *ids; /* candidates, [count], ascending */
    long count;
    float *scratch_values, *scratch_weights; /* [count] */
} row;

/* ---- rows in blocks */

/* One bit per lane. */
INLINE uint64_t lane_mask(vec_u32 where) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)where, (__m512i)where);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps((__m256)where);
#elif defined(__SSE__)
    return (uint64_t)_mm_movemask_ps((__m128)where);
#elif defined(__aarch64__)
    return vaddvq_u32(vandq_u32((uint32x4_t)where, (uint32x4_t){1, 2, 4, 8}));
#else
    uint64_t bits = 0;
    for (int l = 0; l < LANES; l++) bits |= (uint64_t)(where[l] & 1) << l;
    return bits;
#endif
}

static inline long padded(long count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

/* Allocates the arrays of a row. Returns the allocation to free, or NULL; untouched pages are never mapped. */
static void *init_row(row *r, const logits_args *t, long number) {
    r->logits = t->logits + number * t->stride;
    r->width = t->width;
    r->blocks = padded(t->width) / BLOCK;
    const long blocks = padded(r->blocks), tokens = padded(r->width);
    float *memory = malloc(sizeof(float) * (size_t)(2 * blocks + 5 * tokens));
    r->block_max = memory;
    r->block_sums = r->block_max + blocks;
    r->values = r->block_sums + blocks;
    r->weights = r->values + tokens;
    r->scratch_values = r->weights + tokens;
    r->scratch_weights = r->scratch_values + tokens;
    r->ids = (uint32_t *)(r->scratch_weights + tokens);
    return memory;
}

/* The logits of a block; an incomplete last block is copied to `rest` and padded with -inf. */
INLINE const float *block_of(const row *r, long block, float *rest) {
    const float *from = r->logits + block * BLOCK;
    const long left = r->width - block * BLOCK;
    if (left >= BLOCK) return from;
    for (long i = 0; i < BLOCK; i++) rest[i] = i < left ? from[i] : -INFINITY;
    return rest;
}

/* Finds the maximum of each block and of the row. Returns whether it is finite and no logit is NaN. */
static int find_max(row *r) {
    float rest[BLOCK], max_logit = -INFINITY;
    vec_u32 is_nan = {0};
    for (long block = 0; block < r->blocks; block++) {
        const float *from = block_of(r, block, rest);
        vec_f32 num_top = load_f32(from);
        is_nan |= (vec_u32)(num_top != num_top);
        for (long at = LANES; at < BLOCK; at += LANES) {
            const vec_f32 x = load_f32(from + at);
            is_nan |= (vec_u32)(x != x);
            num_top = blend((vec_u32)(x > num_top), x, num_top);
        }
        float lane[LANES];
        store_f32(lane, num_top);
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] = lane[l] > lane[l + half] ? lane[l] : lane[l + half];
        r->block_max[block] = lane[0];
        if (lane[0] > max_logit) max_logit = lane[0];
    }
    r->max_logit = max_logit;
    for (int l = 0; l < LANES; l++)
        if (is_nan[l]) return 0;
    return max_logit > -INFINITY && max_logit < INFINITY;
}

/* The lowest token id with the maximum. */
static long argmax(const row *r) {
    long block = 0, at;
    while (r->block_max[block] != r->max_logit) block++;
    for (at = block * BLOCK; r->logits[at] != r->max_logit; at++) continue;
    return at;
}

INLINE vec_f32 values_of(const row *r, const float *logits) {
    return (load_f32(logits) - broadcast(r->max_logit)) / broadcast(r->temperature);
}

/* Converts the maxima of blocks from logits to values. */
static void scale_block_maxima(row *r) {
    for (long at = r->blocks; at < padded(r->blocks); at++) r->block_max[at] = -INFINITY;
    for (long at = 0; at < r->blocks; at += LANES) store_f32(r->block_max + at, values_of(r, r->block_max + at));
}

/* Weights of values; 0 below `min_value`. */
INLINE vec_f32 weights_of(vec_f32 values, float min_value) {
    return blend((vec_u32)(values < broadcast(min_value)), broadcast(0), vec_exp(values));
}

/* Sums the weights of each block, of values of at least `min_value`. Returns the total of the row. */
static double sum_blocks(row *r, float min_value) {
    float rest[BLOCK];
    double total = 0;
    for (long first = 0; first < r->blocks; first += SUMS_AT_ONCE) {
        vec_f32 block_sums[SUMS_AT_ONCE] = {0};
        for (long i = 0; i < SUMS_AT_ONCE && first + i < r->blocks; i++) {
            const float *from = block_of(r, first + i, rest);
            for (long at = 0; at < BLOCK; at += LANES) block_sums[i] += weights_of(values_of(r, from + at), min_value);
        }
        sum_lanes4(block_sums, r->block_sums + first);
        for (long i = 0; i < SUMS_AT_ONCE; i++) total += r->block_sums[first + i];
    }
    return total;
}

/* ---- thresholds of top-k, top-p and min-p */

/* The last non-empty bin with less than `goal` before it. `base` is the sum before the first bin, and is updated to the
 * sum before the returned one. */
static uint32_t threshold_bin(const double *block_sums, uint32_t bins, double goal, double *base) {
    double before = *base;
    uint32_t last = bins;
    for (uint32_t bin = 0; bin < bins; bin++) {
        if (block_sums[bin] == 0) continue;
        if (last < bins && before >= goal) break;
        last = bin;
        *base = before;
        before += block_sums[bin];
    }
    return last < bins ? last : 0;
}

/* The same for single values in descending order, equal values together: a radix search in the bits of -value. */
static float radix_threshold(const float *values, const float *weights, long count, double goal, double base) {
    double block_sums[BINS];
    uint32_t found = 0;
    for (int shift = 20, bits = 11; shift >= 0; shift -= 10, bits = 10) {
        const uint32_t bins = 1u << bits;
        memset(block_sums, 0, sizeof block_sums);
        for (long i = 0; i < count; i++) {
            const uint32_t digits = (to_bits(values[i]) & 0x7fffffffu) >> shift;
            if (digits >> bits == found) block_sums[digits & (bins - 1)] += weights[i];
        }
        found = found << bits | threshold_bin(block_sums, bins, goal, &base);
    }
    return -from_bits(found);
}

/* Bin numbers of values, `scale` bins per unit, downwards from 0; the last bin takes everything below. */
INLINE ints bins_of(const float *values, float scale) {
    const vec_f32 bin = load_f32(values) * scale, last = broadcast(BINS - 1);
    return __builtin_convertvector(blend((vec_u32)(bin < last), bin, last), ints);
}

/* The same for any number of values: bins of equal width down to `min_value`, then a radix search within the bin that
 * contains the threshold, in the scratch arrays of the row. Arrays are padded to whole blocks. */
static float threshold(row *r, const float *values, const float *weights, long count, float min_value, double goal) {
    double block_sums[BINS] = {0}, base = 0;
    const float scale = (BINS - 1) / fminf(min_value, -0.01f);
    for (long first = 0; first < count; first += BLOCK) {
        int32_t bins[BLOCK];
        const long end = count - first < BLOCK ? count - first : BLOCK;
        for (long at = 0; at < BLOCK; at += LANES) {
            const ints some = bins_of(values + first + at, scale);
            memcpy(bins + at, &some, sizeof some);
        }
        for (long i = 0; i < end; i++) block_sums[bins[i]] += weights ? weights[first + i] : 1.0;
    }
    const int32_t bin = (int32_t)threshold_bin(block_sums, BINS, goal, &base);
    float lowest = 0, highest = -INFINITY;
    long few = 0;
    for (long first = 0; first < count; first += BLOCK) {
        uint64_t found = 0;
        for (long at = 0; at < BLOCK; at += LANES)
            found |= lane_mask((vec_u32)(bins_of(values + first + at, scale) == bin)) << at;
        if (count - first < BLOCK) found &= ((uint64_t)1 << (count - first)) - 1;
        for (; found; found &= found - 1) {
            const long i = first + __builtin_ctzll(found);
            lowest = fminf(lowest, values[i]);
            highest = fmaxf(highest, values[i]);
            r->scratch_values[few] = values[i];
            r->scratch_weights[few++] = weights ? weights[i] : 1.0f;
        }
    }
    return lowest == highest ? lowest : radix_threshold(r->scratch_values, r->scratch_weights, few, goal, base);
}

/* Mask of the values of a block that are at least `min_value`. */
INLINE uint64_t mask_at_least(const float *values, float min_value) {
    uint64_t found = 0;
    for (long at = 0; at < BLOCK; at += LANES)
        found |= lane_mask((vec_u32)(load_f32(values + at) >= broadcast(min_value))) << at;
    return found;
}

/* Pads the candidates to a whole block. */
static void pad_candidates(row *r) {
    for (long at = r->count; at < padded(r->count); at++) {
        r->values[at] = -INFINITY;
        r->weights[at] = 0;
        r->ids[at] = 0;
    }
}

/* Gathers the tokens whose values are at least `min_value` as candidates. */
static void gather_candidates(row *r, float min_value) {
    float rest[BLOCK], values[BLOCK];
    long count = 0;
    for (long block = 0; block < r->blocks; block++) {
        if (r->block_max[block] < min_value) continue;
        const float *from = block_of(r, block, rest);
        for (long at = 0; at < BLOCK; at += LANES) store_f32(values + at, values_of(r, from + at));
        const long first = block * BLOCK, left = r->width - first;
        uint64_t found = mask_at_least(values, min_value);
        if (left < BLOCK) found &= ((uint64_t)1 << left) - 1;
        for (; found; found &= found - 1) {
            const int i = __builtin_ctzll(found);
            r->values[count] = values[i];
            r->ids[count++] = (uint32_t)(first + i);
        }
    }
    r->count = count;
    pad_candidates(r);
}

/* Removes the candidates below `min_value`. */
static void filter_candidates(row *r, float min_value) {
    long count = 0;
    for (long first = 0; first < r->count; first += BLOCK) {
        for (uint64_t found = mask_at_least(r->values + first, min_value); found; found &= found - 1) {
            const long i = first + __builtin_ctzll(found);
            r->values[count] = r->values[i];
            r->weights[count] = r->weights[i];
            r->ids[count++] = r->ids[i];
        }
    }
    r->count = count;
    pad_candidates(r);
}

/* Computes the weights of the candidates. Returns their total. */
static double weigh_candidates(row *r) {
    double total = 0;
    for (long first = 0; first < r->count; first += BLOCK) {
        vec_f32 block_sums[SUMS_AT_ONCE] = {0};
        for (long at = first; at < first + BLOCK; at += LANES) {
            const vec_f32 weights = vec_exp(load_f32(r->values + at));
            store_f32(r->weights + at, weights);
            block_sums[0] += weights;
        }
        float sum[SUMS_AT_ONCE];
        sum_lanes4(block_sums, sum);
        total += sum[0];
    }
    return total;
}

/* A lower bound of the threshold of top-p alone, as high as the block maxima allow. */
static float top_p_lower_bound(row *r, double total, double top_p) {
    /* V tokens of this weight would sum to the mass that top-p removes. The log is lowered by more than its rounding
     * error. */
    const float tail_bound = (float)log((1 - top_p) * total / (double)r->width) - 1e-3f;
    /* The block maxima alone may reach top-p. */
    double together = 0;
    for (long at = 0; at < r->blocks; at += LANES) {
        const vec_f32 weights = vec_exp(load_f32(r->block_max + at));
        store_f32(r->weights + at, weights);
        for (int l = 0; l < LANES; l++) together += weights[l];
    }
    if (together < top_p * total) return tail_bound;
    const float maxima_bound = threshold(r, r->block_max, r->weights, r->blocks, MIN_LOG_WEIGHT, top_p * total);
    return maxima_bound > tail_bound ? maxima_bound : tail_bound;
}

/* Gathers the candidates that remain after top-k, top-p and min-p, with their weights. */
static void apply_top_k_top_p_min_p(row *r, const sampling_params *c, float min_p) {
    const long top_k = c->top_k > 0 ? (long)c->top_k : 0;
    float min_value = MIN_LOG_WEIGHT;
    double total = 0;
    if (!top_k) {
        total = sum_blocks(r, MIN_LOG_WEIGHT);
        min_value = fmaxf(fmaxf(min_value, min_p), top_p_lower_bound(r, total, c->top_p));
    } else if (top_k <= r->blocks) {
        /* At least top-k blocks reach this value, each with at least one token. */
        min_value = fmaxf(min_value, threshold(r, r->block_max, NULL, r->blocks, MIN_LOG_WEIGHT, (double)top_k));
    }
    gather_candidates(r, min_value);
    if (top_k && r->count > top_k)
        filter_candidates(r, threshold(r, r->values, NULL, r->count, min_value, (double)top_k));
    const double kept = weigh_candidates(r);
    if (top_k) total = kept;
    if (c->top_p < 1) min_p = fmaxf(min_p, threshold(r, r->values, r->weights, r->count, min_value, c->top_p * total));
    if (min_p > min_value) filter_candidates(r, min_p);
}

#endif
