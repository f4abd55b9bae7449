/* Causal attention over the paged cache on a CPU, and storing keys and values in it.
 *
 * One layer's cache is [blocks, 2, kv_heads, block_size, head_dim], keys at 0 and values at 1, so that the tokens of
 * one block and head are rows next to each other. Work is cut by request, KV head and run of new tokens: the query heads
 * of a KV head times the tokens of a run are the vectors that share the keys and values they read.
 *
 * A vector's result depends on its own context only. Positions are taken in spans of SPAN, counted from 0. Within a
 * span: scores as in tiles.h, their maximum, exponentials, their sum by lanes, and values added in the order of
 * positions. Spans are then merged in their order. Neither the other requests, nor how many tokens of a prompt come in
 * one step, nor the number of threads change an operation of that, so they do not change a bit.
 *
 * Only keys and values of the request itself are read, and of values only those a vector may see.
 */
#include "pool.h"
#include "shared_struct.h"
#include "tiles.h"

#include <math.h>
#include <stdlib.h>

#define SPAN 256
#define MOST_TOGETHER 24       /* vectors of one part */
#define FEW_NUMBERS (16 << 10) /* of keys, or to store: not worth another thread */

/* Keep in step with native_cpu.py. Strides count numbers; the last dimension of every tensor is dense. */
typedef struct {
    const int64_t *slots;       /* [rows], block * block_size + offset, or -1 for nowhere */
    const int32_t *block_table; /* [requests, table_stride] */
    const int32_t *seq_lens;    /* [requests] */
    const int32_t *starts;      /* [requests + 1], rows of the batch */
    int64_t table_stride, requests, tokens, rows; /* rows: padding included */
    int64_t block_size, kv_heads, group, head_dim, dtype;
    int64_t window; /* tokens a token sees, itself included; 0: all */
    double scale;
    int64_t num_blocks;
    const char *query, *key, *value;
    char *cache, *output;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
} attention_args;

EXPORT_SIZE(attention_args);
_Static_assert(sizeof(attention_args) == 27 * 8, "as packed by cpu_paged.py");

/* Results of the entry points; keep in step with cpu_paged.py. */
enum { OK = 0, OUT_OF_MEMORY = 1, SLOT_OUT_OF_RANGE = 2, BLOCK_OUT_OF_RANGE = 3 };

/* How a request's work is cut. */
typedef struct {
    long parts_before;            /* of the requests before */
    long tokens, position;        /* new ones, and the position of the first */
    long runs, first_span, spans; /* runs of tokens; spans that are a part each, or 1 if a part does all of its run */
    long partials_before;         /* floats */
} cut;

typedef struct {
    const attention_args *s;
    cut *cuts;                            /* [requests + 1] */
    float *partials;                      /* of every part of a request cut into spans: its vectors' `result`s */
    long width;                           /* head_dim, rounded up to whole steps */
    long heads_together, tokens_together; /* query heads and tokens of one part */
} plan;

/* Of some vectors: what they have seen so far. A result as it is kept: maximum, sum, then `width` weighted values. */
typedef struct {
    float *maximum, *sum; /* [vectors]; a sum of -1 says that nothing was seen */
    float *values;        /* [vectors, width] */
} result;

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

/* Some rows of keys or values that lie one after another. */
typedef struct {
    int dtype;
    const char *first;
    long bytes, width; /* of a row */
} rows_of;

/* ---- scores */

INLINE void score_tile(int dtype, int rows, int vectors, long width, const char *keys, long row_bytes,
                       const float *queries, long stride, float *scores) {
    const long whole = width / STEP;
    floats sums[MOST_SUMS];
    add_tile(dtype, rows, vectors, 0, 1, keys, row_bytes, queries, stride, whole, sums);
    if (width % STEP) {
        char rest[MOST_ROWS][STEP * sizeof(float)] = {{0}};
        const size_t bytes = (size_t)(width % STEP * bytes_of(dtype));
        for (int r = 0; r < rows; r++)
            memcpy(rest[r], keys + r * row_bytes + whole * STEP * bytes_of(dtype), bytes);
        add_tile(dtype, rows, vectors, 0, 0, rest[0], sizeof rest[0], queries + whole * STEP, stride, 1, sums);
    }
    for (int v = 0; v < vectors; v++)
        for (int r = 0; r < rows; r += 4) {
            floats four[4] = {sums[r * vectors + v]};
            float summed[4];
            for (int i = 1; i < 4 && r + i < rows; i++) four[i] = sums[(r + i) * vectors + v];
            sum_lanes(four, summed);
            memcpy(scores + v * SPAN + r, summed, sizeof(float) * (size_t)least(4, rows - r));
        }
}

typedef void score_function(long width, const char *keys, long row_bytes, const float *queries, long stride,
                            float *scores);
#define SCORES(dtype, rows, vectors)                                                                                 \
    static void scores_##dtype##_##rows##_##vectors(long width, const char *keys, long row_bytes,                    \
                                                    const float *queries, long stride, float *scores) {              \
        score_tile(dtype, rows, vectors, width, keys, row_bytes, queries, stride, scores);                           \
    }
/* Rows of a tile with 1, 2 and 3 vectors: fp32 needs no register to widen in. */
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
static score_function *const tall_scores[3][4] = {
    {EACH_WIDE_SCORE(SCORE_NAME)}, {EACH_SCORE(SCORE_NAME, 1)}, {EACH_SCORE(SCORE_NAME, 2)}};
static score_function *const row_scores[3][4] = {
    {EACH_ROW(SCORE_NAME, 0)}, {EACH_ROW(SCORE_NAME, 1)}, {EACH_ROW(SCORE_NAME, 2)}};

/* Of `count` keys with all vectors: into scores[vector * SPAN + row]. */
static void score_rows(const rows_of *keys, long count, const float *queries, long stride, long vectors,
                       float *scores) {
    for (long vector = 0, together; vector < vectors; vector += together) {
        together = vectors - vector == 4 ? 2 : least(vectors - vector, 3);
        const long tall = together == 1 ? 8 : together == 2 || keys->dtype == FLOAT32 ? 4 : 3;
        for (long row = 0, rows; row < count; row += rows) {
            rows = count - row >= tall ? tall : 1;
            (rows == tall ? tall_scores : row_scores)[keys->dtype][together](
                keys->width, keys->first + row * keys->bytes, keys->bytes, queries + vector * stride, stride,
                scores + vector * SPAN + row);
        }
    }
}

/* Scores `begin` to `end` of one vector become weights, relative to their maximum. */
static void weigh(float *scores, long begin, long end, float *maximum, float *sum) {
    const long first = begin / LANES * LANES, last = (end + LANES - 1) / LANES * LANES;
    for (long i = first; i < begin; i++) scores[i] = -INFINITY;
    for (long i = end; i < last; i++) scores[i] = -INFINITY;
    floats highest = spread(-INFINITY), sums[4] = {0};
    for (long i = first; i < last; i += LANES) {
        const floats score = load_floats(scores + i);
        highest = choose((words)(score > highest), score, highest);
    }
    *maximum = highest[0];
    for (int lane = 1; lane < LANES; lane++) *maximum = highest[lane] > *maximum ? highest[lane] : *maximum;
    for (long i = first; i < last; i += LANES) {
        const floats weight = exponential(load_floats(scores + i) - spread(*maximum));
        store_floats(scores + i, weight);
        sums[0] += weight;
    }
    float summed[4];
    sum_lanes(sums, summed);
    *sum = summed[0];
}

/* ---- values */

/* Adds `rows` values, times the weights of each vector, to columns of its sums: `pairs` steps of them. */
INLINE void value_tile(int dtype, int vectors, int pairs, long rows, const char *values, long row_bytes,
                       const float *weights, float *sums, long stride) {
    floats sum[3][8];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) sum[v][half] = load_floats(sums + v * stride + half * LANES);
    for (long row = 0; row < rows; row++, values += row_bytes) {
        floats weight[3];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            weight[v] = spread(weights[v * SPAN + row]);
            KEEP(weight[v]);
        }
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) {
            floats value = load_half(dtype, half % 2, values + (long)(half / 2) * STEP * bytes_of(dtype));
            KEEP(value);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[v][half] = multiply_add(weight[v], value, sum[v][half]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int half = 0; half < 2 * pairs; half++) store_floats(sums + v * stride + half * LANES, sum[v][half]);
}

typedef void value_function(long rows, const char *values, long row_bytes, const float *weights, float *sums,
                            long stride);
#define VALUES(dtype, vectors, pairs)                                                                                \
    static void values_##dtype##_##vectors##_##pairs(long rows, const char *values, long row_bytes,                  \
                                                     const float *weights, float *sums, long stride) {               \
        value_tile(dtype, vectors, pairs, rows, values, row_bytes, weights, sums, stride);                           \
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

/* Adds values `begin` to `end`, if there are any, to the sums of 1 to 3 vectors, all of which see all of them. */
static void add_values(const rows_of *values, long begin, long end, int vectors, const float *weights, float *sums,
                       long stride) {
    const int dtype = values->dtype;
    const char *first = values->first + begin * values->bytes;
    const long whole = values->width / STEP, step_bytes = (long)STEP * bytes_of(dtype), count = end - begin;
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
        memcpy(rest, first + whole * step_bytes, (size_t)(values->width % STEP * bytes_of(dtype)));
        pair_values[dtype][vectors](1, rest, 0, weights + row, sums + whole * STEP, stride);
    }
}

/* ---- one part */

/* The vectors of a part: some query heads of a KV head, for some tokens. */
typedef struct {
    const attention_args *s;
    const int32_t *blocks; /* of the request */
    long head, vectors, width;
    float *queries;            /* [vectors, width], in the order of load_half */
    long from[MOST_TOGETHER];  /* the first position that a vector sees, */
    long until[MOST_TOGETHER]; /* and the one behind the last; neither ever falls from one vector to the next */
} group_of_vectors;

/* The keys (0) or values (1) from `position` on that lie together, at most up to `end`. Gives how many. */
static long take_rows(const group_of_vectors *g, int what, long position, long end, rows_of *taken) {
    const attention_args *s = g->s;
    const long within = position % s->block_size, block = g->blocks[position / s->block_size];
    const long row = ((block * 2 + what) * s->kv_heads + g->head) * s->block_size + within;
    const long row_bytes = s->head_dim * bytes_of((int)s->dtype);
    *taken = (rows_of){(int)s->dtype, s->cache + row * row_bytes, row_bytes, s->head_dim};
    return least(s->block_size - within, end - position);
}

/* Values of `count` positions for up to three vectors. Those that all see are added together, those before and after to
 * each vector by itself; either way every vector adds its values in the order of positions. */
static void add_visible(const group_of_vectors *g, const rows_of *values, long position, long count, long first,
                        int vectors, const float *weights, float *sums) {
    long begin[3], end[3], from = 0, until = count;
    for (int v = 0; v < vectors; v++) {
        begin[v] = most(0, g->from[first + v] - position);
        end[v] = least(count, g->until[first + v] - position);
        from = most(from, begin[v]);
        until = least(until, end[v]);
    }
    until = most(from, until);
    for (int v = 0; v < vectors && from; v++)
        add_values(values, begin[v], least(from, end[v]), 1, weights + v * SPAN, sums + v * g->width, g->width);
    add_values(values, from, until, vectors, weights, sums, g->width);
    for (int v = 0; v < vectors && until < count; v++)
        add_values(values, most(until, begin[v]), end[v], 1, weights + v * SPAN, sums + v * g->width, g->width);
}

/* What the vectors see in one span. */
static void attend_span(const group_of_vectors *g, long span, float *scores, const result *to) {
    const long base = span * SPAN;
    const long begin = most(base, g->from[0]), end = least(base + SPAN, g->until[g->vectors - 1]);
    rows_of taken;
    for (long position = begin, count; position < end; position += count) {
        count = take_rows(g, 0, position, end, &taken);
        score_rows(&taken, count, g->queries, g->width, g->vectors, scores + position - base);
    }
    for (long v = 0; v < g->vectors; v++) {
        const long first = most(begin, g->from[v]) - base, last = least(end, g->until[v]) - base;
        to->sum[v] = -1;
        if (first < last) weigh(scores + v * SPAN, first, last, &to->maximum[v], &to->sum[v]);
    }
    memset(to->values, 0, (size_t)(g->vectors * g->width) * sizeof(float));
    for (long position = begin, count; position < end; position += count) {
        count = take_rows(g, 1, position, end, &taken);
        for (long v = 0; v < g->vectors; v += 3)
            add_visible(g, &taken, position, count, v, (int)least(3, g->vectors - v),
                        scores + v * SPAN + position - base, to->values + v * g->width);
    }
}

/* Adds what one vector saw in a later span to what it has seen before. */
static void merge(float *maximum, float *sum, float *values, float later_maximum, float later_sum, const float *later,
                  long width) {
    if (later_sum == -1) return;
    if (*sum == -1) {
        *maximum = later_maximum;
        *sum = later_sum;
        memcpy(values, later, (size_t)width * sizeof(float));
        return;
    }
    const float highest = later_maximum > *maximum ? later_maximum : *maximum;
    const floats mine = exponential(spread(*maximum - highest)), theirs = exponential(spread(later_maximum - highest));
    *maximum = highest;
    *sum = *sum * mine[0] + later_sum * theirs[0];
    for (long i = 0; i < width; i += LANES)
        store_floats(values + i, load_floats(values + i) * mine + load_floats(later + i) * theirs);
}

/* Weighted values over their sum, as one query head of the output. */
static void finish(const attention_args *s, long width, float sum, const float *values, char *to) {
    const floats share = spread(1.0f / sum);
    char rounded[STEP * sizeof(float)];
    for (long at = 0; at < width; at += STEP) {
        store_halves((int)s->dtype, load_floats(values + at) * share, load_floats(values + at + LANES) * share,
                     rounded);
        memcpy(to + at * bytes_of((int)s->dtype), rounded,
               (size_t)(least(STEP, s->head_dim - at) * bytes_of((int)s->dtype)));
    }
}

static char *output_of(const attention_args *s, long row, long query_head) {
    const long head = row * s->kv_heads * s->group + query_head;
    return s->output + head * s->head_dim * bytes_of((int)s->dtype);
}

static const cut *cut_of(const plan *all, long part) {
    long low = 0, high = all->s->requests;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        if (all->cuts[middle].parts_before <= part) low = middle;
        else high = middle;
    }
    return &all->cuts[low];
}

static long head_groups(const plan *all) { return (all->s->group + all->heads_together - 1) / all->heads_together; }

static void attend_part(void *work, long part) {
    const plan *all = work;
    const attention_args *s = all->s;
    const cut *c = cut_of(all, part);
    const long request = c - all->cuts, number = part - c->parts_before, width = all->width;
    const long span = number % c->spans, run = number / c->spans % c->runs, group = number / c->spans / c->runs;
    const long first_head = group % head_groups(all) * all->heads_together, first_token = run * all->tokens_together;
    const long heads = least(all->heads_together, s->group - first_head);
    const long vectors = least(all->tokens_together, c->tokens - first_token) * heads, row = s->starts[request];
    float queries[vectors * width], values[2][vectors * width], scores[vectors * SPAN];
    float maxima[2][MOST_TOGETHER], sums[2][MOST_TOGETHER];
    group_of_vectors g = {.s = s, .blocks = s->block_table + request * s->table_stride, .queries = queries,
                          .head = group / head_groups(all), .vectors = vectors, .width = width};
    for (long v = 0; v < vectors; v++) {
        const long token = first_token + v / heads, head = g.head * s->group + first_head + v % heads;
        const long at = (row + token) * s->query_token + head * s->query_head;
        widen_vector((int)s->dtype, s->head_dim, (float)s->scale, s->query + at * bytes_of((int)s->dtype),
                     queries + v * width);
        g.until[v] = c->position + token + 1;
        g.from[v] = s->window ? most(0, g.until[v] - s->window) : 0;
    }
    long first_span = c->first_span + span, last_span = first_span;
    if (c->spans == 1) {
        first_span = g.from[0] / SPAN;
        last_span = (g.until[vectors - 1] - 1) / SPAN;
    }
    const result seen = {maxima[0], sums[0], values[0]}, later = {maxima[1], sums[1], values[1]};
    attend_span(&g, first_span, scores, &seen);
    for (long next = first_span + 1; next <= last_span; next++) {
        attend_span(&g, next, scores, &later);
        for (long v = 0; v < vectors; v++)
            merge(&seen.maximum[v], &seen.sum[v], seen.values + v * width, later.maximum[v], later.sum[v],
                  later.values + v * width, width);
    }
    for (long v = 0; v < vectors; v++) {
        const long token = first_token + v / heads, head = first_head + v % heads;
        if (c->spans == 1) {
            finish(s, width, seen.sum[v], seen.values + v * width,
                   output_of(s, row + token, g.head * s->group + head));
        } else {
            const long vector = (token * s->kv_heads + g.head) * s->group + head;
            float *kept = all->partials + c->partials_before + (vector * c->spans + span) * (width + 2);
            kept[0] = seen.maximum[v];
            kept[1] = seen.sum[v];
            memcpy(kept + 2, seen.values + v * width, (size_t)width * sizeof(float));
        }
    }
}

/* Merges the spans of a request that was cut into them. */
static void merge_request(void *work, long request) {
    const plan *all = work;
    const attention_args *s = all->s;
    const cut *c = &all->cuts[request];
    if (c->spans == 1 || !c->tokens) return;
    const long heads = s->kv_heads * s->group, size = all->width + 2;
    for (long vector = 0; vector < c->tokens * heads; vector++) {
        float *kept = all->partials + c->partials_before + vector * c->spans * size;
        for (long span = 1; span < c->spans; span++)
            merge(&kept[0], &kept[1], kept + 2, kept[span * size], kept[span * size + 1], kept + span * size + 2,
                  all->width);
        finish(s, all->width, kept[1], kept + 2, output_of(s, s->starts[request] + vector / heads, vector % heads));
    }
}

/* ---- entry points */

static void store_token(void *work, long token) {
    const attention_args *s = work;
    const long slot = s->slots[token], bytes = bytes_of((int)s->dtype), size = s->head_dim * bytes;
    if (slot < 0) return;
    for (long head = 0; head < s->kv_heads; head++) {
        const long tile = slot / s->block_size * 2 * s->kv_heads + head, offset = slot % s->block_size;
        memcpy(s->cache + (tile * s->block_size + offset) * size,
               s->key + (token * s->key_token + head * s->key_head) * bytes, (size_t)size);
        memcpy(s->cache + ((tile + s->kv_heads) * s->block_size + offset) * size,
               s->value + (token * s->value_token + head * s->value_head) * bytes, (size_t)size);
    }
}

/* Whether every slot is negative (padding) or lies in the cache. */
static int slots_in_range(const attention_args *s) {
    const int64_t num_slots = s->num_blocks * s->block_size;
    int64_t beyond = 0;
    for (long token = 0; token < s->rows; token++) beyond |= s->slots[token] >= num_slots;
    return !beyond;
}

/* Whether every block that attention will read lies in the cache. */
static int blocks_in_range(const attention_args *s) {
    int outside = 0;
    for (long r = 0; r < s->requests; r++) {
        const long length = s->seq_lens[r], first_query = length - (s->starts[r + 1] - s->starts[r]);
        const long first = s->window ? most(0, first_query + 1 - s->window) : 0;
        const int32_t *blocks = s->block_table + r * s->table_stride;
        for (long block = first / s->block_size; block * s->block_size < length; block++)
            outside |= blocks[block] < 0 || blocks[block] >= s->num_blocks;
    }
    return !outside;
}

/* Stores keys and values of every token with a slot; nothing if a slot is out of range. */
int lockstep_store_kv(attention_args *s) {
    const int few = s->rows * s->kv_heads * s->head_dim < FEW_NUMBERS;
    if (!slots_in_range(s)) return SLOT_OUT_OF_RANGE;
    (few ? run_alone : parallel)(store_token, s, s->rows);
    return OK;
}

/* Fills the cuts; gives the number of parts. */
static long cut_requests(const plan *all, long *visible) {
    const attention_args *s = all->s;
    long parts = 0, floats_before = 0;
    for (long r = 0; r < s->requests; r++) {
        cut *c = &all->cuts[r];
        const long tokens = s->starts[r + 1] - s->starts[r], length = s->seq_lens[r], position = length - tokens;
        const long first = s->window ? most(0, position + 1 - s->window) : 0;
        *c = (cut){.parts_before = parts, .tokens = tokens, .position = position, .first_span = first / SPAN,
                   .runs = (tokens + all->tokens_together - 1) / all->tokens_together, .spans = 1,
                   .partials_before = floats_before};
        if (c->runs == 1) c->spans = (length - 1) / SPAN - c->first_span + 1;
        parts += s->kv_heads * head_groups(all) * c->runs * c->spans;
        if (c->spans > 1) floats_before += tokens * s->kv_heads * s->group * c->spans * (all->width + 2);
        *visible += (length - first) * c->runs;
    }
    all->cuts[s->requests].partials_before = floats_before;
    return parts;
}

/* Stores the step's keys and values; then every request's attention, and zeros in the rows of padding. */
int lockstep_attention(attention_args *s) {
    if (!blocks_in_range(s)) return BLOCK_OUT_OF_RANGE;
    const int stored = lockstep_store_kv(s);
    if (stored != OK) return stored;
    plan all = {.s = s, .width = steps_of(s->head_dim) * STEP, .heads_together = least(s->group, MOST_TOGETHER)};
    all.tokens_together = MOST_TOGETHER / all.heads_together;
    memset(output_of(s, s->tokens, 0), 0, (size_t)(output_of(s, s->rows, 0) - output_of(s, s->tokens, 0)));
    if (!s->requests) return 0;
    all.cuts = malloc((size_t)(s->requests + 1) * sizeof *all.cuts);
    if (!all.cuts) return 1;
    long visible = 0;
    const long parts = cut_requests(&all, &visible), kept = all.cuts[s->requests].partials_before;
    if (kept) all.partials = malloc((size_t)kept * sizeof(float));
    if (kept && !all.partials) {
        free(all.cuts);
        return 1;
    }
    const int few = visible * s->kv_heads * s->head_dim < FEW_NUMBERS;
    (few ? run_alone : parallel)(attend_part, &all, parts);
    if (kept) parallel(merge_request, &all, s->requests);
    free(all.partials);
    free(all.cuts);
    return 0;
}
