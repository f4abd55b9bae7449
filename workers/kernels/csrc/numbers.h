/* Numbers for our kernels: dtypes as torch stores them, vectors as wide as this CPU's, and sums in one fixed order.
 *
 * Vectors are GCC's extension, which clang has too: LANES floats that the compiler maps to registers. An expression of
 * them is the same chain of operations for every element, wherever the compiler puts it, so a result depends on the
 * width of this CPU's vectors but not on how many elements are computed together.
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

/* Keep in step with kernels.py. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef floats floats_anywhere __attribute__((aligned(1), may_alias));
typedef words words_anywhere __attribute__((aligned(1), may_alias));
typedef uint32_t four_words __attribute__((vector_size(16)));
typedef uint16_t four_halves __attribute__((vector_size(8)));

INLINE floats load_floats(const void *from) { return *(const floats_anywhere *)from; }

INLINE void store_floats(void *to, floats value) { *(floats_anywhere *)to = value; }

/* a * b + c, rounded once where the CPU can. Said aloud: left to itself, a compiler fuses the product and the sum in
 * one loop and not in the next. The sources are compiled with -ffp-contract=off. */
INLINE floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE int bytes_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE float load_number(int dtype, const void *from, long at) {
    if (dtype == BFLOAT16) return bf16_to_float(((const uint16_t *)from)[at]);
    if (dtype == FLOAT16) return fp16_to_float(((const uint16_t *)from)[at]);
    return ((const float *)from)[at];
}

INLINE void store_number(int dtype, void *to, long at, float value) {
    if (dtype == BFLOAT16) {
        ((uint16_t *)to)[at] = float_to_bf16(value);
    } else if (dtype == FLOAT16) {
        ((uint16_t *)to)[at] = float_to_fp16(value);
    } else {
        ((float *)to)[at] = value;
    }
}

/* Four consecutive numbers, rounded as store_number does it. */
INLINE void store_four(int dtype, const float *from, void *to) {
    if (dtype == FLOAT32) {
        memcpy(to, from, 4 * sizeof *from);
    } else if (dtype == BFLOAT16) {
        four_words bits;
        memcpy(&bits, from, sizeof bits);
        const four_words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const four_words is_nan = (four_words)((bits & 0x7fffffffu) > 0x7f800000u);
        const four_halves narrow = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0u & is_nan), four_halves);
        memcpy(to, &narrow, sizeof narrow);
    } else {
        for (int i = 0; i < 4; i++) ((uint16_t *)to)[i] = float_to_fp16(from[i]);
    }
}

/* LANES consecutive fp16 numbers. */
INLINE floats widen_fp16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX__) && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    floats value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = fp16_to_float(from[lane]);
    return value;
#endif
}

/* One half of 2 * LANES consecutive numbers, 0 or 1. What is in which half is a matter of the dtype: of bf16 the even
 * numbers, then the odd ones, because a shift or a mask of 32 bits is all that takes. Whatever is multiplied with them
 * has to be in the same order. */
INLINE floats load_half(int dtype, int half, const char *from) {
    if (dtype == BFLOAT16) {
        words both = *(const words_anywhere *)from;
        return (floats)(half ? both & 0xffff0000u : both << 16);
    }
    if (dtype == FLOAT16) return widen_fp16((const uint16_t *)from + half * LANES);
    return load_floats(from + half * 4 * LANES);
}

/* Holds a vector in a register. Compilers like to read an operand from memory again at each use, and loads, not
 * products, are then what a tile takes its time with. */
#if defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define KEEP(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define KEEP(vector) __asm__("" : "+w"(vector))
#else
#define KEEP(vector) ((void)0)
#endif

INLINE floats spread(float value) { return value - (floats){0}; }

INLINE floats choose(words where, floats yes, floats no) {
    return (floats)((where & (words)yes) | (~where & (words)no));
}

/* Rounded to `dtype`, as store_number does, and wide again. */
INLINE floats round_floats(int dtype, floats value) {
    if (dtype == FLOAT32) return value;
    if (dtype == BFLOAT16) {
        const words bits = (words)value, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
        return choose((words)(value == value), (floats)rounded, (floats)(bits - bits + 0x7fc00000u));
    }
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX__) && defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < LANES; lane++) value[lane] = fp16_to_float(float_to_fp16(value[lane]));
    return value;
#endif
}

/* The reverse of load_half: two halves, rounded to 2 * LANES consecutive numbers. */
INLINE void store_halves(int dtype, floats first, floats second, char *to) {
    if (dtype == FLOAT32) {
        store_floats(to, first);
        store_floats(to + 4 * LANES, second);
    } else if (dtype == BFLOAT16) {
        const words even = (words)round_floats(BFLOAT16, first), odd = (words)round_floats(BFLOAT16, second);
        *(words_anywhere *)to = odd | even >> 16;
    } else {
        for (int lane = 0; lane < LANES; lane++) {
            ((uint16_t *)to)[lane] = float_to_fp16(first[lane]);
            ((uint16_t *)to)[LANES + lane] = float_to_fp16(second[lane]);
        }
    }
}

/* e to the power of each x <= 0, to about 1 ulp; 0 below -87; NaN stays NaN. */
INLINE floats exponential(floats x) {
    const floats shift = spread(0x1.8p23f); /* added and taken away again, rounds to whole numbers */
    const floats shifted = multiply_add(x, spread(0x1.715476p0f), shift), whole = shifted - shift;
    floats rest = multiply_add(whole, spread(-0x1.62e4p-1f), x);
    rest = multiply_add(whole, spread(-0x1.7f7d1cp-20f), rest);
    floats power = spread(1.0f / 5040);
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
#pragma GCC unroll 8
    for (int i = 0; i < 7; i++) power = multiply_add(power, rest, spread(terms[i]));
    const words exponent = ((words)shifted << 23) + (words)spread(1.0f);
    return choose((words)(x < spread(-87.0f)), spread(0), power * (floats)exponent);
}

/* Four sums at once: into[i] is the sum of the lanes of from[i * stride]. Always the same tree: the upper half of the
 * lanes is added to the lower half until one is left. */
INLINE void sum_lanes_apart(const floats *from, long stride, float *into) {
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

INLINE void sum_lanes(const floats *from, float *into) { sum_lanes_apart(from, 1, into); }

#endif
