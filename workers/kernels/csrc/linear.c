/* out = x w^T + bias for a linear layer on a CPU: any number of tokens, weights as they lie in the checkpoint.
 *
 * Every output element is one row of w times one token, and is summed in the same order whatever else is computed with
 * it: LANES sums, each over the halves of the steps in the order of the row, then sum_lanes. How many rows and tokens
 * share a tile, how the work is cut into parts and which thread does them changes nothing, so the bits of a token's
 * result do not depend on the other tokens or on the number of threads.
 *
 * With few tokens all time goes into reading w, so it is read once, in a few long streams, and widened in registers.
 * With more, a panel of its rows is taken through all tokens while it is in the first cache; with many, it is widened
 * first. x is always widened before, into what tiles.h calls a vector.
 */
#include "pool.h"
#include "shared_struct.h"
#include "tiles.h"

#include <stdlib.h>

#define MOST_FEW 32         /* tokens that are few */
#define BYTES_OF_PART 98304 /* of w, with one tile of tokens */
#define BYTES_OF_TILE 32768 /* of w and x, with several: so that they stay in the first cache */
#define TOKENS_AT_ONCE 96   /* with many: a longer batch goes in runs of this size, each of which reads w again */
#define ROWS_OF_PANEL 24
#define WIDTH_OF_PANEL 640 /* numbers of a row: few enough for the caches, and a row of 576 is not two runs */
#define STEPS_OF_PANEL (WIDTH_OF_PANEL / STEP)
#define WIDEN_ALONE 65536 /* numbers of x that are not worth dividing */

/* Keep in step with cpu_linear.py. */
typedef struct {
    const char *x, *w, *bias; /* [tokens, width], [rows, width], [rows] or NULL, dense and of `dtype` */
    char *out;                /* [tokens, rows], of `out_dtype` */
    int64_t tokens, rows, width, dtype, out_dtype;
} linear_args;

EXPORT_SIZE(linear_args);
_Static_assert(sizeof(linear_args) == 9 * 8, "as packed by cpu_linear.py");

typedef struct {
    const linear_args *p;
    const char *x; /* first token of this run */
    char *out;
    float *wide; /* [tokens, steps * STEP], the tokens as vectors */
    long tokens, steps, rows_of_part, steps_at_once;
} run;

static inline long least(long a, long b) { return a < b ? a : b; }

/* A tile's sums, now whole, to where they belong; of the first `rows` rows, which are `apart` rows from each other. */
static void finish_tile(const run *all, long row, int rows, long apart, long token, int tokens, const floats *sums) {
    const linear_args *p = all->p;
    const int out_dtype = (int)p->out_dtype;
    const long number = bytes_of(out_dtype);
    float bias[MOST_ROWS] = {0};
    if (p->bias)
        for (int r = 0; r < rows; r++) bias[r] = load_number((int)p->dtype, p->bias, row + r * apart);
    if (rows == 4 && apart == 1) { /* Next to each other in the result: four at a time. */
        for (int t = 0; t < tokens; t++) {
            float summed[4];
            sum_lanes_apart(sums + t, tokens, summed);
            if (p->bias)
                for (int r = 0; r < 4; r++) summed[r] += bias[r];
            store_four(out_dtype, summed, all->out + ((token + t) * p->rows + row) * number);
        }
        return;
    }
    float summed[MOST_SUMS];
    for (int i = 0; i < rows * tokens; i += 4) sum_lanes(sums + i, summed + i);
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < tokens; t++) {
            const float sum = summed[r * tokens + t];
            store_number(out_dtype, all->out, (token + t) * p->rows + row + r * apart, p->bias ? sum + bias[r] : sum);
        }
    }
}

/* ---- few tokens: one pass over w, as it is */

typedef void few_function(int fresh, const char *w, long w_bytes, const float *x, long x_stride, long steps,
                          floats *sums);

#define FEW(dtype, rows, tokens)                                                                                     \
    static void few_##dtype##_##rows##_##tokens(int fresh, const char *w, long w_bytes, const float *x,               \
                                                long x_stride, long steps, floats *sums) {                           \
        add_tile(dtype, rows, tokens, 1, fresh, w, w_bytes, x, x_stride, steps, sums);                               \
    }
#define FEW_OF(rows, tokens) FEW(0, rows, tokens) FEW(1, rows, tokens) FEW(2, rows, tokens)

/* As many sums as there are registers for; with one token, as many as keep up with the memory. */
#if LANES == 16 || defined(__aarch64__)
#define EACH_FEW(macro) macro(4, 1) macro(8, 2) macro(6, 3) macro(4, 4)
#else
#define EACH_FEW(macro) macro(4, 1) macro(4, 2) macro(3, 3) macro(2, 4)
#endif
#define TOKENS_OF_TILE 4
#define EACH_ROW(macro) macro(1, 1) macro(1, 2) macro(1, 3) macro(1, 4)
EACH_FEW(FEW_OF)
EACH_ROW(FEW_OF)

#define ROWS_OF(rows, tokens) [tokens] = rows,
static const int few_rows[TOKENS_OF_TILE + 1] = {EACH_FEW(ROWS_OF)};
#define NAMES_OF(rows, tokens)                                                                                       \
    [0][tokens] = few_0_##rows##_##tokens, [1][tokens] = few_1_##rows##_##tokens,                                    \
    [2][tokens] = few_2_##rows##_##tokens,
static few_function *const few_tiles[3][TOKENS_OF_TILE + 1] = {EACH_FEW(NAMES_OF)};
static few_function *const row_tiles[3][TOKENS_OF_TILE + 1] = {EACH_ROW(NAMES_OF)};

/* Steps `begin` to `end` of a tile; in the last of them, numbers that are not there count as zeros. */
static void add_steps(const run *all, few_function *tile, long row, int rows, long apart, long token, long begin,
                      long end, floats *sums) {
    const linear_args *p = all->p;
    const long number = bytes_of((int)p->dtype), whole = p->width / STEP, x_stride = all->steps * STEP;
    const long w_bytes = apart * p->width * number;
    const char *w = p->w + row * p->width * number;
    const float *x = all->wide + token * x_stride;
    tile(!begin, w + begin * STEP * number, w_bytes, x + begin * STEP, x_stride, least(end, whole) - begin,
         sums);
    if (end > whole) {
        char rest[MOST_ROWS][STEP * sizeof(float)] = {{0}};
        for (int r = 0; r < rows; r++)
            memcpy(rest[r], w + r * w_bytes + whole * STEP * number, (size_t)((p->width - whole * STEP) * number));
        tile(0, rest[0], sizeof rest[0], x + whole * STEP, x_stride, 1, sums);
    }
}

/* One part with one tile of tokens: it waits for memory. The rows of a tile are as far apart as they can be, so that
 * each reads on where it was in the tile before: CPUs fetch a few long streams ahead by themselves, and faster than
 * they can be told to, but not many short ones. */
static void multiply_streams(const run *all, long first, long last) {
    const int dtype = (int)all->p->dtype, tokens = (int)all->tokens, rows = few_rows[tokens];
    const long apart = (last - first) / rows;
    floats sums[MOST_SUMS];
    for (long row = first; row < first + apart; row++) {
        add_steps(all, few_tiles[dtype][tokens], row, rows, apart, 0, 0, all->steps, sums);
        finish_tile(all, row, rows, apart, 0, tokens, sums);
    }
    for (long row = first + rows * apart; row < last; row++) {
        add_steps(all, row_tiles[dtype][tokens], row, 1, 1, 0, 0, all->steps, sums);
        finish_tile(all, row, 1, 1, 0, tokens, sums);
    }
}

/* One part: panels of rows, each taken through all tokens while it is in the first cache. */
static void multiply_few(void *work, long part) {
    const run *all = work;
    const int dtype = (int)all->p->dtype;
    const long tiles = (all->tokens + TOKENS_OF_TILE - 1) / TOKENS_OF_TILE;
    const long first = part * all->rows_of_part, last = least(first + all->rows_of_part, all->p->rows);
    if (all->tokens <= TOKENS_OF_TILE) {
        multiply_streams(all, first, last);
        return;
    }
    floats kept[ROWS_OF_PANEL * MOST_FEW + 3]; /* of all tiles of a panel, if it takes several runs of steps */
    for (long panel = first, bottom; panel < last; panel = bottom) {
        bottom = least(panel + ROWS_OF_PANEL, last);
        for (long begin = 0, end; begin < all->steps; begin = end) {
            floats *sums = kept;
            end = least(begin + all->steps_at_once, all->steps);
            for (long tile = 0; tile < tiles; tile++) {
                const long token = all->tokens * tile / tiles;
                const int tokens = (int)(all->tokens * (tile + 1) / tiles - token);
                for (long row = panel; row < bottom;) {
                    const int tall = bottom - row >= few_rows[tokens], rows = tall ? few_rows[tokens] : 1;
                    few_function *function = (tall ? few_tiles : row_tiles)[dtype][tokens];
                    add_steps(all, function, row, rows, 1, token, begin, end, sums);
                    if (end == all->steps) finish_tile(all, row, rows, 1, token, tokens, sums);
                    if (all->steps_at_once < all->steps) sums += rows * tokens;
                    row += rows;
                }
            }
        }
    }
}

/* ---- many tokens: panel by panel */

typedef void panel_function(int fresh, const float *w, const float *x, long x_stride, long steps, floats *sums);

#define PANEL_ROWS 4
#define PANEL_STRIDE (STEPS_OF_PANEL * STEP + 16) /* or the rows would compete for the same places of the cache */
#if LANES == 16 || defined(__aarch64__)
#define PANEL_TOKENS 6
#define EACH_PANEL(macro) macro(4, 1) macro(4, 2) macro(4, 3) macro(4, 4) macro(4, 5) macro(4, 6)
#else
#define PANEL_TOKENS 3
#define EACH_PANEL(macro) macro(4, 1) macro(4, 2) macro(4, 3)
#endif

#define PANEL(rows, tokens)                                                                                          \
    static void panel_##tokens(int fresh, const float *w, const float *x, long x_stride, long steps, floats *sums) { \
        add_tile(FLOAT32, rows, tokens, 0, fresh, (const char *)w, PANEL_STRIDE * sizeof(float), x, x_stride, steps, \
                 sums);                                                                                              \
    }
EACH_PANEL(PANEL)
#define PANEL_NAME(rows, tokens) [tokens] = panel_##tokens,
static panel_function *const panel_tiles[PANEL_TOKENS + 1] = {EACH_PANEL(PANEL_NAME)};

/* Columns `begin` to `end` (in steps) of a panel; zeros where the matrix ends. */
static void widen_panel(const linear_args *p, long first, long rows, long begin, long end, float *panel) {
    const long bytes = bytes_of((int)p->dtype), width = least(end * STEP, p->width) - begin * STEP;
    for (long row = 0; row < ROWS_OF_PANEL; row++) {
        float *to = panel + row * PANEL_STRIDE;
        if (row < rows) {
            widen_vector((int)p->dtype, width, 1.0f, p->w + ((first + row) * p->width + begin * STEP) * bytes, to);
        } else {
            memset(to, 0, (size_t)((end - begin) * STEP) * sizeof *to);
        }
    }
}

static void multiply_panel(void *work, long part) {
    const run *all = work;
    const linear_args *p = all->p;
    const long first = part * ROWS_OF_PANEL, rows = least(ROWS_OF_PANEL, p->rows - first), x_stride = all->steps * STEP;
    float panel[ROWS_OF_PANEL * PANEL_STRIDE] __attribute__((aligned(64)));
    floats kept[ROWS_OF_PANEL * TOKENS_AT_ONCE];
    for (long begin = 0, end; begin < all->steps; begin = end) {
        end = least(begin + all->steps_at_once, all->steps);
        widen_panel(p, first, rows, begin, end, panel);
        floats *sums = kept;
        for (long row = 0; row < rows; row += PANEL_ROWS) {
            for (long token = 0, tokens; token < all->tokens; token += tokens, sums += PANEL_ROWS * tokens) {
                tokens = least(PANEL_TOKENS, all->tokens - token);
                panel_tiles[tokens](!begin, panel + row * PANEL_STRIDE, all->wide + token * x_stride + begin * STEP,
                                    x_stride, end - begin, sums);
                if (end == all->steps)
                    finish_tile(all, first + row, (int)least(PANEL_ROWS, rows - row), 1, token, (int)tokens, sums);
            }
        }
    }
}

static void widen_part(void *work, long token) {
    const run *all = work;
    const linear_args *p = all->p;
    const char *from = all->x + token * p->width * bytes_of((int)p->dtype);
    widen_vector((int)p->dtype, p->width, 1.0f, from, all->wide + token * all->steps * STEP);
}

static long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

/* How the rows are cut into parts, and those into panels and runs of steps. */
static void plan_parts(run *all) {
    const linear_args *p = all->p;
    const int bytes = bytes_of((int)p->dtype);
    all->rows_of_part = ROWS_OF_PANEL;
    all->steps_at_once = all->steps;
    if (p->tokens > MOST_FEW) {
        const long runs = (all->steps + STEPS_OF_PANEL - 1) / STEPS_OF_PANEL;
        all->steps_at_once = (all->steps + runs - 1) / runs;
    } else if (p->tokens <= TOKENS_OF_TILE) {
        all->rows_of_part = round_up(BYTES_OF_PART / (p->width * bytes) + 1, ROWS_OF_PANEL);
    } else {
        all->steps_at_once = BYTES_OF_TILE / (STEP * (TOKENS_OF_TILE * (long)sizeof(float) + 2 * bytes));
    }
}

/* 0, or 1 if there is no memory. */
int lockstep_linear(const linear_args *p) {
    const long bytes = bytes_of((int)p->dtype), out_bytes = bytes_of((int)p->out_dtype);
    run all = {.p = p, .steps = steps_of(p->width)};
    float own[16384] __attribute__((aligned(64)));
    const long needed = round_up(least(p->tokens, TOKENS_AT_ONCE) * all.steps * STEP, 16);
    const int fits = needed <= (long)(sizeof own / sizeof *own);
    float *lent = fits ? NULL : aligned_alloc(64, (size_t)needed * sizeof *lent);
    if (!fits && !lent) return 1;
    all.wide = fits ? own : lent;
    plan_parts(&all);
    const long parts = (p->rows + all.rows_of_part - 1) / all.rows_of_part;
    for (long token = 0; token < p->tokens; token += TOKENS_AT_ONCE) {
        all.tokens = least(p->tokens - token, TOKENS_AT_ONCE);
        all.x = p->x + token * p->width * bytes;
        all.out = p->out + token * p->rows * out_bytes;
        (all.tokens * p->width < WIDEN_ALONE ? run_alone : parallel)(widen_part, &all, all.tokens);
        parallel(p->tokens <= MOST_FEW ? multiply_few : multiply_panel, &all, parts);
    }
    free(lent);
    return 0;
}
