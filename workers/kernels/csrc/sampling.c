/* Draws one token from each row of logits, and tells log-probabilities: what rank 0 does with whole rows on a CPU.
 *
 * A row belongs to one thread and is looked at in blocks of neighbouring tokens. One pass finds the blocks' largest
 * logits; a second one, where the distribution's total is needed, their sums of weights. From these follows a value
 * below which top-k or top-p can keep nothing, so only blocks that reach it are looked at again: usually few.
 *
 * The draw is a race: every candidate needs a time that is exponential with its weight as rate, and the first one wins.
 * That is the Gumbel draw of drawing.py with one logarithm less, and the uniform numbers are the same.
 */
#include "numbers.h"
#include "pool.h"
#include "shared_struct.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#define ALONE 32768  /* logits that are not worth another thread */
#define BLOCK 64     /* as in drawing.py */
#define FOUR 4       /* sum_lanes takes so many sums at once */
#define LEAST -87.0f /* e to less than this is 0: see exponential */
#define BINS 2048
#define BROKEN (-1)

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Keep the structs in step with native_sampling.py. */
typedef struct {
    double temperature, top_p, min_p; /* temperature 0: the likeliest, the lowest of equals */
    int64_t top_k;
    uint32_t key[2];
} sampling_params;

typedef struct {
    const float *logits; /* [rows, width] */
    int64_t *token_ids;  /* [rows], to be drawn; of logprobs, whose to tell */
    float *own, *top;    /* logprobs only: [rows] and [rows, most] */
    int64_t *top_ids;    /* [rows, most], the likeliest first, the lowest id of equals */
    int64_t rows, stride, width, most;
} logits_args;

EXPORT_SIZE(sampling_params);
EXPORT_SIZE(logits_args);
_Static_assert(sizeof(sampling_params) == 3 * 8 + 8 + 2 * 4, "as packed by native_sampling.py");
_Static_assert(sizeof(logits_args) == 9 * 8, "as packed by native_sampling.py");

typedef struct {
    logits_args table;
    const sampling_params *choices;
    atomic_int failed; /* a thread had no memory */
} job;

/* A row under way. Values are log-weights: 0 for the likeliest token, and negative. */
typedef struct {
    const float *logits;
    long width, blocks, most; /* `most` is the likeliest token */
    float largest, temperature;
    float *maxima, *sums; /* [blocks]: largest logits, later values; sums of weights */
    float *values, *weights;
    uint32_t *ids; /* candidates, [count], in order of id */
    long count;
    float *few_values, *few_weights; /* spare room for some of them */
} row;

/* ---- rows in blocks */

/* A bit for each lane. */
INLINE uint64_t lanes_where(words where) {
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

/* Gives the row its arrays, in one piece that is to be freed. What is not touched of it costs nothing. */
static void *begin_row(row *r, const logits_args *t, long number) {
    r->logits = t->logits + number * t->stride;
    r->width = t->width;
    r->blocks = padded(t->width) / BLOCK;
    const long blocks = padded(r->blocks), tokens = padded(r->width);
    float *memory = malloc(sizeof(float) * (size_t)(2 * blocks + 5 * tokens));
    r->maxima = memory;
    r->sums = r->maxima + blocks;
    r->values = r->sums + blocks;
    r->weights = r->values + tokens;
    r->few_values = r->weights + tokens;
    r->few_weights = r->few_values + tokens;
    r->ids = (uint32_t *)(r->few_weights + tokens);
    return memory;
}

/* Where a block's logits are; the last one is copied and filled up with -inf. */
INLINE const float *block_of(const row *r, long block, float *rest) {
    const float *from = r->logits + block * BLOCK;
    const long left = r->width - block * BLOCK;
    if (left >= BLOCK) return from;
    for (long i = 0; i < BLOCK; i++) rest[i] = i < left ? from[i] : -INFINITY;
    return rest;
}

/* Finds the largest logit of each block and of the row; whether that one is finite and no logit is NaN. */
static int find_largest(row *r) {
    float rest[BLOCK], largest = -INFINITY;
    words broken = {0};
    for (long block = 0; block < r->blocks; block++) {
        const float *from = block_of(r, block, rest);
        floats most = load_floats(from);
        broken |= (words)(most != most);
        for (long at = LANES; at < BLOCK; at += LANES) {
            const floats x = load_floats(from + at);
            broken |= (words)(x != x);
            most = choose((words)(x > most), x, most);
        }
        float lane[LANES];
        store_floats(lane, most);
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] = lane[l] > lane[l + half] ? lane[l] : lane[l + half];
        r->maxima[block] = lane[0];
        if (lane[0] > largest) largest = lane[0];
    }
    r->largest = largest;
    for (int l = 0; l < LANES; l++)
        if (broken[l]) return 0;
    return largest > -INFINITY && largest < INFINITY;
}

/* The lowest of the likeliest tokens. */
static long first_largest(const row *r) {
    long block = 0, at;
    while (r->maxima[block] != r->largest) block++;
    for (at = block * BLOCK; r->logits[at] != r->largest; at++) continue;
    return at;
}

INLINE floats values_of(const row *r, const float *logits) {
    return (load_floats(logits) - spread(r->largest)) / spread(r->temperature);
}

/* Makes values of the blocks' largest logits. */
static void scale_maxima(row *r) {
    for (long at = r->blocks; at < padded(r->blocks); at++) r->maxima[at] = -INFINITY;
    for (long at = 0; at < r->blocks; at += LANES) store_floats(r->maxima + at, values_of(r, r->maxima + at));
}

/* The weights of values of at least `least`. */
INLINE floats weights_of(floats values, float least) {
    return choose((words)(values < spread(least)), spread(0), exponential(values));
}

/* Sums each block's weights, of values of at least `least`; gives the row's total. */
static double sum_blocks(row *r, float least) {
    float rest[BLOCK];
    double total = 0;
    for (long first = 0; first < r->blocks; first += FOUR) {
        floats sums[FOUR] = {0};
        for (long i = 0; i < FOUR && first + i < r->blocks; i++) {
            const float *from = block_of(r, first + i, rest);
            for (long at = 0; at < BLOCK; at += LANES) sums[i] += weights_of(values_of(r, from + at), least);
        }
        sum_lanes(sums, r->sums + first);
        for (long i = 0; i < FOUR; i++) total += r->sums[first + i];
    }
    return total;
}

/* ---- cuts */

/* The last bin before which less than `goal` has come; `base` is what has come, of bins before these and then before
 * that one. An empty bin is none. */
static uint32_t last_bin(const double *sums, uint32_t bins, double goal, double *base) {
    double before = *base;
    uint32_t last = bins;
    for (uint32_t bin = 0; bin < bins; bin++) {
        if (sums[bin] == 0) continue;
        if (last < bins && before >= goal) break;
        last = bin;
        *base = before;
        before += sums[bin];
    }
    return last < bins ? last : 0;
}

/* The same of values, greatest first, where equals come together: found digit by digit in the bits of -value. */
static float last_of_few(const float *values, const float *weights, long count, double goal, double base) {
    double sums[BINS];
    uint32_t found = 0;
    for (int shift = 20, bits = 11; shift >= 0; shift -= 10, bits = 10) {
        const uint32_t bins = 1u << bits;
        memset(sums, 0, sizeof sums);
        for (long i = 0; i < count; i++) {
            const uint32_t digits = (to_bits(values[i]) & 0x7fffffffu) >> shift;
            if (digits >> bits == found) sums[digits & (bins - 1)] += weights[i];
        }
        found = found << bits | last_bin(sums, bins, goal, &base);
    }
    return -from_bits(found);
}

/* Bins, `scale` to a unit of value, downwards from 0; all that is below the last one is in it. */
INLINE ints bins_of(const float *values, float scale) {
    const floats place = load_floats(values) * scale, last = spread(BINS - 1);
    return __builtin_convertvector(choose((words)(place < last), place, last), ints);
}

/* The same of any number of values, by bins of equal width that reach down to `least`. Only what shares a bin with the
 * value that is sought is looked at digit by digit, in the row's spare room. Lists fill up a whole block. */
static float last_before(row *r, const float *values, const float *weights, long count, float least, double goal) {
    double sums[BINS] = {0}, base = 0;
    const float scale = (BINS - 1) / fminf(least, -0.01f);
    for (long first = 0; first < count; first += BLOCK) {
        int32_t bins[BLOCK];
        const long end = count - first < BLOCK ? count - first : BLOCK;
        for (long at = 0; at < BLOCK; at += LANES) {
            const ints some = bins_of(values + first + at, scale);
            memcpy(bins + at, &some, sizeof some);
        }
        for (long i = 0; i < end; i++) sums[bins[i]] += weights ? weights[first + i] : 1.0;
    }
    const int32_t bin = (int32_t)last_bin(sums, BINS, goal, &base);
    float lowest = 0, highest = -INFINITY;
    long few = 0;
    for (long first = 0; first < count; first += BLOCK) {
        uint64_t found = 0;
        for (long at = 0; at < BLOCK; at += LANES)
            found |= lanes_where((words)(bins_of(values + first + at, scale) == bin)) << at;
        if (count - first < BLOCK) found &= ((uint64_t)1 << (count - first)) - 1;
        for (; found; found &= found - 1) {
            const long i = first + __builtin_ctzll(found);
            lowest = fminf(lowest, values[i]);
            highest = fmaxf(highest, values[i]);
            r->few_values[few] = values[i];
            r->few_weights[few++] = weights ? weights[i] : 1.0f;
        }
    }
    return lowest == highest ? lowest : last_of_few(r->few_values, r->few_weights, few, goal, base);
}

/* Which of a block's values are `least` or more. */
INLINE uint64_t at_least(const float *values, float least) {
    uint64_t found = 0;
    for (long at = 0; at < BLOCK; at += LANES)
        found |= lanes_where((words)(load_floats(values + at) >= spread(least))) << at;
    return found;
}

/* Fills the list of candidates up to a whole block. */
static void fill_up(row *r) {
    for (long at = r->count; at < padded(r->count); at++) {
        r->values[at] = -INFINITY;
        r->weights[at] = 0;
        r->ids[at] = 0;
    }
}

/* Lists the tokens whose values are `least` or more as candidates. */
static void collect(row *r, float least) {
    float rest[BLOCK], values[BLOCK];
    long count = 0;
    for (long block = 0; block < r->blocks; block++) {
        if (r->maxima[block] < least) continue;
        const float *from = block_of(r, block, rest);
        for (long at = 0; at < BLOCK; at += LANES) store_floats(values + at, values_of(r, from + at));
        const long first = block * BLOCK, left = r->width - first;
        uint64_t found = at_least(values, least);
        if (left < BLOCK) found &= ((uint64_t)1 << left) - 1;
        for (; found; found &= found - 1) {
            const int i = __builtin_ctzll(found);
            r->values[count] = values[i];
            r->ids[count++] = (uint32_t)(first + i);
        }
    }
    r->count = count;
    fill_up(r);
}

/* Strikes out the candidates below `least`. */
static void keep(row *r, float least) {
    long count = 0;
    for (long first = 0; first < r->count; first += BLOCK) {
        for (uint64_t found = at_least(r->values + first, least); found; found &= found - 1) {
            const long i = first + __builtin_ctzll(found);
            r->values[count] = r->values[i];
            r->weights[count] = r->weights[i];
            r->ids[count++] = r->ids[i];
        }
    }
    r->count = count;
    fill_up(r);
}

/* Weighs the candidates; gives the total. */
static double weigh(row *r) {
    double total = 0;
    for (long first = 0; first < r->count; first += BLOCK) {
        floats sums[FOUR] = {0};
        for (long at = first; at < first + BLOCK; at += LANES) {
            const floats weights = exponential(load_floats(r->values + at));
            store_floats(r->weights + at, weights);
            sums[0] += weights;
        }
        float sum[FOUR];
        sum_lanes(sums, sum);
        total += sum[0];
    }
    return total;
}

/* The greatest value that is sure to be at or below the cut of a top-p alone. */
static float nucleus_bound(row *r, double total, double top_p) {
    /* Tokens that weigh so little that all V of them together would be no more than what top-p leaves. The log is
     * lowered by more than rounding can be. */
    const float light = (float)log((1 - top_p) * total / (double)r->width) - 1e-3f;
    /* The blocks' likeliest tokens alone may suffice. */
    double together = 0;
    for (long at = 0; at < r->blocks; at += LANES) {
        const floats weights = exponential(load_floats(r->maxima + at));
        store_floats(r->weights + at, weights);
        for (int l = 0; l < LANES; l++) together += weights[l];
    }
    if (together < top_p * total) return light;
    const float enough = last_before(r, r->maxima, r->weights, r->blocks, LEAST, top_p * total);
    return enough > light ? enough : light;
}

/* Lists the candidates that top-k, top-p and min-p leave, with their weights. */
static void cut(row *r, const sampling_params *c, float min_p) {
    const long top_k = c->top_k > 0 ? (long)c->top_k : 0;
    float least = LEAST;
    double total = 0;
    if (!top_k) {
        total = sum_blocks(r, LEAST);
        least = fmaxf(fmaxf(least, min_p), nucleus_bound(r, total, c->top_p));
    } else if (top_k <= r->blocks) {
        /* As many blocks reach this value, with one token at least. */
        least = fmaxf(least, last_before(r, r->maxima, NULL, r->blocks, LEAST, (double)top_k));
    }
    collect(r, least);
    if (top_k && r->count > top_k) keep(r, last_before(r, r->values, NULL, r->count, least, (double)top_k));
    const double kept = weigh(r);
    if (top_k) total = kept;
    if (c->top_p < 1) min_p = fmaxf(min_p, last_before(r, r->values, r->weights, r->count, least, c->top_p * total));
    if (min_p > least) keep(r, min_p);
}

/* ---- the draw */

/* -log(1 - u) to a few ulp, for the uniform number u that a key makes of a token's id: gumbel_noise in noise.py has
 * the same u. */
INLINE floats exponential_noise(const uint32_t *key, words ids) {
    words mixed = ids * 0x9e3779b1u + key[0];
    mixed = ((mixed >> 16 ^ mixed) * 0x7feb352du) ^ key[1];
    mixed = (mixed >> 15 ^ mixed) * 0x846ca68bu;
    mixed = (mixed >> 16 ^ mixed) & 0x7fffffffu;
    floats u = (__builtin_convertvector((ints)mixed, floats) + 0.5f) * 0x1p-31f;
    u = choose((words)(u > 1 - 0x1p-24f), spread(1 - 0x1p-24f), u);
    /* 1 - u is rest + lost exactly, and rest is 2^power * m with m around 1. */
    const floats rest = 1.0f - u, lost = (1.0f - rest) - u;
    const words from_half = (words)rest - 0x3f3504f3u; /* bits of the square root of 1/2 */
    const ints power = (ints)from_half >> 23;
    const floats f = (floats)((from_half & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    /* log(1 + f) = 2 artanh(f / (2 + f)) */
    const floats s = f / (f + 2.0f), z = s * s;
    floats series = spread(1.0f / 9);
    series = multiply_add(series, z, spread(1.0f / 7));
    series = multiply_add(series, z, spread(1.0f / 5));
    series = multiply_add(series, z, spread(1.0f / 3));
    const floats log = multiply_add(series * z, s + s, s + s) + lost / rest;
    return -multiply_add(__builtin_convertvector(power, floats), spread(0x1.62e43p-1f), log);
}

/* The place, among `count` weights, of who wins; the lowest of equals. Tokens' ids are numbers from `first` upwards if
 * there is no list. Arrays are filled up to a whole vector, weights with 0. */
static long race(const uint32_t *key, const uint32_t *ids, uint32_t first, const float *weights, long count) {
    words place, won = {0};
    for (int l = 0; l < LANES; l++) place[l] = (uint32_t)l;
    floats best = spread(INFINITY);
    for (long at = 0; at < count; at += LANES, place += LANES) {
        words id = place + first;
        if (ids) memcpy(&id, ids + at, sizeof id);
        const floats time = exponential_noise(key, id) / load_floats(weights + at);
        const words earlier = (words)(time < best);
        best = choose(earlier, time, best);
        won = (words)choose(earlier, (floats)place, (floats)won);
    }
    int winner = 0;
    for (int l = 1; l < LANES; l++)
        if (best[l] < best[winner] || (best[l] == best[winner] && won[l] < won[winner])) winner = l;
    return won[winner];
}

/* All tokens are candidates: first a block is drawn, then one of its tokens. It is the same distribution with noise for
 * one number in 64. Blocks are numbered after the tokens, so that no block's noise is a token's. */
static long draw_from_all(row *r, const sampling_params *c, float min_p) {
    sum_blocks(r, min_p);
    for (long block = r->blocks; block < padded(r->blocks); block++) r->sums[block] = 0;
    const long block = race(c->key, NULL, (uint32_t)r->width, r->sums, r->blocks);
    float rest[BLOCK], weights[BLOCK];
    const float *from = block_of(r, block, rest);
    for (long at = 0; at < BLOCK; at += LANES) store_floats(weights + at, weights_of(values_of(r, from + at), min_p));
    const long first = block * BLOCK;
    return first + race(c->key, NULL, (uint32_t)first, weights, BLOCK);
}

static long draw_from_row(row *r, const sampling_params *c) {
    if (!find_largest(r)) return BROKEN;
    r->temperature = (float)c->temperature;
    if (!(r->temperature > 0)) return first_largest(r);
    const float min_p = c->min_p > 0 ? fminf((float)log(c->min_p), 0) : -INFINITY;
    if (c->top_k <= 0 && !(c->top_p < 1)) return draw_from_all(r, c, min_p);
    scale_maxima(r);
    cut(r, c, min_p);
    return r->ids[race(c->key, r->ids, 0, r->weights, r->count)];
}

static void draw_row(void *work, long number) {
    job *j = work;
    row r;
    void *memory = begin_row(&r, &j->table, number);
    if (memory) {
        j->table.token_ids[number] = draw_from_row(&r, &j->choices[number]);
    } else {
        atomic_store(&j->failed, 1);
    }
    free(memory);
}

/* ---- log-probabilities */

/* Lists the likeliest candidates, in order. */
static void rank_candidates(const row *r, double log_total, long most, float *top, int64_t *ids) {
    long listed = 0;
    for (long i = 0; i < r->count; i++) {
        const float value = r->values[i];
        if (listed == most && !(value > top[most - 1])) continue;
        long at = listed < most ? listed++ : most - 1;
        for (; at > 0 && value > top[at - 1]; at--) {
            top[at] = top[at - 1];
            ids[at] = ids[at - 1];
        }
        top[at] = value;
        ids[at] = r->ids[i];
    }
    for (long i = 0; i < listed; i++) top[i] = (float)(top[i] - log_total);
}

static void tell_row(void *work, long number) {
    job *j = work;
    const logits_args *t = &j->table;
    float *top = t->top + number * t->most;
    int64_t *ids = t->top_ids + number * t->most;
    row r;
    void *memory = begin_row(&r, t, number);
    if (!memory) {
        atomic_store(&j->failed, 1);
        return;
    }
    if (find_largest(&r)) {
        r.temperature = 1;
        const double log_total = log(sum_blocks(&r, LEAST));
        t->own[number] = (float)(r.logits[t->token_ids[number]] - (double)r.largest - log_total);
        scale_maxima(&r);
        if (t->most) {
            float least = -INFINITY;
            if (t->most <= r.blocks) least = last_before(&r, r.maxima, NULL, r.blocks, LEAST, (double)t->most);
            collect(&r, least);
            rank_candidates(&r, log_total, t->most, top, ids);
        }
    } else {
        t->own[number] = NAN;
        for (long i = 0; i < t->most; i++) {
            top[i] = NAN;
            ids[i] = i;
        }
    }
    free(memory);
}

static int run(part_function *function, const logits_args *t, const sampling_params *choices) {
    job j = {.table = *t, .choices = choices};
    (t->rows * t->width < ALONE ? run_alone : parallel)(function, &j, t->rows);
    return atomic_load(&j.failed);
}

/* Draws every row's token; whether memory was lacking. */
int lockstep_draw(const logits_args *t, const sampling_params *choices) { return run(draw_row, t, choices); }

/* Tells every row's log-probabilities, of its token and of the likeliest ones; whether memory was lacking. */
int lockstep_logprobs(const logits_args *t) { return run(tell_row, t, NULL); }
