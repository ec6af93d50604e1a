// Attention of sequences whose keys stay in a core's cache, with its gradient. float32; channels are a multiple of 16.
//
// Scores are formed for ROWS queries at a time over all keys that one of them sees, from keys that lie channel by
// channel; what follows of them goes over channels. Nothing of the size of all scores is kept.
#include <stdlib.h>

#include "vectors.h"

#define ROWS 6

typedef struct {
    const float *at;
    int64_t sequence, head, token;  // strides; channels are in one piece
} Tensor;

// mask [queries, keys]: where it says no a query does not see a key; NULL: queries see those up to their own place
typedef struct {
    int64_t sequences, heads, groups, queries, keys, channels;
    float scale;
    const uint8_t *mask;
    int64_t mask_sequence, mask_query;  // strides
} Problem;

INLINE const float *row(Tensor x, int64_t sequence, int64_t head, int64_t token) {
    return x.at + sequence * x.sequence + head * x.head + token * x.token;
}

INLINE const uint8_t *mask_of(const Problem *p, int64_t sequence, int64_t i) {
    return p->mask ? p->mask + sequence * p->mask_sequence + i * p->mask_query : NULL;
}

// Behind the last key that one of the queries i .. i + ROWS - 1 sees
INLINE int64_t seen(const Problem *p, int64_t sequence, int64_t i) {
    int64_t end = i + ROWS < p->queries ? i + ROWS : p->queries, most = 0;
    if (!p->mask) return end;
    for (; i < end; i++) {
        const uint8_t *mask = mask_of(p, sequence, i);
        int64_t own = p->keys;
        while (own > most && !mask[own - 1]) own--;
        most = own;
    }
    return most;
}

// out [channels, room], zeros behind the keys
static void turn(Tensor x, const Problem *p, int64_t sequence, int64_t group, int64_t room, float *restrict out) {
    for (int64_t j = 0; j < p->keys; j++) {
        const float *from = row(x, sequence, group, j);
        for (int64_t c = 0; c < p->channels; c++) out[c * room + j] = from[c];
    }
    for (int64_t c = 0; c < p->channels; c++)
        for (int64_t j = p->keys; j < room; j++) out[c * room + j] = 0;
}

// out [ROWS, room]: rows [ROWS] of channels times what `turn` made, of the first `keys`
INLINE void products(const float *const *rows, const float *restrict turned, int64_t channels, int64_t keys,
                     int64_t room, float *restrict out) {
    for (int64_t j = 0; j < keys; j += WIDTH) {
        Floats sum[ROWS] = {0};
        for (int64_t c = 0; c < channels; c++) {
            Floats key = load(turned + c * room + j);
            for (int r = 0; r < ROWS; r++) sum[r] += rows[r][c] * key;
        }
        for (int r = 0; r < ROWS; r++) store(out + r * room + j, sum[r]);
    }
}

// Adds to out[r], channels each: the sum over keys of factors[r, key] * x[key]
INLINE void mix(const float *restrict factors, Tensor x, int64_t sequence, int64_t group, int64_t channels,
                int64_t keys, int64_t room, float *const *out) {
    const float *first = row(x, sequence, group, 0);
    for (int64_t c = 0; c < channels; c += WIDTH) {
        Floats sum[ROWS] = {0};
        for (int64_t j = 0; j < keys; j++) {
            Floats value = load(first + j * x.token + c);
            for (int r = 0; r < ROWS; r++) sum[r] += factors[r * room + j] * value;
        }
        for (int r = 0; r < ROWS; r++) store(out[r] + c, load(out[r] + c) + sum[r]);
    }
}

// Of the scores from key j on: minus infinity for those of keys that query i does not see. mask: its own
INLINE Floats visible(const Problem *p, const uint8_t *mask, int64_t i, int64_t j, Floats scores) {
    if (mask) return choose(shown(mask + j, p->keys - j), scores, all(-INFINITY));
    return i + 1 - j >= WIDTH ? scores : choose(LANES < (int32_t)(i + 1 - j), scores, all(-INFINITY));
}

// tops, inverses [sequences, heads, queries]: weights are exp(score - top) * inverse;
// out [sequences, queries, heads, channels]. 0: there is no memory
EXPORT int attention(const Problem *p, const Tensor *q, const Tensor *k, const Tensor *v, float *restrict out,
                     float *restrict tops, float *restrict inverses) {
    int64_t room = whole(p->keys), d = p->channels, share = p->heads / p->groups;
    float *turned = malloc((d + ROWS) * room * sizeof(float) + 2 * d * sizeof(float));
    if (!turned) return 0;
    float *scores = turned + d * room, *idle = scores + ROWS * room, *spare = idle + d;
    memset(idle, 0, d * sizeof(float));
    for (int64_t s = 0; s < p->sequences; s++)
        for (int64_t h = 0; h < p->heads; h++) {
            if (h % share == 0) turn(*k, p, s, h / share, room, turned);
            for (int64_t i = 0; i < p->queries; i += ROWS) {
                int64_t keys = seen(p, s, i);
                const float *rows[ROWS];
                float *to[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    int is_there = i + r < p->queries;
                    rows[r] = is_there ? row(*q, s, h, i + r) : idle;
                    to[r] = is_there ? out + ((s * p->queries + i + r) * p->heads + h) * d : spare;
                    memset(to[r], 0, d * sizeof(float));
                }
                products(rows, turned, d, keys, room, scores);
                for (int r = 0; r < ROWS; r++) {
                    float *score = scores + r * room;
                    if (i + r >= p->queries) {
                        memset(score, 0, room * sizeof(float));
                        continue;
                    }
                    const uint8_t *mask = mask_of(p, s, i + r);
                    int64_t place = (s * p->heads + h) * p->queries + i + r;
                    for (int64_t j = 0; j < keys; j += WIDTH)
                        store(score + j, visible(p, mask, i + r, j, load(score + j)));
                    float inverse = inverses[place] = weigh(score, keys, p->scale, tops + place);
                    for (int64_t j = 0; j < keys; j += WIDTH) store(score + j, load(score + j) * inverse);
                }
                mix(scores, *v, s, h / share, d, keys, room, to);
            }
        }
    free(turned);
    return 1;
}

// Adds to out [keys, heads, channels], of which `out` is a head: the sum over r of factors[r, key] * rows[r]
INLINE void spread(const float *restrict factors, const float *const *rows, int64_t channels, int64_t keys,
                   int64_t room, float *restrict out, int64_t stride) {
    for (int64_t c = 0; c < channels; c += WIDTH) {
        Floats x[ROWS];
        for (int r = 0; r < ROWS; r++) x[r] = load(rows[r] + c);
        for (int64_t j = 0; j < keys; j++) {
            Floats sum = load(out + j * stride + c);
            for (int r = 0; r < ROWS; r++) sum += factors[r * room + j] * x[r];
            store(out + j * stride + c, sum);
        }
    }
}

// d_q [sequences, queries, heads, channels]; d_k, d_v [sequences, keys, groups, channels]
EXPORT int attention_gradient(const Problem *p, const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out,
                              const Tensor *grad, const float *restrict tops, const float *restrict inverses,
                              float *restrict d_q, float *restrict d_k, float *restrict d_v) {
    int64_t room = whole(p->keys), d = p->channels, share = p->heads / p->groups, stride = p->groups * d;
    float *turned = malloc((2 * d + 2 * ROWS) * room * sizeof(float) + 2 * d * sizeof(float));
    if (!turned) return 0;
    float *turned_v = turned + d * room, *weights = turned_v + d * room, *slopes = weights + ROWS * room;
    float *idle = slopes + ROWS * room, *spare = idle + d;
    memset(idle, 0, d * sizeof(float));
    memset(d_q, 0, p->sequences * p->queries * p->heads * d * sizeof(float));
    memset(d_k, 0, p->sequences * p->keys * stride * sizeof(float));
    memset(d_v, 0, p->sequences * p->keys * stride * sizeof(float));
    for (int64_t s = 0; s < p->sequences; s++)
        for (int64_t h = 0; h < p->heads; h++) {
            int64_t g = h / share, base = s * p->keys * stride + g * d;
            if (h % share == 0) turn(*k, p, s, g, room, turned), turn(*v, p, s, g, room, turned_v);
            for (int64_t i = 0; i < p->queries; i += ROWS) {
                int64_t keys = seen(p, s, i);
                const float *queries[ROWS], *grads[ROWS];
                float *to[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    int is_there = i + r < p->queries;
                    queries[r] = is_there ? row(*q, s, h, i + r) : idle;
                    grads[r] = is_there ? row(*grad, s, h, i + r) : idle;
                    to[r] = is_there ? d_q + ((s * p->queries + i + r) * p->heads + h) * d : spare;
                }
                products(queries, turned, d, keys, room, weights);
                products(grads, turned_v, d, keys, room, slopes);
                for (int r = 0; r < ROWS; r++) {
                    float *weight = weights + r * room, *slope = slopes + r * room;
                    if (i + r >= p->queries) {
                        memset(weight, 0, room * sizeof(float)), memset(slope, 0, room * sizeof(float));
                        continue;
                    }
                    const uint8_t *mask = mask_of(p, s, i + r);
                    const float *result = row(*out, s, h, i + r);
                    int64_t place = (s * p->heads + h) * p->queries + i + r;
                    float top = tops[place], inverse = inverses[place];
                    Floats along = {0};
                    for (int64_t c = 0; c < d; c += WIDTH) along += load(grads[r] + c) * load(result + c);
                    float own = sum_of(along);
                    for (int64_t j = 0; j < keys; j += WIDTH) {
                        Floats score = visible(p, mask, i + r, j, load(weight + j));
                        Floats part = exponential(score * p->scale - top) * inverse;
                        store(weight + j, part);
                        store(slope + j, part * (load(slope + j) - own) * p->scale);
                    }
                }
                mix(slopes, *k, s, g, d, keys, room, to);
                spread(slopes, queries, d, keys, room, d_k + base, stride);
                spread(weights, grads, d, keys, room, d_v + base, stride);
            }
        }
    free(turned);
    return 1;
}
