// What the loss head needs of a row of logits, and their gradient, as mrl/kernels/head_rows.py describes them. Logits are
// float32 or bfloat16, rows so far apart as strides say; all else is float32 or float64, [rows].
#include "vectors.h"

#define BLOCK 2048  // columns that stay in a core's first cache

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));

// bfloat16 is the upper half of a float32
INLINE Floats widened(Halves x) { return (Floats)(__builtin_convertvector(x, Integers) << 16); }

// To the nearest, of two to the even one
INLINE Halves narrowed(Floats x) {
    Integers bits = (Integers)x, rounded = bits + 0x7FFF + (bits >> 16 & 1);
    Integers made = choose_integers(x != x, bits | 0x400000, rounded);
    return __builtin_convertvector(made >> 16, Halves);
}

INLINE Floats logits(const void *row, int is_narrow, int64_t at, int64_t words) {
    if (!is_narrow) return load_some((const float *)row + at, words - at);
    const uint16_t *from = (const uint16_t *)row + at;
    if (at + WIDTH <= words) return widened(*(const Halves *)from);
    Halves found = {0};
    memcpy(&found, from, (words - at) * sizeof *from);
    return widened(found);
}

INLINE void put(void *row, int is_narrow, int64_t at, int64_t words, Floats x) {
    if (!is_narrow) {
        store_some((float *)row + at, x, words - at);
        return;
    }
    uint16_t *to = (uint16_t *)row + at;
    Halves made = narrowed(x);
    if (at + WIDTH <= words)
        *(Halves *)to = made;
    else
        memcpy(to, &made, (words - at) * sizeof *to);
}

INLINE double total_of(Doubles x) {
    double total = 0;
    for (int i = 0; i < WIDTH; i++) total += x[i];
    return total;
}

// The same, with -infinity behind the last word
INLINE Floats bounded(const void *row, int is_narrow, int64_t at, int64_t words) {
    Floats x = logits(row, is_narrow, at, words);
    return at + WIDTH <= words ? x : choose(LANES < (int32_t)(words - at), x, all(-INFINITY));
}

INLINE void sums(const char *x, int is_narrow, int64_t stride, float scale, float *tops, double *made, int64_t rows,
                 int64_t words) {
    for (int64_t row = 0; row < rows; row++, x += stride) {
        double total = 0, weighted = 0, squares = 0;
        float top = -INFINITY;
        for (int64_t start = 0; start < words; start += BLOCK) {
            int64_t end = start + BLOCK < words ? start + BLOCK : words;
            Floats most = all(top);
            for (int64_t i = start; i < end; i += WIDTH) most = larger(bounded(x, is_narrow, i, words), most);
            float higher = largest_of(most);
            if (higher > top && total > 0) {  // what was summed below another maximum
                double down = ((double)top - higher) * scale, decay = exp(down);
                weighted = (weighted + down * total) * decay;
                total *= decay, squares *= decay * decay;
            }
            top = higher;
            Doubles sum = {0}, sum_weighted = {0}, sum_squares = {0};
            for (int64_t i = start; i < end; i += WIDTH) {
                Floats z = (bounded(x, is_narrow, i, words) - top) * scale, e = exponential(z);
                Doubles wide = __builtin_convertvector(e, Doubles);
                Floats part = only(~(z < -87.0f), z * e);
                sum += wide, sum_squares += wide * wide;
                sum_weighted += __builtin_convertvector(part, Doubles);
            }
            total += total_of(sum), weighted += total_of(sum_weighted), squares += total_of(sum_squares);
        }
        tops[row] = top;
        made[row] = total, made[rows + row] = weighted, made[2 * rows + row] = squares;
    }
}

// tops: each row's maximum; made [3, rows]: the sums of e^z, z e^z and e^2z with z = (x - top) * scale. stride in bytes
EXPORT void head_sums(const char *x, int64_t is_narrow, int64_t stride, float scale, float *tops, double *made,
                      int64_t rows, int64_t words) {
    if (is_narrow)
        sums(x, 1, stride, scale, tops, made, rows, words);
    else
        sums(x, 0, stride, scale, tops, made, rows, words);
}

INLINE void gradient(const char *x, char *out, int is_narrow, int is_narrow_out, int has_entropy, int64_t stride,
                     int64_t out_stride, float scale, const float *tops, const float *shifts, const float *entropies,
                     const float *slopes, const float *entropy_slopes, const int64_t *labels, const float *own,
                     int64_t rows, int64_t words) {
    for (int64_t row = 0; row < rows; row++, x += stride, out += out_stride) {
        int64_t label = labels[row];
        float top = tops[row], shift = shifts[row], slope = -slopes[row];
        float entropy = has_entropy ? entropies[row] : 0, steep = has_entropy ? entropy_slopes[row] : 0;
        for (int64_t i = 0; i < words; i += WIDTH) {
            Floats log_p = (logits(x, is_narrow, i, words) - top) * scale + shift, p = exponential(log_p);
            Floats made = p * slope;
            if (has_entropy) made -= p * (steep * (log_p + entropy));
            if (label >= i && label < i + WIDTH) made[label - i] += own[row];
            put(out, is_narrow_out, i, words, made);
        }
    }
}

// out, which may be x: -p * (slope + entropy_slope * (log p + entropy)), and `own` more at the label;
// log p = (x - top) * scale + shift. entropy_slopes may be NULL
EXPORT void head_gradient(const char *x, char *out, int64_t is_narrow, int64_t is_narrow_out, int64_t stride,
                          int64_t out_stride, float scale, const float *tops, const float *shifts,
                          const float *entropies, const float *slopes, const float *entropy_slopes,
                          const int64_t *labels, const float *own, int64_t rows, int64_t words) {
#define OF(NARROW, NARROW_OUT, ENTROPY)                                                                             \
    if (!is_narrow == !(NARROW) && !is_narrow_out == !(NARROW_OUT) && !entropy_slopes == !(ENTROPY))                  \
        gradient(x, out, NARROW, NARROW_OUT, ENTROPY, stride, out_stride, scale, tops, shifts, entropies, slopes,     \
                 entropy_slopes, labels, own, rows, words);
    OF(0, 0, 0) OF(0, 0, 1) OF(1, 1, 0) OF(1, 1, 1) OF(0, 1, 0) OF(0, 1, 1) OF(1, 0, 0) OF(1, 0, 1)
}
