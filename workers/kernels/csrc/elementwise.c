/* The elementwise ops of a decoder on a CPU: RMS norm, rotary embedding, gated activation. Each is one pass over a token
 * where PyTorch makes several. Results are rounded to the dtype where the PyTorch reference rounds.
 */
#include "pool.h"
#include "shared_struct.h"
#include "tiles.h"

#include <math.h>

#define SERIAL_BELOW 32768 /* elements; with fewer, one thread is faster */

/* The structs are packed by the files of workers/kernels/ops. Strides are in elements; the last dimension is dense. */

/* ---- RMS norm, alone or after a residual addition */

typedef struct {
    const char *x, *residual, *weight; /* [tokens, heads, width]; dense [tokens, width] or NULL; [width] */
    char *out, *stream;                /* dense, like x; x + residual, where there is a residual */
    int64_t tokens, heads, width, token_stride, head_stride, dtype;
    double eps;
} norm_args;

EXPORT_SIZE(norm_args);
_Static_assert(sizeof(norm_args) == 12 * 8, "as packed in Python");

INLINE void normalize(const norm_args *n, int dtype, const char *x, const char *residual, char *out, char *stream) {
    const long steps = steps_of(n->width), padded = steps * STEP, bytes = dtype_size(dtype);
    const long last = (n->width - 1) % STEP + 1; /* elements of the last step */
    float row[padded], other[padded];
    char rounded[STEP * sizeof(float)];
    vec_f32 squares[4] = {0};
    convert_vector(dtype, n->width, 1.0f, x, row);
    if (residual) convert_vector(dtype, n->width, 1.0f, residual, other);
    for (long at = 0; at < padded; at += LANES) {
        vec_f32 value = load_f32(row + at);
        if (residual) {
            value = round_to_dtype(dtype, value + load_f32(other + at));
            store_f32(row + at, value);
        }
        squares[0] = multiply_add(value, value, squares[0]);
    }
    float sum[4];
    sum_lanes4(squares, sum);
    const vec_f32 scale = broadcast(1.0f / sqrtf(sum[0] / (float)n->width + (float)n->eps));
    convert_vector(dtype, n->width, 1.0f, n->weight, other);
    for (long step = 0; step < steps; step++) {
        vec_f32 half[2];
        const float *from = row + step * STEP, *weight = other + step * STEP;
        const size_t count = (size_t)((step == steps - 1 ? last : STEP) * bytes);
        for (int i = 0; i < 2; i++)
            half[i] = round_to_dtype(dtype, load_f32(from + i * LANES) * scale) * load_f32(weight + i * LANES);
        store_parts(dtype, half[0], half[1], rounded);
        memcpy(out + step * STEP * bytes, rounded, count);
        if (!residual) continue;
        store_parts(dtype, load_f32(from), load_f32(from + LANES), rounded);
        memcpy(stream + step * STEP * bytes, rounded, count);
    }
}

static void normalize_token(void *work, long token) {
    const norm_args *n = work;
    const long bytes = dtype_size((int)n->dtype);
    for (long head = 0; head < n->heads; head++) {
        const char *x = n->x + (token * n->token_stride + head * n->head_stride) * bytes;
        const long at = (token * n->heads + head) * n->width * bytes;
        const char *residual = n->residual ? n->residual + at : NULL;
        char *stream = n->residual ? n->stream + at : NULL;
        if (n->dtype == FLOAT32) normalize(n, FLOAT32, x, residual, n->out + at, stream);
        if (n->dtype == BFLOAT16) normalize(n, BFLOAT16, x, residual, n->out + at, stream);
        if (n->dtype == FLOAT16) normalize(n, FLOAT16, x, residual, n->out + at, stream);
    }
}

void lockstep_rms_norm(norm_args *n) {
    (n->tokens * n->heads * n->width < SERIAL_BELOW ? run_serial : parallel_for)(normalize_token, n, n->tokens);
}

/* ---- rotary embedding */

typedef struct {
    const char *query, *key, *cos, *sin; /* [tokens, heads, 2 * half], [tokens, kv_heads, ...], twice [tokens, half] */
    char *query_out, *key_out;           /* dense */
    int64_t tokens, heads, kv_heads, half, dtype;
    int64_t query_token, query_head, key_token, key_head, cos_token, sin_token;
} rotary_args;

EXPORT_SIZE(rotary_args);
_Static_assert(sizeof(rotary_args) == 17 * 8, "as packed in Python");

INLINE float rounded_to(int dtype, float value) {
    if (dtype == BFLOAT16) return bf16_to_float(float_to_bf16(value));
    if (dtype == FLOAT16) return fp16_to_float(float_to_fp16(value));
    return value;
}

INLINE void rotate_head(int dtype, long half, const char *x, const char *cos, const char *sin, char *out) {
    for (long i = 0; i < half; i++) {
        const float first = load_scalar(dtype, x, i), second = load_scalar(dtype, x, half + i);
        const float c = load_scalar(dtype, cos, i), s = load_scalar(dtype, sin, i);
        store_scalar(dtype, out, i, rounded_to(dtype, first * c) - rounded_to(dtype, second * s));
        store_scalar(dtype, out, half + i, rounded_to(dtype, second * c) + rounded_to(dtype, first * s));
    }
}

INLINE void rotate_heads(const rotary_args *r, int dtype, long token) {
    const long bytes = dtype_size(dtype);
    const char *cos = r->cos + token * r->cos_token * bytes, *sin = r->sin + token * r->sin_token * bytes;
    for (long h = 0; h < r->heads; h++)
        rotate_head(dtype, r->half, r->query + (token * r->query_token + h * r->query_head) * bytes, cos, sin,
                    r->query_out + (token * r->heads + h) * 2 * r->half * bytes);
    for (long h = 0; h < r->kv_heads; h++)
        rotate_head(dtype, r->half, r->key + (token * r->key_token + h * r->key_head) * bytes, cos, sin,
                    r->key_out + (token * r->kv_heads + h) * 2 * r->half * bytes);
}

static void rotate_token(void *work, long token) {
    const rotary_args *r = work;
    if (r->dtype == FLOAT32) rotate_heads(r, FLOAT32, token);
    if (r->dtype == BFLOAT16) rotate_heads(r, BFLOAT16, token);
    if (r->dtype == FLOAT16) rotate_heads(r, FLOAT16, token);
}

void lockstep_rotary_embedding(rotary_args *r) {
    const int serial = r->tokens * (r->heads + r->kv_heads) * r->half < SERIAL_BELOW;
    (serial ? run_serial : parallel_for)(rotate_token, r, r->tokens);
}

/* ---- silu(first half) * second half */

typedef struct {
    const char *x; /* dense [tokens, 2 * width] */
    char *out;     /* dense [tokens, width] */
    int64_t tokens, width, dtype;
} activation_args;

EXPORT_SIZE(activation_args);
_Static_assert(sizeof(activation_args) == 5 * 8, "as packed in Python");

/* x / (1 + e^-x); does not overflow for large -x. */
INLINE vec_f32 silu(vec_f32 x) {
    const vec_u32 negative = (vec_u32)(x < broadcast(0));
    const vec_f32 e = vec_exp((vec_f32)((vec_u32)x | 0x80000000u));
    return blend(negative, x * e, x) / (1.0f + e);
}

INLINE void activate(const activation_args *a, int dtype, const char *gate, const char *up, char *out) {
    const long bytes = dtype_size(dtype), pair = STEP * bytes;
    for (long at = 0; at < a->width; at += STEP, gate += pair, up += pair, out += pair) {
        char rest[3][STEP * sizeof(float)] = {{0}};
        const int whole = at + STEP <= a->width;
        const size_t count = (size_t)((whole ? STEP : a->width - at) * bytes);
        const char *gates = whole ? gate : memcpy(rest[0], gate, count), *ups = whole ? up : memcpy(rest[1], up, count);
        vec_f32 half[2];
        for (int i = 0; i < 2; i++)
            half[i] = round_to_dtype(dtype, silu(load_part(dtype, i, gates))) * load_part(dtype, i, ups);
        store_parts(dtype, half[0], half[1], whole ? out : rest[2]);
        if (!whole) memcpy(out, rest[2], count);
    }
}

static void activate_token(void *work, long token) {
    const activation_args *a = work;
    const long row = a->width * dtype_size((int)a->dtype);
    const char *gate = a->x + token * 2 * row;
    char *out = a->out + token * row;
    if (a->dtype == FLOAT32) activate(a, FLOAT32, gate, gate + row, out);
    if (a->dtype == BFLOAT16) activate(a, BFLOAT16, gate, gate + row, out);
    if (a->dtype == FLOAT16) activate(a, FLOAT16, gate, gate + row, out);
}

void lockstep_silu_and_mul(activation_args *a) {
    (a->tokens * a->width < SERIAL_BELOW ? run_serial : parallel_for)(activate_token, a, a->tokens);
}
