/* out = x w^T + bias for a linear layer on a CPU: any number of tokens, weights in the layout of the checkpoint.
 *
 * Batch invariance: an output element is the product of one row of w and one token, summed in the same order whatever is
 * computed beside it: LANES sums, each over the parts of the steps in the order of the row, then sum_lanes4. The tile
 * shape, the partition into tasks and the thread change nothing, so the bits of a token's result depend neither on the
 * other tokens nor on the number of threads.
 *
 * With up to TILE_TOKENS tokens the time is that of reading w, so w is read once, in a few long streams, and converted in
 * registers. With up to MAX_FEW_TOKENS, a panel of rows is multiplied with all tokens while it is in the L1 cache; with
 * more, the panel is converted to fp32 first. x is always converted first, to what tiles.h calls a vector.
 */
#include "pool.h"
#include "shared_struct.h"
#include "tiles.h"

#include <stdlib.h>

#define MAX_FEW_TOKENS 32     /* tokens; with more, panels are converted first */
#define BYTES_PER_TASK 98304  /* of w, with one tile of tokens */
#define BYTES_PER_TILE 32768  /* of w and x, with several tiles: fits the L1 cache */
#define MAX_TOKENS_PER_RUN 96 /* a longer batch is split into runs of this size, each of which reads w again */
#define PANEL_HEIGHT 24
#define PANEL_WIDTH 640 /* columns: fits the caches, and a row of 576 is one pass */
#define PANEL_STEPS (PANEL_WIDTH / STEP)
#define SERIAL_BELOW 65536 /* elements of x; with fewer, one thread is faster */

/* Packed by cpu_linear.py. */
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
    float *x_f32; /* [tokens, steps * STEP], the tokens as vectors */
    long tokens, steps, rows_per_task, steps_per_pass;
} batch_run;

/* Reduces the sums of a tile, adds the bias and stores the tile; its rows are `row_stride` rows apart. */
static void store_tile(const batch_run *run, long row, int rows, long row_stride, long token, int tokens,
                       const vec_f32 *sums) {
    const linear_args *p = run->p;
    const int out_dtype = (int)p->out_dtype;
    const long number = dtype_size(out_dtype);
    float bias[MAX_ROWS] = {0};
    if (p->bias)
        for (int r = 0; r < rows; r++) bias[r] = load_scalar((int)p->dtype, p->bias, row + r * row_stride);
    if (rows == 4 && row_stride == 1) { /* Adjacent in the result: four at a time. */
        for (int t = 0; t < tokens; t++) {
            float summed[4];
            sum_lanes4_strided(sums + t, tokens, summed);
            if (p->bias)
                for (int r = 0; r < 4; r++) summed[r] += bias[r];
            store4(out_dtype, summed, run->out + ((token + t) * p->rows + row) * number);
        }
        return;
    }
    float summed[MAX_SUMS];
    for (int i = 0; i < rows * tokens; i += 4) sum_lanes4(sums + i, summed + i);
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < tokens; t++) {
            const float sum = summed[r * tokens + t];
            store_scalar(out_dtype, run->out, (token + t) * p->rows + row + r * row_stride,
                         p->bias ? sum + bias[r] : sum);
        }
    }
}

/* ---- few tokens: one pass over w, converted in registers */

typedef void few_function(int fresh, const char *w, long w_bytes, const float *x, long x_stride, long steps,
                          vec_f32 *sums);

#define FEW(dtype, rows, tokens)                                                                                       \
    static void few_##dtype##_##rows##_##tokens(int fresh, const char *w, long w_bytes, const float *x, long x_stride, \
                                                long steps, vec_f32 *sums) {                                           \
        add_tile(dtype, rows, tokens, 1, fresh, w, w_bytes, x, x_stride, steps, sums);                                 \
    }
#define FEW_OF(rows, tokens) FEW(0, rows, tokens) FEW(1, rows, tokens) FEW(2, rows, tokens)

/* As many sums as fit the registers; with one token, as many as saturate the memory. */
#if LANES == 16 || defined(__aarch64__)
#define EACH_FEW(macro) macro(4, 1) macro(8, 2) macro(6, 3) macro(4, 4)
#else
#define EACH_FEW(macro) macro(4, 1) macro(4, 2) macro(3, 3) macro(2, 4)
#endif
#define TILE_TOKENS 4
#define EACH_ROW(macro) macro(1, 1) macro(1, 2) macro(1, 3) macro(1, 4)
EACH_FEW(FEW_OF)
EACH_ROW(FEW_OF)

#define ROWS_OF(rows, tokens) [tokens] = rows,
static const int few_rows[TILE_TOKENS + 1] = {EACH_FEW(ROWS_OF)};
#define NAMES_OF(rows, tokens)                                                                                         \
    [0][tokens] = few_0_##rows##_##tokens, [1][tokens] = few_1_##rows##_##tokens, [2][tokens] = few_2_##rows##_##tokens,
static few_function *const few_tiles[3][TILE_TOKENS + 1] = {EACH_FEW(NAMES_OF)};
static few_function *const row_tiles[3][TILE_TOKENS + 1] = {EACH_ROW(NAMES_OF)};

/* Accumulates steps `begin` to `end` of a tile; the last step of a row is padded with zeros. */
static void add_steps(const batch_run *run, few_function *tile, long row, int rows, long row_stride, long token,
                      long begin, long end, vec_f32 *sums) {
    const linear_args *p = run->p;
    const long number = dtype_size((int)p->dtype), whole = p->width / STEP, x_stride = run->steps * STEP;
    const long w_bytes = row_stride * p->width * number;
    const char *w = p->w + row * p->width * number;
    const float *x = run->x_f32 + token * x_stride;
    tile(!begin, w + begin * STEP * number, w_bytes, x + begin * STEP, x_stride, min_long(end, whole) - begin, sums);
    if (end > whole) {
        char padded[MAX_ROWS][STEP * sizeof(float)] = {{0}};
        for (int r = 0; r < rows; r++)
            memcpy(padded[r], w + r * w_bytes + whole * STEP * number, (size_t)((p->width - whole * STEP) * number));
        tile(0, padded[0], sizeof padded[0], x + whole * STEP, x_stride, 1, sums);
    }
}

/* One task with one tile of tokens, bound by memory bandwidth. The rows of a tile are as far apart as possible, so that
 * each continues where it ended in the tile before: hardware prefetchers follow a few long streams, faster than software
 * prefetch, but not many short ones. */
static void multiply_streams(const batch_run *run, long first, long last) {
    const int dtype = (int)run->p->dtype, tokens = (int)run->tokens, rows = few_rows[tokens];
    const long row_stride = (last - first) / rows;
    vec_f32 sums[MAX_SUMS];
    for (long row = first; row < first + row_stride; row++) {
        add_steps(run, few_tiles[dtype][tokens], row, rows, row_stride, 0, 0, run->steps, sums);
        store_tile(run, row, rows, row_stride, 0, tokens, sums);
    }
    for (long row = first + rows * row_stride; row < last; row++) {
        add_steps(run, row_tiles[dtype][tokens], row, 1, 1, 0, 0, run->steps, sums);
        store_tile(run, row, 1, 1, 0, tokens, sums);
    }
}

/* One task: panels of rows, each multiplied with all tokens while it is in the L1 cache. */
static void multiply_few(void *work, long task) {
    const batch_run *run = work;
    const int dtype = (int)run->p->dtype;
    const long tiles = (run->tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    const long first = task * run->rows_per_task, last = min_long(first + run->rows_per_task, run->p->rows);
    if (run->tokens <= TILE_TOKENS) {
        multiply_streams(run, first, last);
        return;
    }
    vec_f32 partial_sums[PANEL_HEIGHT * MAX_FEW_TOKENS + 3]; /* of all tiles of a panel that takes several passes */
    for (long panel = first, bottom; panel < last; panel = bottom) {
        bottom = min_long(panel + PANEL_HEIGHT, last);
        for (long begin = 0, end; begin < run->steps; begin = end) {
            vec_f32 *sums = partial_sums;
            end = min_long(begin + run->steps_per_pass, run->steps);
            for (long tile = 0; tile < tiles; tile++) {
                const long token = run->tokens * tile / tiles;
                const int tokens = (int)(run->tokens * (tile + 1) / tiles - token);
                for (long row = panel; row < bottom;) {
                    const int full_tile = bottom - row >= few_rows[tokens], rows = full_tile ? few_rows[tokens] : 1;
                    few_function *function = (full_tile ? few_tiles : row_tiles)[dtype][tokens];
                    add_steps(run, function, row, rows, 1, token, begin, end, sums);
                    if (end == run->steps) store_tile(run, row, rows, 1, token, tokens, sums);
                    if (run->steps_per_pass < run->steps) sums += rows * tokens;
                    row += rows;
                }
            }
        }
    }
}

/* ---- many tokens: panel by panel */

typedef void panel_function(int fresh, const float *w, const float *x, long x_stride, long steps, vec_f32 *sums);

#define PANEL_ROWS 4
#define PANEL_STRIDE (PANEL_STEPS * STEP + 16) /* padded: rows at a power of two would share cache sets */
#if LANES == 16 || defined(__aarch64__)
#define PANEL_TOKENS 6
#define EACH_PANEL(macro) macro(4, 1) macro(4, 2) macro(4, 3) macro(4, 4) macro(4, 5) macro(4, 6)
#else
#define PANEL_TOKENS 3
#define EACH_PANEL(macro) macro(4, 1) macro(4, 2) macro(4, 3)
#endif

#define PANEL(rows, tokens)                                                                                            \
    static void panel_##tokens(int fresh, const float *w, const float *x, long x_stride, long steps, vec_f32 *sums) {  \
        add_tile(FLOAT32, rows, tokens, 0, fresh, (const char *)w, PANEL_STRIDE * sizeof(float), x, x_stride, steps,   \
                 sums);                                                                                                \
    }
EACH_PANEL(PANEL)
#define PANEL_NAME(rows, tokens) [tokens] = panel_##tokens,
static panel_function *const panel_tiles[PANEL_TOKENS + 1] = {EACH_PANEL(PANEL_NAME)};

/* Converts columns `begin` to `end` (in steps) of a panel; zeros beyond the matrix. */
static void convert_panel(const linear_args *p, long first, long rows, long begin, long end, float *panel) {
    const long bytes = dtype_size((int)p->dtype), width = min_long(end * STEP, p->width) - begin * STEP;
    for (long row = 0; row < PANEL_HEIGHT; row++) {
        float *to = panel + row * PANEL_STRIDE;
        if (row < rows) {
            convert_vector((int)p->dtype, width, 1.0f, p->w + ((first + row) * p->width + begin * STEP) * bytes, to);
        } else {
            memset(to, 0, (size_t)((end - begin) * STEP) * sizeof *to);
        }
    }
}

static void multiply_panel(void *work, long task) {
    const batch_run *run = work;
    const linear_args *p = run->p;
    const long first = task * PANEL_HEIGHT, rows = min_long(PANEL_HEIGHT, p->rows - first),
               x_stride = run->steps * STEP;
    float panel[PANEL_HEIGHT * PANEL_STRIDE] __attribute__((aligned(64)));
    vec_f32 partial_sums[PANEL_HEIGHT * MAX_TOKENS_PER_RUN];
    for (long begin = 0, end; begin < run->steps; begin = end) {
        end = min_long(begin + run->steps_per_pass, run->steps);
        convert_panel(p, first, rows, begin, end, panel);
        vec_f32 *sums = partial_sums;
        for (long row = 0; row < rows; row += PANEL_ROWS) {
            for (long token = 0, tokens; token < run->tokens; token += tokens, sums += PANEL_ROWS * tokens) {
                tokens = min_long(PANEL_TOKENS, run->tokens - token);
                panel_tiles[tokens](!begin, panel + row * PANEL_STRIDE, run->x_f32 + token * x_stride + begin * STEP,
                                    x_stride, end - begin, sums);
                if (end == run->steps)
                    store_tile(run, first + row, (int)min_long(PANEL_ROWS, rows - row), 1, token, (int)tokens, sums);
            }
        }
    }
}

static void convert_token(void *work, long token) {
    const batch_run *run = work;
    const linear_args *p = run->p;
    const char *from = run->x + token * p->width * dtype_size((int)p->dtype);
    convert_vector((int)p->dtype, p->width, 1.0f, from, run->x_f32 + token * run->steps * STEP);
}

static long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

/* Chooses the rows of a task and the steps of a pass. */
static void plan_tasks(batch_run *run) {
    const linear_args *p = run->p;
    const int bytes = dtype_size((int)p->dtype);
    run->rows_per_task = PANEL_HEIGHT;
    run->steps_per_pass = run->steps;
    if (p->tokens > MAX_FEW_TOKENS) {
        const long runs = (run->steps + PANEL_STEPS - 1) / PANEL_STEPS;
        run->steps_per_pass = (run->steps + runs - 1) / runs;
    } else if (p->tokens <= TILE_TOKENS) {
        run->rows_per_task = round_up(BYTES_PER_TASK / (p->width * bytes) + 1, PANEL_HEIGHT);
    } else {
        run->steps_per_pass = BYTES_PER_TILE / (STEP * (TILE_TOKENS * (long)sizeof(float) + 2 * bytes));
    }
}

/* Returns 0, or 1 if out of memory. */
int lockstep_linear(const linear_args *p) {
    const long bytes = dtype_size((int)p->dtype), out_bytes = dtype_size((int)p->out_dtype);
    batch_run run = {.p = p, .steps = steps_of(p->width)};
    float stack_buffer[16384] __attribute__((aligned(64)));
    const long needed = round_up(min_long(p->tokens, MAX_TOKENS_PER_RUN) * run.steps * STEP, 16);
    const int fits = needed <= (long)(sizeof stack_buffer / sizeof *stack_buffer);
    float *heap_buffer = fits ? NULL : aligned_alloc(64, (size_t)needed * sizeof *heap_buffer);
    if (!fits && !heap_buffer) return 1;
    run.x_f32 = fits ? stack_buffer : heap_buffer;
    plan_tasks(&run);
    const long tasks = (p->rows + run.rows_per_task - 1) / run.rows_per_task;
    for (long token = 0; token < p->tokens; token += MAX_TOKENS_PER_RUN) {
        run.tokens = min_long(p->tokens - token, MAX_TOKENS_PER_RUN);
        run.x = p->x + token * p->width * bytes;
        run.out = p->out + token * p->rows * out_bytes;
        (run.tokens * p->width < SERIAL_BELOW ? run_serial : parallel_for)(convert_token, &run, run.tokens);
        parallel_for(p->tokens <= MAX_FEW_TOKENS ? multiply_few : multiply_panel, &run, tasks);
    }
    free(heap_buffer);
    return 0;
}
