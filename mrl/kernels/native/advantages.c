// Advantages and whitening, as mrl/algo describes them. float32, [rows, length]; masks are bytes.
#include "vectors.h"

#define PART 1024  // tokens whose sums are float32 before they are added up in float64

// x moved to the left by `by` lanes, zeros behind it
INLINE Floats ahead(Floats x, int by) {
    Integers from = LANES + by;
#ifdef __clang__
    Floats moved;
    for (int i = 0; i < WIDTH; i++) moved[i] = x[(i + by) % WIDTH];
#else
    Floats moved = __builtin_shuffle(x, from);
#endif
    return choose(from < WIDTH, moved, all(0.0f));
}

// advantages, returns: sums of delta_t = reward_t + gamma * value_t+1 - value_t, discounted by `decay`, and those plus
// the values; 0 outside the mask. found [3]: how many, their sum and that of their squares. 0: a row has a yes behind a
// no, and nothing is said
EXPORT int gae(const float *restrict rewards, const float *restrict values, const uint8_t *restrict mask, float gamma,
               float decay, float *restrict advantages, float *restrict returns, double *restrict found, int64_t rows,
               int64_t length) {
    Floats powers;
    double power = 1;
    for (int i = WIDTH - 1; i >= 0; i--) powers[i] = power *= decay;
    float by_2 = decay * decay, by_4 = by_2 * by_2, by_8 = by_4 * by_4;
    int64_t count = 0;
    double total = 0, squares = 0;
    for (int64_t row = 0; row < rows; row++) {
        float carried = 0, next_value = 0;
        int next_shown = 0;
        Floats sum = {0}, square = {0};
        Integers here = {0}, holes = {0};
        for (int64_t t = (length - 1) / WIDTH * WIDTH; t >= 0; t -= WIDTH) {
            int64_t at = row * length + t, there = length - t;
            Integers is_shown = shown(mask + at, there);
            Floats value = only(is_shown, load_some(values + at, there));
            Floats reward = only(is_shown, load_some(rewards + at, there));
            Floats after = ahead(value, 1);
            after[WIDTH - 1] = next_value;
            Integers later = (Integers)ahead((Floats)is_shown, 1);
            later[WIDTH - 1] = next_shown;
            holes |= later & ~is_shown;
            Floats x = reward + gamma * after - value;
            x += decay * ahead(x, 1), x += by_2 * ahead(x, 2), x += by_4 * ahead(x, 4), x += by_8 * ahead(x, 8);
            x += powers * carried;
            x = only(is_shown, x);
            carried = x[0], next_value = value[0], next_shown = is_shown[0];
            store_some(advantages + at, x, there);
            store_some(returns + at, x + value, there);
            sum += x, square += x * x, here -= is_shown;
            if (t % PART == 0) {
                total += sum_of(sum), squares += sum_of(square);
                sum = square = all(0.0f);
            }
        }
        for (int i = 0; i < WIDTH; i++) count += here[i];
        for (int i = 0; i < WIDTH; i++)
            if (holes[i]) return 0;
    }
    found[0] = count, found[1] = total, found[2] = squares;
    return 1;
}

// In place: (x - mean) * scale + shift, 0 outside the mask
EXPORT void whiten(float *restrict x, const uint8_t *restrict mask, float mean, float scale, float shift, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        Integers is_shown = shown(mask + i, n - i);
        store_some(x + i, only(is_shown, (load_some(x + i, n - i) - mean) * scale + shift), n - i);
    }
}

// out [rows, length]: a row's one of column [rows], 0 outside the mask
EXPORT void on_tokens(const float *restrict column, const uint8_t *restrict mask, float *restrict out, int64_t rows,
                      int64_t length) {
    for (int64_t row = 0; row < rows; row++, mask += length, out += length)
        for (int64_t t = 0; t < length; t += WIDTH)
            store_some(out + t, only(shown(mask + t, length - t), all(column[row])), length - t);
}
