// Attention of packed tokens, with its gradient, for segments whose keys stay in a core's cache. float32; channels are
// a multiple of 16.
//
// The queries of a segment see its keys up to their own last one. Queries and keys are tokens, read and written where
// they lie. Scores are formed for ROWS queries at a time over all keys that one of them sees, from keys that are turned
// channel by channel; what follows of them goes over channels. Nothing of the size of all scores is kept.
#include <stdlib.h>

#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8  // of two vectors each, whose sums stay in registers
#else
#define ROWS 6
#endif
// Calls f for what is from `at` to `end`, whole vectors, with how many of them it forms at once
#define IN_PAIRS(at, end, f, ...)                                      \
    for (; at + 2 * WIDTH <= end; at += 2 * WIDTH) f(__VA_ARGS__, 2); \
    for (; at < end; at += WIDTH) f(__VA_ARGS__, 1);

typedef struct {
    const float *at;
    int64_t token, head;  // strides; channels are in one piece
} Tensor;

typedef struct {
    int64_t segments, heads, groups, channels;
    int64_t longest, window;  // keys of a segment; keys that a query sees, its last one included, or 0: all
    float scale;
    const float *sinks;  // [heads]: a score more, of no key; NULL: none
    // [segments + 1], where a segment's begin, and these: tokens, rows of results, a query's last key in its segment
    const int64_t *query_starts, *queries, *results, *last, *key_starts, *keys;
} Problem;

// ROWS queries of a segment, or the `count` that are left: the first and last key of each, and where all of these begin,
// a whole vector, and end
typedef struct {
    int64_t count, begin, end, first[ROWS], last[ROWS];
} Block;

INLINE const float *row(Tensor x, int64_t token, int64_t head) { return x.at + token * x.token + head * x.head; }
INLINE float sink_of(const Problem *p, int64_t head) { return p->sinks ? p->sinks[head] : -INFINITY; }

INLINE Block block_at(const Problem *p, int64_t at, int64_t end) {
    Block b = {.count = end - at < ROWS ? end - at : ROWS, .begin = INT64_MAX};
    for (int r = 0; r < ROWS; r++) {
        b.first[r] = b.last[r] = -1;
        if (r >= b.count) continue;
        int64_t last = b.last[r] = p->last[at + r], first = p->window ? last + 1 - p->window : 0;
        b.first[r] = first = first < 0 ? 0 : first;
        b.begin = first < b.begin ? first : b.begin;
        b.end = last >= b.end ? last + 1 : b.end;
    }
    b.begin = b.begin / WIDTH * WIDTH;
    return b;
}

// Channels from c on of a token's head; what the next head has there is fetched, which is asked for soon
INLINE Floats load_and_fetch(const float *from, int64_t c, int64_t channels) {
    __builtin_prefetch(from + channels + c);
    return load(from + c);
}

// x[r] becomes what the rows have in place r
INLINE void transpose(Floats x[WIDTH]) {
#define EXCHANGE(bit)                                          \
    for (int r = 0; r < WIDTH; r++)                            \
        if (!(r & bit)) {                                      \
            Integers is_set = (LANES & bit) != 0;              \
            Floats low = x[r], high = x[r + bit];              \
            x[r] = choose(is_set, FAR_##bit(high), low);       \
            x[r + bit] = choose(is_set, high, FAR_##bit(low)); \
        }
    FOR_BITS(EXCHANGE)
#undef EXCHANGE
}

// out [blocks of WIDTH keys, channels, WIDTH] of a segment's keys, zeros behind them
static void turn(Tensor x, const int64_t *tokens, int64_t keys, int64_t group, int64_t channels, float *restrict out) {
    for (int64_t j = 0; j < keys; j += WIDTH)
        for (int64_t c = 0; c < channels; c += WIDTH) {
            Floats found[WIDTH];
            for (int r = 0; r < WIDTH; r++)
                found[r] = j + r < keys ? load_and_fetch(row(x, tokens[j + r], group), c, channels) : (Floats){0};
            transpose(found);
            for (int r = 0; r < WIDTH; r++) store(out + j * channels + (c + r) * WIDTH, found[r]);
        }
}

// out [keys, channels]
static void gather(Tensor x, const int64_t *tokens, int64_t keys, int64_t group, int64_t channels, float *restrict out) {
    for (int64_t j = 0; j < keys; j++)
        for (int64_t c = 0; c < channels; c += WIDTH)
            store(out + j * channels + c, load_and_fetch(row(x, tokens[j], group), c, channels));
}

INLINE void products_of(const float *const *rows, const float *restrict turned, int64_t channels, int64_t room,
                        float *restrict out, const int vectors) {
    Floats sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < vectors; t++) sum[r][t] = (Floats){0};
    for (int64_t c = 0; c < channels; c++)
        for (int t = 0; t < vectors; t++) {
            Floats key = load(turned + (t * channels + c) * WIDTH);
            for (int r = 0; r < ROWS; r++) sum[r][t] += rows[r][c] * key;
        }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < vectors; t++) store(out + r * room + t * WIDTH, sum[r][t]);
}

// out [ROWS, room]: rows [ROWS] of channels times a block's keys, which `turn` has made
INLINE void products(const float *const *rows, const float *restrict turned, int64_t channels, const Block *b,
                     int64_t room, float *restrict out) {
    int64_t j = b->begin, end = whole(b->end);
    IN_PAIRS(j, end, products_of, rows, turned + j * channels, channels, room, out + j)
}

INLINE void mix_of(const float *restrict factors, const float *restrict values, int64_t channels, const Block *b,
                   int64_t room, const float *times, float *const *out, int64_t c, const int vectors) {
    Floats sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < vectors; t++) sum[r][t] = (Floats){0};
    for (int64_t j = b->begin; j < b->end; j++)
        for (int t = 0; t < vectors; t++) {
            Floats value = load(values + j * channels + c + t * WIDTH);
            for (int r = 0; r < ROWS; r++) sum[r][t] += factors[r * room + j] * value;
        }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < vectors; t++) store(out[r] + c + t * WIDTH, sum[r][t] * times[r]);
}

// out[r], channels each: the sum over a block's keys of factors[r, key] * values[key], times[r]
INLINE void mix(const float *restrict factors, const float *restrict values, int64_t channels, const Block *b,
                int64_t room, const float *times, float *const *out) {
    int64_t c = 0;
    IN_PAIRS(c, channels, mix_of, factors, values, channels, b, room, times, out, c)
}

INLINE void spread_of(const float *restrict factors, const float *const *rows, int64_t channels, const Block *b,
                      int64_t room, float *restrict out, int64_t c, const int vectors) {
    Floats x[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < vectors; t++) x[r][t] = load(rows[r] + c + t * WIDTH);
    for (int64_t j = b->begin; j < b->end; j++)
        for (int t = 0; t < vectors; t++) {
            float *at = out + j * channels + c + t * WIDTH;
            Floats sum = load(at);
            for (int r = 0; r < ROWS; r++) sum += factors[r * room + j] * x[r][t];
            store(at, sum);
        }
}

// Adds to out [keys, channels]: the sum over r of factors[r, key] * rows[r]
INLINE void spread(const float *restrict factors, const float *const *rows, int64_t channels, const Block *b,
                   int64_t room, float *restrict out) {
    int64_t c = 0;
    IN_PAIRS(c, channels, spread_of, factors, rows, channels, b, room, out, c)
}

// Of a row's scores from key j on: minus infinity for those of keys that its query does not see
INLINE Floats visible(const Block *b, int r, int64_t j, Floats scores) {
    if (j >= b->first[r] && j + WIDTH <= b->last[r] + 1) return scores;
    Integers key = LANES + (int32_t)j;
    return choose((key >= (int32_t)b->first[r]) & (key <= (int32_t)b->last[r]), scores, all(-INFINITY));
}

// tops, inverses [queries, heads]: weights are exp(score - top) * inverse; out [results, heads, channels].
// 0: there is no memory
EXPORT int attention(const Problem *p, const Tensor *q, const Tensor *k, const Tensor *v, float *restrict out,
                     float *restrict tops, float *restrict inverses) {
    int64_t room = whole(p->longest), d = p->channels, share = p->heads / p->groups;
    float *turned = malloc((2 * d + ROWS) * room * sizeof(float) + 2 * d * sizeof(float));
    if (!turned) return 0;
    float *values = turned + d * room, *scores = values + d * room, *idle = scores + ROWS * room, *spare = idle + d;
    memset(idle, 0, d * sizeof(float));
    for (int64_t s = 0; s < p->segments; s++) {
        const int64_t *tokens = p->keys + p->key_starts[s];
        int64_t keys = p->key_starts[s + 1] - p->key_starts[s], end = p->query_starts[s + 1];
        for (int64_t h = 0; h < p->heads; h++) {
            if (h % share == 0) {
                turn(*k, tokens, keys, h / share, d, turned);
                gather(*v, tokens, keys, h / share, d, values);
            }
            for (int64_t i = p->query_starts[s]; i < end; i += ROWS) {
                Block b = block_at(p, i, end);
                const float *rows[ROWS];
                float *to[ROWS], top, times[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    rows[r] = r < b.count ? row(*q, p->queries[i + r], h) : idle;
                    to[r] = r < b.count ? out + (p->results[i + r] * p->heads + h) * d : spare;
                }
                products(rows, turned, d, &b, room, scores);
                for (int r = 0; r < ROWS; r++) {
                    float *score = scores + r * room;
                    for (int64_t j = b.begin; j < b.end; j += WIDTH)
                        store(score + j, visible(&b, r, j, load(score + j)));
                    times[r] = weigh(score + b.begin, b.end - b.begin, p->scale, sink_of(p, h), &top);
                    if (r < b.count) tops[(i + r) * p->heads + h] = top, inverses[(i + r) * p->heads + h] = times[r];
                }
                mix(scores, values, d, &b, room, times, to);
            }
        }
    }
    free(turned);
    return 1;
}

INLINE void add_rows(const float *restrict from, const int64_t *tokens, int64_t keys, int64_t channels,
                     float *restrict out, int64_t stride) {
    for (int64_t j = 0; j < keys; j++)
        for (int64_t c = 0; c < channels; c += WIDTH) {
            float *at = out + tokens[j] * stride + c;
            store(at, load(at) + load(from + j * channels + c));
        }
}

// Zeros before: d_q [tokens, heads, channels]; d_k, d_v [tokens, groups, channels]; d_sinks [heads]
EXPORT int attention_gradient(const Problem *p, const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out,
                              const Tensor *grad, const float *restrict tops, const float *restrict inverses,
                              float *restrict d_q, float *restrict d_k, float *restrict d_v, float *restrict d_sinks) {
    int64_t room = whole(p->longest), d = p->channels, share = p->heads / p->groups, stride = p->groups * d;
    float *turned = malloc((5 * d + 2 * ROWS) * room * sizeof(float) + 2 * d * sizeof(float));
    if (!turned) return 0;
    float *turned_v = turned + d * room, *own_k = turned_v + d * room, *sums_k = own_k + d * room;
    float *sums_v = sums_k + d * room, *weights = sums_v + d * room, *slopes = weights + ROWS * room;
    float *idle = slopes + ROWS * room, *spare = idle + d;
    memset(idle, 0, d * sizeof(float));
    for (int64_t s = 0; s < p->segments; s++) {
        const int64_t *tokens = p->keys + p->key_starts[s];
        int64_t keys = p->key_starts[s + 1] - p->key_starts[s], end = p->query_starts[s + 1];
        for (int64_t h = 0; h < p->heads; h++) {
            int64_t g = h / share;
            if (h % share == 0) {
                turn(*k, tokens, keys, g, d, turned), turn(*v, tokens, keys, g, d, turned_v);
                gather(*k, tokens, keys, g, d, own_k);
                memset(sums_k, 0, keys * d * sizeof(float)), memset(sums_v, 0, keys * d * sizeof(float));
            }
            for (int64_t i = p->query_starts[s]; i < end; i += ROWS) {
                Block b = block_at(p, i, end);
                const float *queries[ROWS], *grads[ROWS];
                float *to[ROWS], ones[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    queries[r] = r < b.count ? row(*q, p->queries[i + r], h) : idle;
                    grads[r] = r < b.count ? row(*grad, p->results[i + r], h) : idle;
                    ones[r] = 1;
                    to[r] = r < b.count ? d_q + (p->queries[i + r] * p->heads + h) * d : spare;
                }
                products(queries, turned, d, &b, room, weights);
                products(grads, turned_v, d, &b, room, slopes);
                for (int r = 0; r < ROWS; r++) {
                    float *weight = weights + r * room, *slope = slopes + r * room;
                    if (r >= b.count) {
                        memset(weight, 0, room * sizeof(float)), memset(slope, 0, room * sizeof(float));
                        continue;
                    }
                    const float *result = row(*out, p->results[i + r], h);
                    float top = tops[(i + r) * p->heads + h], inverse = inverses[(i + r) * p->heads + h];
                    Floats along = {0};
                    for (int64_t c = 0; c < d; c += WIDTH) along += load(grads[r] + c) * load(result + c);
                    float own = sum_of(along);
                    for (int64_t j = b.begin; j < b.end; j += WIDTH) {
                        Floats score = visible(&b, r, j, load(weight + j));
                        Floats part = exponential(score * p->scale - top) * inverse;
                        store(weight + j, part);
                        store(slope + j, part * (load(slope + j) - own) * p->scale);
                    }
                    if (p->sinks) d_sinks[h] -= expf(p->sinks[h] - top) * inverse * own;
                }
                mix(slopes, own_k, d, &b, room, ones, to);
                spread(slopes, queries, d, &b, room, sums_k);
                spread(weights, grads, d, &b, room, sums_v);
            }
            if ((h + 1) % share == 0) {
                add_rows(sums_k, tokens, keys, d, d_k + g * d, stride);
                add_rows(sums_v, tokens, keys, d, d_v + g * d, stride);
            }
        }
    }
    free(turned);
    return 1;
}
