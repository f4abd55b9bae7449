/* Dtypes, SIMD vectors of the target CPU's width, and reductions in one fixed order.
 *
 * The vector types are the GCC extension that clang shares: LANES floats that the compiler maps to registers. A vector
 * expression is the same sequence of operations for every element, wherever the compiler places it, so a result depends
 * on the vector width of the target but not on how many elements are computed together.
 */
#ifndef LOCKSTEP_NUMBERS_H
#define LOCKSTEP_NUMBERS_H

#include "half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of 16-bit numbers are taken apart by shifts");

/* DTYPE_CODES of bindings.py. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

static inline long min_long(long a, long b) { return a < b ? a : b; }

static inline long max_long(long a, long b) { return a > b ? a : b; }

typedef float vec_f32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_u32 __attribute__((vector_size(4 * LANES)));
typedef vec_f32 vec_f32_unaligned __attribute__((aligned(1), may_alias));
typedef vec_u32 vec_u32_unaligned __attribute__((aligned(1), may_alias));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x4 __attribute__((vector_size(8)));

INLINE vec_f32 load_f32(const void *from) { return *(const vec_f32_unaligned *)from; }

INLINE void store_f32(void *to, vec_f32 value) { *(vec_f32_unaligned *)to = value; }

/* a * b + c, rounded once where the target has FMA. Explicit, because a compiler that may contract fuses in one loop and
 * not in another; the sources are compiled with -ffp-contract=off. */
INLINE vec_f32 multiply_add(vec_f32 a, vec_f32 b, vec_f32 c) {
#if defined(__AVX512F__)
    return (vec_f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec_f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec_f32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE int dtype_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE float load_scalar(int dtype, const void *from, long at) {
    if (dtype == BFLOAT16) return bf16_to_float(((const uint16_t *)from)[at]);
    if (dtype == FLOAT16) return fp16_to_float(((const uint16_t *)from)[at]);
    return ((const float *)from)[at];
}

INLINE void store_scalar(int dtype, void *to, long at, float value) {
    if (dtype == BFLOAT16) {
        ((uint16_t *)to)[at] = float_to_bf16(value);
    } else if (dtype == FLOAT16) {
        ((uint16_t *)to)[at] = float_to_fp16(value);
    } else {
        ((float *)to)[at] = value;
    }
}

/* Stores four consecutive scalars, rounded as by store_scalar. */
INLINE void store4(int dtype, const float *from, void *to) {
    if (dtype == FLOAT32) {
        memcpy(to, from, 4 * sizeof *from);
    } else if (dtype == BFLOAT16) {
        u32x4 bits;
        memcpy(&bits, from, sizeof bits);
        const u32x4 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const u32x4 is_nan = (u32x4)((bits & 0x7fffffffu) > 0x7f800000u);
        const u16x4 narrow = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), u16x4);
        memcpy(to, &narrow, sizeof narrow);
    } else {
        for (int i = 0; i < 4; i++) ((uint16_t *)to)[i] = float_to_fp16(from[i]);
    }
}

/* Loads LANES consecutive fp16 scalars. */
INLINE vec_f32 load_fp16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vec_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX__) && defined(__F16C__)
    return (vec_f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    vec_f32 value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = fp16_to_float(from[lane]);
    return value;
#endif
}

/* Loads part 0 or 1 of 2 * LANES consecutive scalars. The order depends on the dtype: of bf16, part 0 is the even scalars
 * and part 1 the odd ones, which takes one shift or mask of 32-bit lanes. Both factors of a product use the same order. */
INLINE vec_f32 load_part(int dtype, int half, const char *from) {
    if (dtype == BFLOAT16) {
        vec_u32 both = *(const vec_u32_unaligned *)from;
        return (vec_f32)(half ? both & 0xffff0000u : both << 16);
    }
    if (dtype == FLOAT16) return load_fp16((const uint16_t *)from + half * LANES);
    return load_f32(from + half * 4 * LANES);
}

/* Keeps a vector in a register. Without it compilers fold the load into every use of an operand, and a tile is then bound
 * by loads instead of products. */
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+w"(vector))
#else
#define KEEP_IN_REGISTER(vector) ((void)0)
#endif

INLINE vec_f32 broadcast(float value) { return value - (vec_f32){0}; }

INLINE vec_f32 blend(vec_u32 where, vec_f32 yes, vec_f32 no) {
    return (vec_f32)((where & (vec_u32)yes) | (~where & (vec_u32)no));
}

/* Rounds to `dtype` as store_scalar does, and converts back to fp32. */
INLINE vec_f32 round_to_dtype(int dtype, vec_f32 value) {
    if (dtype == FLOAT32) return value;
    if (dtype == BFLOAT16) {
        const vec_u32 bits = (vec_u32)value, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
        return blend((vec_u32)(value == value), (vec_f32)rounded, (vec_f32)(bits - bits + 0x7fc00000u));
    }
#if defined(__AVX512F__)
    return (vec_f32)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX__) && defined(__F16C__)
    return (vec_f32)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < LANES; lane++) value[lane] = fp16_to_float(float_to_fp16(value[lane]));
    return value;
#endif
}

/* The inverse of load_part: stores both parts as 2 * LANES consecutive scalars, rounded. */
INLINE void store_parts(int dtype, vec_f32 first, vec_f32 second, char *to) {
    if (dtype == FLOAT32) {
        store_f32(to, first);
        store_f32(to + 4 * LANES, second);
    } else if (dtype == BFLOAT16) {
        const vec_u32 even = (vec_u32)round_to_dtype(BFLOAT16, first), odd = (vec_u32)round_to_dtype(BFLOAT16, second);
        *(vec_u32_unaligned *)to = odd | even >> 16;
    } else {
        for (int lane = 0; lane < LANES; lane++) {
            ((uint16_t *)to)[lane] = float_to_fp16(first[lane]);
            ((uint16_t *)to)[LANES + lane] = float_to_fp16(second[lane]);
        }
    }
}

/* exp(x) for x <= 0, to about 1 ulp; 0 below -87; NaN for NaN. */
INLINE vec_f32 vec_exp(vec_f32 x) {
    const vec_f32 shift = broadcast(0x1.8p23f); /* adding and subtracting it rounds to integers */
    const vec_f32 shifted = multiply_add(x, broadcast(0x1.715476p0f), shift), whole = shifted - shift;
    vec_f32 rest = multiply_add(whole, broadcast(-0x1.62e4p-1f), x);
    rest = multiply_add(whole, broadcast(-0x1.7f7d1cp-20f), rest);
    vec_f32 power = broadcast(1.0f / 5040);
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
#pragma GCC unroll 8
    for (int i = 0; i < 7; i++) power = multiply_add(power, rest, broadcast(terms[i]));
    const vec_u32 exponent = ((vec_u32)shifted << 23) + (vec_u32)broadcast(1.0f);
    return blend((vec_u32)(x < broadcast(-87.0f)), broadcast(0), power * (vec_f32)exponent);
}

/* Four horizontal sums at once: into[i] is the sum of the lanes of from[i * stride]. The tree is fixed: the upper half of
 * the lanes is added to the lower half until one lane is left. */
INLINE void sum_lanes4_strided(const vec_f32 *from, long stride, float *into) {
#if defined(__AVX__)
    __m128 sum[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
        const __m512 all = (__m512)from[i * stride];
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
#else
        const __m256 half = (__m256)from[i * stride];
#endif
        sum[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    const __m128 first = _mm_add_ps(_mm_movelh_ps(sum[0], sum[1]), _mm_movehl_ps(sum[1], sum[0]));
    const __m128 last = _mm_add_ps(_mm_movelh_ps(sum[2], sum[3]), _mm_movehl_ps(sum[3], sum[2]));
    const __m128 even = _mm_shuffle_ps(first, last, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 odd = _mm_shuffle_ps(first, last, _MM_SHUFFLE(3, 1, 3, 1));
    _mm_storeu_ps(into, _mm_add_ps(even, odd));
#else
    for (int i = 0; i < 4; i++) {
        float lane[LANES];
        memcpy(lane, &from[i * stride], sizeof lane);
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lane[l] += lane[l + half];
        into[i] = lane[0];
    }
#endif
}

INLINE void sum_lanes4(const vec_f32 *from, float *into) { sum_lanes4_strided(from, 1, into); }

#endif
