/* Samples one token from each row of logits, and computes log-probabilities, on a CPU.
 *
 * A row belongs to one thread and is processed in blocks of adjacent tokens. One pass finds the maximum of each block; a
 * second one, where the total of the distribution is needed, the sum of each block's weights. They bound the smallest
 * value that top-k or top-p can keep, so only blocks that reach it are read again.
 *
 * Sampling is the Gumbel-max trick in its exponential form: every candidate draws a time from the exponential
 * distribution with its weight as rate, and the smallest time is sampled. It has one logarithm less than the form in
 * gumbel_max.py and uses the same uniform numbers.
 */
#include "pool.h"
#include "sampling_row.h"

#include <stdatomic.h>

#define SERIAL_BELOW 32768 /* logits; with fewer, one thread is faster */
#define NON_FINITE (-1)

typedef struct {
    logits_args table;
    const sampling_params *choices;
    atomic_int failed; /* a thread ran out of memory */
} job;

/* ---- sampling */

/* -log(1 - u) to a few ulp, for the uniform number u of a key and a token id, as in gumbel_max.py. */
INLINE vec_f32 exponential_noise(const uint32_t *key, vec_u32 ids) {
    vec_u32 mixed = ids * 0x9e3779b1u + key[0];
    mixed = ((mixed >> 16 ^ mixed) * 0x7feb352du) ^ key[1];
    mixed = (mixed >> 15 ^ mixed) * 0x846ca68bu;
    mixed = (mixed >> 16 ^ mixed) & 0x7fffffffu;
    vec_f32 u = (__builtin_convertvector((ints)mixed, vec_f32) + 0.5f) * 0x1p-31f;
    u = blend((vec_u32)(u > 1 - 0x1p-24f), broadcast(1 - 0x1p-24f), u);
    /* 1 - u is exactly rest + lost, and rest is 2^power * m with m around 1. */
    const vec_f32 rest = 1.0f - u, lost = (1.0f - rest) - u;
    const vec_u32 from_half = (vec_u32)rest - 0x3f3504f3u; /* minus the bits of sqrt(1/2) */
    const ints power = (ints)from_half >> 23;
    const vec_f32 f = (vec_f32)((from_half & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    /* log(1 + f) = 2 artanh(f / (2 + f)) */
    const vec_f32 s = f / (f + 2.0f), z = s * s;
    vec_f32 series = broadcast(1.0f / 9);
    series = multiply_add(series, z, broadcast(1.0f / 7));
    series = multiply_add(series, z, broadcast(1.0f / 5));
    series = multiply_add(series, z, broadcast(1.0f / 3));
    const vec_f32 log = multiply_add(series * z, s + s, s + s) + lost / rest;
    return -multiply_add(__builtin_convertvector(power, vec_f32), broadcast(0x1.62e43p-1f), log);
}

/* Index of the sampled one of `count` weights, the lowest of equals. Without `ids`, token ids count up from `first`.
 * Arrays are padded to a whole vector, weights with 0. */
static long gumbel_argmax(const uint32_t *key, const uint32_t *ids, uint32_t first, const float *weights, long count) {
    vec_u32 index, best_index = {0};
    for (int l = 0; l < LANES; l++) index[l] = (uint32_t)l;
    vec_f32 best = broadcast(INFINITY);
    for (long at = 0; at < count; at += LANES, index += LANES) {
        vec_u32 id = index + first;
        if (ids) memcpy(&id, ids + at, sizeof id);
        const vec_f32 time = exponential_noise(key, id) / load_f32(weights + at);
        const vec_u32 closer = (vec_u32)(time < best);
        best = blend(closer, time, best);
        best_index = (vec_u32)blend(closer, (vec_f32)index, (vec_f32)best_index);
    }
    int best_lane = 0;
    for (int l = 1; l < LANES; l++)
        if (best[l] < best[best_lane] || (best[l] == best[best_lane] && best_index[l] < best_index[best_lane]))
            best_lane = l;
    return best_index[best_lane];
}

/* Samples from all tokens: first a block, then a token of it, which is the same distribution with noise for V / 64 + 64
 * numbers. Block ids follow the token ids, so the noise of a block is never that of a token. */
static long sample_from_all(row *r, const sampling_params *c, float min_p) {
    sum_blocks(r, min_p);
    for (long block = r->blocks; block < padded(r->blocks); block++) r->block_sums[block] = 0;
    const long block = gumbel_argmax(c->key, NULL, (uint32_t)r->width, r->block_sums, r->blocks);
    float rest[BLOCK], weights[BLOCK];
    const float *from = block_of(r, block, rest);
    for (long at = 0; at < BLOCK; at += LANES) store_f32(weights + at, weights_of(values_of(r, from + at), min_p));
    const long first = block * BLOCK;
    return first + gumbel_argmax(c->key, NULL, (uint32_t)first, weights, BLOCK);
}

static long sample_from_row(row *r, const sampling_params *c) {
    if (!find_max(r)) return NON_FINITE;
    r->temperature = (float)c->temperature;
    if (!(r->temperature > 0)) return argmax(r);
    const float min_p = c->min_p > 0 ? fminf((float)log(c->min_p), 0) : -INFINITY;
    if (c->top_k <= 0 && !(c->top_p < 1)) return sample_from_all(r, c, min_p);
    scale_block_maxima(r);
    apply_top_k_top_p_min_p(r, c, min_p);
    return r->ids[gumbel_argmax(c->key, r->ids, 0, r->weights, r->count)];
}

static void sample_row(void *work, long number) {
    job *j = work;
    row r;
    void *memory = init_row(&r, &j->table, number);
    if (memory) {
        j->table.token_ids[number] = sample_from_row(&r, &j->choices[number]);
    } else {
        atomic_store(&j->failed, 1);
    }
    free(memory);
}

/* ---- log-probabilities */

/* The most probable candidates, in order. */
static void top_candidates(const row *r, double log_total, long num_top, float *top_logprobs, int64_t *ids) {
    long listed = 0;
    for (long i = 0; i < r->count; i++) {
        const float value = r->values[i];
        if (listed == num_top && !(value > top_logprobs[num_top - 1])) continue;
        long at = listed < num_top ? listed++ : num_top - 1;
        for (; at > 0 && value > top_logprobs[at - 1]; at--) {
            top_logprobs[at] = top_logprobs[at - 1];
            ids[at] = ids[at - 1];
        }
        top_logprobs[at] = value;
        ids[at] = r->ids[i];
    }
    for (long i = 0; i < listed; i++) top_logprobs[i] = (float)(top_logprobs[i] - log_total);
}

static void logprobs_row(void *work, long number) {
    job *j = work;
    const logits_args *t = &j->table;
    float *top_logprobs = t->top_logprobs + number * t->num_top;
    int64_t *ids = t->top_ids + number * t->num_top;
    row r;
    void *memory = init_row(&r, t, number);
    if (!memory) {
        atomic_store(&j->failed, 1);
        return;
    }
    if (find_max(&r)) {
        r.temperature = 1;
        const double log_total = log(sum_blocks(&r, MIN_LOG_WEIGHT));
        t->token_logprobs[number] = (float)(r.logits[t->token_ids[number]] - (double)r.max_logit - log_total);
        scale_block_maxima(&r);
        if (t->num_top) {
            float min_value = -INFINITY;
            if (t->num_top <= r.blocks)
                min_value = threshold(&r, r.block_max, NULL, r.blocks, MIN_LOG_WEIGHT, (double)t->num_top);
            gather_candidates(&r, min_value);
            top_candidates(&r, log_total, t->num_top, top_logprobs, ids);
        }
    } else {
        t->token_logprobs[number] = NAN;
        for (long i = 0; i < t->num_top; i++) {
            top_logprobs[i] = NAN;
            ids[i] = i;
        }
    }
    free(memory);
}

static int run(task_function *function, const logits_args *t, const sampling_params *choices) {
    job j = {.table = *t, .choices = choices};
    (t->rows * t->width < SERIAL_BELOW ? run_serial : parallel_for)(function, &j, t->rows);
    return atomic_load(&j.failed);
}

/* Samples a token for every row. Returns whether memory ran out. */
int lockstep_sample(const logits_args *t, const sampling_params *choices) { return run(sample_row, t, choices); }

/* Log-probabilities of each row's token and of its most probable ones. Returns whether memory ran out. */
int lockstep_logprobs(const logits_args *t) { return run(logprobs_row, t, NULL); }
