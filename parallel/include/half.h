/* Conversions between fp32 and the 16-bit floating dtypes, rounded as torch rounds. Included by every C source that
 * reads or writes bf16 or fp16.
 */
#ifndef LOCKSTEP_HALF_H
#define LOCKSTEP_HALF_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float bf16_to_float(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* Rounds to nearest, ties to even. NaN becomes the quiet NaN 0x7fc0, as in torch. */
INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#if defined(__FLT16_MAX__)
INLINE float fp16_to_float(uint16_t half) {
    _Float16 value;
    memcpy(&value, &half, sizeof value);
    return (float)value;
}

INLINE uint16_t float_to_fp16(float value) {
    _Float16 narrow = (_Float16)value;
    uint16_t half;
    memcpy(&half, &narrow, sizeof half);
    return half;
}
#else
INLINE float fp16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 31u) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent) return from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
    float tiny = (float)fraction * 0x1p-24f; /* zero or subnormal, exactly */
    return sign ? -tiny : tiny;
}

INLINE uint16_t float_to_fp16(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to more than 65504: infinity */
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 rounds at the wanted bit, ties to even */
        return (uint16_t)(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}
#endif

#endif
