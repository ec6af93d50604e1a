// Elementwise parts of a transformer layer, as mrl/kernels/layers.py describes them. All tensors are float32, in rows of a
// multiple of 16 channels.
#include "vectors.h"

INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// x [rows, 2 * n] = (gate, up) -> out [rows, n]
EXPORT void swiglu(const float *restrict x, float *restrict out, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; row++, x += 2 * n, out += n)
        for (int64_t i = 0; i < n; i += WIDTH) {
            Floats gate = load(x + i);
            store(out + i, gate * sigmoid(gate) * load(x + n + i));
        }
}

EXPORT void swiglu_gradient(const float *restrict x, const float *restrict grad, float *restrict d_x, int64_t rows,
                            int64_t n) {
    for (int64_t row = 0; row < rows; row++, x += 2 * n, grad += n, d_x += 2 * n)
        for (int64_t i = 0; i < n; i += WIDTH) {
            Floats gate = load(x + i), up = load(x + n + i), slope = load(grad + i);
            Floats open = sigmoid(gate), active = gate * open;
            store(d_x + i, slope * up * (open + active * (1.0f - open)));
            store(d_x + n + i, slope * active);
        }
}

// scale [rows]: 1 / sqrt(mean(x^2) + eps)
EXPORT void rms_norm(const float *restrict x, const float *restrict weight, float eps, float *restrict out,
                     float *restrict scale, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; row++, x += n, out += n) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
        float factor = scale[row] = 1.0f / sqrtf(squares / n + eps);
        for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
    }
}

// d_weight [n] and part [n], which is overwritten: sums of few rows are added up, as a long sum loses digits
EXPORT void rms_norm_gradient(const float *restrict x, const float *restrict weight, const float *restrict scale,
                              const float *restrict grad, float *restrict d_x, float *restrict d_weight,
                              float *restrict part, int64_t rows, int64_t n) {
    const int64_t few = 64;
    for (int64_t i = 0; i < n; i++) d_weight[i] = part[i] = 0;
    for (int64_t row = 0; row < rows; row++, x += n, grad += n, d_x += n) {
        float factor = scale[row], along = 0;
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < n; i++) along += grad[i] * weight[i] * x[i];
        along *= factor * factor / n;
        for (int64_t i = 0; i < n; i++) {
            part[i] += grad[i] * (x[i] * factor);
            d_x[i] = factor * (grad[i] * weight[i] - x[i] * along);
        }
        if (row % few == few - 1 || row == rows - 1)
            for (int64_t i = 0; i < n; i++) d_weight[i] += part[i], part[i] = 0;
    }
}

// x: heads of `dim` channels in one piece, so far apart as the strides say; cos, sin [tokens, width], their second
// halves the angles' and the first halves of sin negated; out [tokens, heads, dim]. sign: -1 turns back
EXPORT void rotate(const float *restrict x, int64_t token_stride, int64_t head_stride, const float *restrict cos,
                   const float *restrict sin, float sign, float *restrict out, int64_t tokens, int64_t heads,
                   int64_t dim, int64_t width) {
    int64_t half = width / 2;
    for (int64_t token = 0; token < tokens; token++, cos += width, sin += width)
        for (int64_t head = 0; head < heads; head++, out += dim) {
            const float *in = x + token * token_stride + head * head_stride;
            for (int64_t i = 0; i < half; i++) {
                out[i] = in[i] * cos[i] + sign * in[half + i] * sin[i];
                out[half + i] = in[half + i] * cos[half + i] + sign * in[i] * sin[half + i];
            }
            for (int64_t i = width; i < dim; i++) out[i] = in[i];
        }
}
