// Attention of one new token a request over the slots of an engine's cache that hold its keys, where they lie.
#include <stdlib.h>

#include "vectors.h"

typedef struct {
    int64_t requests, heads, groups, channels, value_channels;
    int64_t window;  // keys before the own one that are seen; negative: all
    float scale;
} Decode;

// q [requests, heads, channels]; k, v [slots, groups, channels]; slots: a row of `slots_stride` for each of `rows`
// [requests], whose first lengths [requests] are used; out [requests, heads, value_channels]. 0: there is no memory
EXPORT int decode_attention(const Decode *p, const float *restrict q, const float *restrict k, const float *restrict v,
                            const int32_t *restrict slots, int64_t slots_stride, const int64_t *restrict rows,
                            const int64_t *restrict lengths, float *restrict out) {
    int64_t share = p->heads / p->groups, d = p->channels, wide = p->value_channels, longest = 0;
    for (int64_t r = 0; r < p->requests; r++) longest = lengths[r] > longest ? lengths[r] : longest;
    float *scores = malloc(whole(longest + 1) * sizeof(float));
    if (!scores) return 0;
    for (int64_t r = 0; r < p->requests; r++) {
        const int32_t *of = slots + rows[r] * slots_stride;
        int64_t first = p->window >= 0 && lengths[r] - 1 > p->window ? lengths[r] - 1 - p->window : 0;
        int64_t keys = lengths[r] - first;
        of += first;
        for (int64_t h = 0; h < p->heads; h++, q += d, out += wide) {
            const float *key = k + h / share * d, *value = v + h / share * wide;
            for (int64_t j = 0; j < keys; j++) {
                const float *at = key + of[j] * p->groups * d;
                Floats sum = {0};
                for (int64_t c = 0; c < d; c += WIDTH) sum += load(q + c) * load(at + c);
                scores[j] = sum_of(sum);
            }
            for (int64_t j = keys; j < whole(keys); j++) scores[j] = -INFINITY;
            float top, inverse = weigh(scores, keys, p->scale, -INFINITY, &top);
            for (int64_t c = 0; c < wide; c += WIDTH) {
                Floats sum = {0};
                for (int64_t j = 0; j < keys; j++) sum += scores[j] * load(value + of[j] * p->groups * wide + c);
                store(out + c, sum * inverse);
            }
        }
    }
    free(scores);
    return 1;
}
