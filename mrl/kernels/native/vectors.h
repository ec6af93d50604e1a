// Vectors of as many floats as the processor's have (of wider ones compilers keep some in memory), and what the kernels
// do with them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#if WIDTH == 16
static const Integers LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif WIDTH == 8
static const Integers LANES = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const Integers LANES = {0, 1, 2, 3};
#endif

INLINE Floats load(const float *from) { return *(const Floats *)from; }
INLINE void store(float *to, Floats x) { *(Floats *)to = x; }
// The same of the first `count`, where there are fewer than WIDTH; zeros behind them
INLINE Floats load_some(const float *from, int64_t count) {
    if (count >= WIDTH) return load(from);
    Floats found = {0};
    memcpy(&found, from, count * sizeof(float));
    return found;
}
INLINE void store_some(float *to, Floats x, int64_t count) {
    if (count >= WIDTH)
        store(to, x);
    else
        memcpy(to, &x, count * sizeof(float));
}

INLINE int64_t whole(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

INLINE Floats all(float x) { return (Floats){0} + x; }
INLINE Integers choose_integers(Integers where, Integers yes, Integers no) { return (yes & where) | (no & ~where); }
INLINE Floats choose(Integers where, Floats yes, Floats no) {
    return (Floats)choose_integers(where, (Integers)yes, (Integers)no);
}
#if defined(__AVX512F__)
#define IN_ONE(what, a, b) ((Floats)_mm512_##what##_ps((__m512)(a), (__m512)(b)))
#elif defined(__AVX__)
#define IN_ONE(what, a, b) ((Floats)_mm256_##what##_ps((__m256)(a), (__m256)(b)))
#elif defined(__SSE__)
#define IN_ONE(what, a, b) ((Floats)_mm_##what##_ps((__m128)(a), (__m128)(b)))
#endif
#ifdef IN_ONE  // an instruction each, to the same bits
INLINE Floats larger(Floats a, Floats b) { return IN_ONE(max, a, b); }
INLINE Floats smaller(Floats a, Floats b) { return IN_ONE(min, a, b); }
#else
INLINE Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
INLINE Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }
#endif

#ifdef __clang__
#define LANES_OF(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define LANES_OF(x, ...) __builtin_shuffle(x, (Integers){__VA_ARGS__})
#endif
// Each lane's value in the lane so many places away, up or down: by one bit of its number
#if WIDTH == 16
#define FAR_8(x) LANES_OF(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FAR_4(x) LANES_OF(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define FAR_2(x) LANES_OF(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define FAR_1(x) LANES_OF(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define FOR_BITS(what) what(8) what(4) what(2) what(1)
#elif WIDTH == 8
#define FAR_4(x) LANES_OF(x, 4, 5, 6, 7, 0, 1, 2, 3)
#define FAR_2(x) LANES_OF(x, 2, 3, 0, 1, 6, 7, 4, 5)
#define FAR_1(x) LANES_OF(x, 1, 0, 3, 2, 5, 4, 7, 6)
#define FOR_BITS(what) what(4) what(2) what(1)
#else
#define FAR_2(x) LANES_OF(x, 2, 3, 0, 1)
#define FAR_1(x) LANES_OF(x, 1, 0, 3, 2)
#define FOR_BITS(what) what(2) what(1)
#endif

INLINE float sum_of(Floats x) {
#define ADD(bit) x += FAR_##bit(x);
    FOR_BITS(ADD)
#undef ADD
    return x[0];
}

INLINE float largest_of(Floats x) {
#define TAKE(bit) x = larger(x, FAR_##bit(x));
    FOR_BITS(TAKE)
#undef TAKE
    return x[0];
}

// All ones where a byte of the mask is not 0; zeros behind the first `count`
INLINE Integers shown(const uint8_t *mask, int64_t count) {
    Bytes bytes = {0};
    if (count >= WIDTH)
        bytes = *(const Bytes *)mask;
    else
        memcpy(&bytes, mask, count);
    return __builtin_convertvector(bytes, Integers) != 0;
}
INLINE Floats only(Integers where, Floats x) { return (Floats)((Integers)x & where); }
INLINE int any(Integers where) { return sum_of(only(where, all(1.0f))) != 0; }

// e^x to 2 units in the last place, for x from -87 to 88, and NaN of NaN
INLINE Floats exponential_near(Floats x) {
    const float shift = 12583039.0f;  // 1.5 * 2^23 + 127: the last bits of what is added to it are its rounded exponent
    Floats shifted = x * 1.44269504088896341f + shift, power = shifted - shift;
    Floats rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    Floats sum = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (Floats)((Integers)shifted << 23);
}

// The same for any x: 0 below -87, at most e^88
INLINE Floats exponential(Floats x) {
    return only(~(x < -87.0f), exponential_near(smaller(all(88.0f), larger(all(-87.0f), x))));
}

// Scores of `keys` keys, -infinity up to a whole vector, become e^(score * scale - top), with the largest of them and of
// `sink` as `top`. The inverse of their sum, the sink's own with them; 0 where nothing is seen
INLINE float weigh(float *scores, int64_t keys, float scale, float sink, float *top) {
    Floats most = all(-INFINITY), sum = {0};
    for (int64_t j = 0; j < keys; j += WIDTH) most = larger(most, load(scores + j));
    float largest = fmaxf(largest_of(most) * scale, sink);
    *top = largest == -INFINITY ? 0.0f : largest;
    for (int64_t j = 0; j < keys; j += WIDTH) {
        Floats weight = exponential(load(scores + j) * scale - *top);
        sum += weight;
        store(scores + j, weight);
    }
    float total = sum_of(sum) + expf(sink - *top);
    return total == 0.0f ? 0.0f : 1.0f / total;
}
