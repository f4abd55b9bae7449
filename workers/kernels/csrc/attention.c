/* Causal attention over the paged KV cache on a CPU, and storing keys and values in it.
 *
 * The cache of one layer is [blocks, 2, kv_heads, block_size, head_dim], keys at 0 and values at 1, so the tokens of one
 * block and head are adjacent rows. The work is partitioned by request, KV head and run of new tokens: the query heads
 * of a KV head times the tokens of a run are the vectors that share the keys and values of a task.
 *
 * Batch invariance: a vector's result depends on its own context only. Positions are partitioned into KV splits of SPLIT
 * positions, counted from 0. Within a split: scores as in tiles.h, their maximum, exponentials, the sum of those by
 * lanes, and values accumulated in the order of positions. Splits are then merged in their order. Neither the other
 * requests, nor the chunk size of a prompt, nor the number of threads changes one of these operations.
 *
 * Only keys and values of the request itself are read, and only those values that a vector attends to.
 */
#include "attention_tiles.h"
#include "pool.h"
#include "shared_struct.h"

#include <stdlib.h>

#define MAX_VECTORS_PER_TASK 24
#define SERIAL_BELOW (16 << 10) /* elements of keys, or to store; with fewer, one thread is faster */

/* Packed by cpu_paged.py. Strides are in elements; the last dimension of every tensor is dense. */
typedef struct {
    const int64_t *slots;                         /* [rows], block * block_size + offset; negative: not stored */
    const int32_t *block_table;                   /* [requests, table_stride] */
    const int32_t *seq_lens;                      /* [requests] */
    const int32_t *query_start_loc;               /* [requests + 1], rows of the batch */
    int64_t table_stride, requests, tokens, rows; /* rows: including padding */
    int64_t block_size, kv_heads, group, head_dim, dtype;
    int64_t window; /* tokens that a token attends to, itself included; 0: all */
    double scale;
    int64_t num_blocks;
    const char *query, *key, *value;
    char *cache, *output;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
} attention_args;

EXPORT_SIZE(attention_args);
_Static_assert(sizeof(attention_args) == 27 * 8, "as packed by cpu_paged.py");

/* Results of the entry points, as in cpu_paged.py. */
enum { OK = 0, OUT_OF_MEMORY = 1, SLOT_OUT_OF_RANGE = 2, BLOCK_OUT_OF_RANGE = 3 };

/* The tasks of one request. */
typedef struct {
    long first_task;       /* number of tasks of the requests before */
    long tokens, position; /* new tokens, and the position of the first */
    long runs, first_split,
        splits; /* runs of tokens; KV splits that are a task each, or 1 if a task covers all splits of its run */
    long partials_offset; /* in floats */
} partition;

typedef struct {
    const attention_args *s;
    partition *partitions;                /* [requests + 1] */
    float *partials;                      /* softmax states of the tasks of requests with several splits */
    long width;                           /* head_dim, rounded up to whole steps */
    long heads_per_task, tokens_per_task; /* query heads and tokens of one task */
} attention_plan;

/* Running softmax of several vectors. In `partials` it is stored as maximum, sum, then `width` weighted values. */
typedef struct {
    float *maximum, *sum; /* [vectors]; a sum of -1: no position yet */
    float *values;        /* [vectors, width] */
} softmax_state;

/* ---- one task */

/* The vectors of a task: query heads of one KV head, for several tokens. */
typedef struct {
    const attention_args *s;
    const int32_t *blocks; /* of the request */
    long head, vectors, width;
    float *queries;                   /* [vectors, width], in the order of load_part */
    long from[MAX_VECTORS_PER_TASK];  /* the first position that a vector attends to, */
    long until[MAX_VECTORS_PER_TASK]; /* and one past the last; both are non-decreasing over the vectors */
} vector_group;

/* The adjacent keys (what = 0) or values (1) from `position` on, up to `end`. Returns their number. */
static long next_row_block(const vector_group *g, int what, long position, long end, row_block *taken) {
    const attention_args *s = g->s;
    const long within = position % s->block_size, block = g->blocks[position / s->block_size];
    const long row = ((block * 2 + what) * s->kv_heads + g->head) * s->block_size + within;
    const long row_bytes = s->head_dim * dtype_size((int)s->dtype);
    *taken = (row_block){(int)s->dtype, s->cache + row * row_bytes, row_bytes, s->head_dim};
    return min_long(s->block_size - within, end - position);
}

/* Adds values of `count` positions to up to three vectors. Positions visible to all vectors are processed together, those
 * before and after per vector; in both cases every vector accumulates in the order of positions. */
static void add_visible(const vector_group *g, const row_block *values, long position, long count, long first,
                        int vectors, const float *weights, float *sums) {
    long begin[3], end[3], from = 0, until = count;
    for (int v = 0; v < vectors; v++) {
        begin[v] = max_long(0, g->from[first + v] - position);
        end[v] = min_long(count, g->until[first + v] - position);
        from = max_long(from, begin[v]);
        until = min_long(until, end[v]);
    }
    until = max_long(from, until);
    for (int v = 0; v < vectors && from; v++)
        add_values(values, begin[v], min_long(from, end[v]), 1, weights + v * SPLIT, sums + v * g->width, g->width);
    add_values(values, from, until, vectors, weights, sums, g->width);
    for (int v = 0; v < vectors && until < count; v++)
        add_values(values, max_long(until, begin[v]), end[v], 1, weights + v * SPLIT, sums + v * g->width, g->width);
}

/* Softmax and weighted values of the vectors over one KV split. */
static void attend_split(const vector_group *g, long split, float *scores, const softmax_state *to) {
    const long base = split * SPLIT;
    const long begin = max_long(base, g->from[0]), end = min_long(base + SPLIT, g->until[g->vectors - 1]);
    row_block taken;
    for (long position = begin, count; position < end; position += count) {
        count = next_row_block(g, 0, position, end, &taken);
        score_rows(&taken, count, g->queries, g->width, g->vectors, scores + position - base);
    }
    for (long v = 0; v < g->vectors; v++) {
        const long first = max_long(begin, g->from[v]) - base, last = min_long(end, g->until[v]) - base;
        to->sum[v] = -1;
        if (first < last) softmax_weights(scores + v * SPLIT, first, last, &to->maximum[v], &to->sum[v]);
    }
    memset(to->values, 0, (size_t)(g->vectors * g->width) * sizeof(float));
    for (long position = begin, count; position < end; position += count) {
        count = next_row_block(g, 1, position, end, &taken);
        for (long v = 0; v < g->vectors; v += 3)
            add_visible(g, &taken, position, count, v, (int)min_long(3, g->vectors - v),
                        scores + v * SPLIT + position - base, to->values + v * g->width);
    }
}

/* Merges the softmax state of a later split into that of the splits before it, for one vector. */
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
    const vec_f32 rescale = vec_exp(broadcast(*maximum - highest)),
                  later_rescale = vec_exp(broadcast(later_maximum - highest));
    *maximum = highest;
    *sum = *sum * rescale[0] + later_sum * later_rescale[0];
    for (long i = 0; i < width; i += LANES)
        store_f32(values + i, load_f32(values + i) * rescale + load_f32(later + i) * later_rescale);
}

/* Normalizes the weighted values and stores them as one query head of the output. */
static void store_output(const attention_args *s, long width, float sum, const float *values, char *to) {
    const vec_f32 share = broadcast(1.0f / sum);
    char rounded[STEP * sizeof(float)];
    for (long at = 0; at < width; at += STEP) {
        store_parts((int)s->dtype, load_f32(values + at) * share, load_f32(values + at + LANES) * share, rounded);
        memcpy(to + at * dtype_size((int)s->dtype), rounded,
               (size_t)(min_long(STEP, s->head_dim - at) * dtype_size((int)s->dtype)));
    }
}

static char *output_of(const attention_args *s, long row, long query_head) {
    const long head = row * s->kv_heads * s->group + query_head;
    return s->output + head * s->head_dim * dtype_size((int)s->dtype);
}

static const partition *partition_of(const attention_plan *plan, long task) {
    long low = 0, high = plan->s->requests;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        if (plan->partitions[middle].first_task <= task)
            low = middle;
        else
            high = middle;
    }
    return &plan->partitions[low];
}

static long head_groups_of(const attention_plan *plan) {
    return (plan->s->group + plan->heads_per_task - 1) / plan->heads_per_task;
}

static void attend_task(void *work, long task) {
    const attention_plan *plan = work;
    const attention_args *s = plan->s;
    const partition *c = partition_of(plan, task);
    const long request = c - plan->partitions, number = task - c->first_task, width = plan->width;
    const long split = number % c->splits, run = number / c->splits % c->runs, group = number / c->splits / c->runs;
    const long first_head = group % head_groups_of(plan) * plan->heads_per_task,
               first_token = run * plan->tokens_per_task;
    const long heads = min_long(plan->heads_per_task, s->group - first_head);
    const long vectors = min_long(plan->tokens_per_task, c->tokens - first_token) * heads,
               row = s->query_start_loc[request];
    float queries[vectors * width], values[2][vectors * width], scores[vectors * SPLIT];
    float maxima[2][MAX_VECTORS_PER_TASK], sums[2][MAX_VECTORS_PER_TASK];
    vector_group g = {.s = s,
                      .blocks = s->block_table + request * s->table_stride,
                      .queries = queries,
                      .head = group / head_groups_of(plan),
                      .vectors = vectors,
                      .width = width};
    for (long v = 0; v < vectors; v++) {
        const long token = first_token + v / heads, head = g.head * s->group + first_head + v % heads;
        const long at = (row + token) * s->query_token + head * s->query_head;
        convert_vector((int)s->dtype, s->head_dim, (float)s->scale, s->query + at * dtype_size((int)s->dtype),
                       queries + v * width);
        g.until[v] = c->position + token + 1;
        g.from[v] = s->window ? max_long(0, g.until[v] - s->window) : 0;
    }
    long first_split = c->first_split + split, last_split = first_split;
    if (c->splits == 1) {
        first_split = g.from[0] / SPLIT;
        last_split = (g.until[vectors - 1] - 1) / SPLIT;
    }
    const softmax_state seen = {maxima[0], sums[0], values[0]}, later = {maxima[1], sums[1], values[1]};
    attend_split(&g, first_split, scores, &seen);
    for (long next = first_split + 1; next <= last_split; next++) {
        attend_split(&g, next, scores, &later);
        for (long v = 0; v < vectors; v++)
            merge(&seen.maximum[v], &seen.sum[v], seen.values + v * width, later.maximum[v], later.sum[v],
                  later.values + v * width, width);
    }
    for (long v = 0; v < vectors; v++) {
        const long token = first_token + v / heads, head = first_head + v % heads;
        if (c->splits == 1) {
            store_output(s, width, seen.sum[v], seen.values + v * width,
                         output_of(s, row + token, g.head * s->group + head));
        } else {
            const long vector = (token * s->kv_heads + g.head) * s->group + head;
            float *kept = plan->partials + c->partials_offset + (vector * c->splits + split) * (width + 2);
            kept[0] = seen.maximum[v];
            kept[1] = seen.sum[v];
            memcpy(kept + 2, seen.values + v * width, (size_t)width * sizeof(float));
        }
    }
}

/* Merges the KV splits of a request whose tasks are splits. */
static void merge_splits(void *work, long request) {
    const attention_plan *plan = work;
    const attention_args *s = plan->s;
    const partition *c = &plan->partitions[request];
    if (c->splits == 1 || !c->tokens) return;
    const long heads = s->kv_heads * s->group, size = plan->width + 2;
    for (long vector = 0; vector < c->tokens * heads; vector++) {
        float *kept = plan->partials + c->partials_offset + vector * c->splits * size;
        for (long split = 1; split < c->splits; split++)
            merge(&kept[0], &kept[1], kept + 2, kept[split * size], kept[split * size + 1], kept + split * size + 2,
                  plan->width);
        store_output(s, plan->width, kept[1], kept + 2,
                     output_of(s, s->query_start_loc[request] + vector / heads, vector % heads));
    }
}

/* ---- entry points */

static void store_token(void *work, long token) {
    const attention_args *s = work;
    const long slot = s->slots[token], bytes = dtype_size((int)s->dtype), size = s->head_dim * bytes;
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
        const long length = s->seq_lens[r], first_query = length - (s->query_start_loc[r + 1] - s->query_start_loc[r]);
        const long first = s->window ? max_long(0, first_query + 1 - s->window) : 0;
        const int32_t *blocks = s->block_table + r * s->table_stride;
        for (long block = first / s->block_size; block * s->block_size < length; block++)
            outside |= blocks[block] < 0 || blocks[block] >= s->num_blocks;
    }
    return !outside;
}

/* Stores keys and values of every token with a slot; nothing if a slot is out of range. */
int lockstep_store_kv(attention_args *s) {
    const int serial = s->rows * s->kv_heads * s->head_dim < SERIAL_BELOW;
    if (!slots_in_range(s)) return SLOT_OUT_OF_RANGE;
    (serial ? run_serial : parallel_for)(store_token, s, s->rows);
    return OK;
}

/* Computes the partitions. Returns the number of tasks. */
static long partition_requests(const attention_plan *plan, long *num_visible) {
    const attention_args *s = plan->s;
    long tasks = 0, floats_before = 0;
    for (long r = 0; r < s->requests; r++) {
        partition *c = &plan->partitions[r];
        const long tokens = s->query_start_loc[r + 1] - s->query_start_loc[r], length = s->seq_lens[r],
                   position = length - tokens;
        const long first = s->window ? max_long(0, position + 1 - s->window) : 0;
        *c = (partition){.first_task = tasks,
                         .tokens = tokens,
                         .position = position,
                         .first_split = first / SPLIT,
                         .runs = (tokens + plan->tokens_per_task - 1) / plan->tokens_per_task,
                         .splits = 1,
                         .partials_offset = floats_before};
        if (c->runs == 1) c->splits = (length - 1) / SPLIT - c->first_split + 1;
        tasks += s->kv_heads * head_groups_of(plan) * c->runs * c->splits;
        if (c->splits > 1) floats_before += tokens * s->kv_heads * s->group * c->splits * (plan->width + 2);
        *num_visible += (length - first) * c->runs;
    }
    plan->partitions[s->requests].partials_offset = floats_before;
    return tasks;
}

/* Stores the step's keys and values, computes the attention of every request, and zeroes the rows of padding. */
int lockstep_attention(attention_args *s) {
    if (!blocks_in_range(s)) return BLOCK_OUT_OF_RANGE;
    const int stored = lockstep_store_kv(s);
    if (stored != OK) return stored;
    attention_plan plan = {
        .s = s, .width = steps_of(s->head_dim) * STEP, .heads_per_task = min_long(s->group, MAX_VECTORS_PER_TASK)};
    plan.tokens_per_task = MAX_VECTORS_PER_TASK / plan.heads_per_task;
    memset(output_of(s, s->tokens, 0), 0, (size_t)(output_of(s, s->rows, 0) - output_of(s, s->tokens, 0)));
    if (!s->requests) return 0;
    plan.partitions = malloc((size_t)(s->requests + 1) * sizeof *plan.partitions);
    if (!plan.partitions) return 1;
    long num_visible = 0;
    const long tasks = partition_requests(&plan, &num_visible), kept = plan.partitions[s->requests].partials_offset;
    if (kept) plan.partials = malloc((size_t)kept * sizeof(float));
    if (kept && !plan.partials) {
        free(plan.partitions);
        return 1;
    }
    const int serial = num_visible * s->kv_heads * s->head_dim < SERIAL_BELOW;
    (serial ? run_serial : parallel_for)(attend_task, &plan, tasks);
    if (kept) parallel_for(merge_splits, &plan, s->requests);
    free(plan.partials);
    free(plan.partitions);
    return 0;
}
