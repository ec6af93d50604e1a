// Seeded draws of tokens, as mrl/inference/sglang/cpu_shim/mrl_cpu_engine/draws.py describes them, a row at a time.
#include <stdlib.h>

#include "vectors.h"

typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static const float SLACK = 1.00001f;  // for the rounding of the bounds

#define TURNED(x, bits) ((x) << (bits) | (x) >> (32 - (bits)))
#define SCRAMBLED(x) (TURNED((x) * 0xCC9E2D51u, 15) * 0x1B873593u)
#define MIXED(state, word) (TURNED((state) ^ (word), 13) * 5u + 0xE6546B64u)

// MurmurHash3_x86_32 of (seed, position, column), whose state before the column is given
#define DEFINE_HASH(NAME, TYPE)                     \
    INLINE TYPE NAME(uint32_t state, TYPE column) { \
        TYPE scrambled = SCRAMBLED(column);         \
        TYPE h = MIXED(state, scrambled) ^ 16u;     \
        h = (h ^ h >> 16) * 0x85EBCA6Bu;            \
        h = (h ^ h >> 13) * 0xC2B2AE35u;            \
        return h ^ h >> 16;                         \
    }
DEFINE_HASH(hashes, Words)
DEFINE_HASH(hash, uint32_t)

static uint32_t state_of(int64_t seed, int64_t position) {
    uint32_t words[] = {(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32), (uint32_t)position}, h = 0;
    for (int i = 0; i < 3; i++) h = MIXED(h, SCRAMBLED(words[i]));
    return h;
}

static double score(float log_p, uint32_t state, int64_t token) {
    double log_u = log(hash(state, (uint32_t)token) / 4294967295.0), most = -0x1p-32;
    if (log_u < -1.7976931348623157e308) log_u = -1.7976931348623157e308;
    return log_p - log(-(log_u > most ? most : log_u));
}

// A row without a candidate, such as one that is not finite: the first NaN, or the first of the highest scores
static int64_t drawn_slowly(const float *log_p, uint32_t state, int64_t vocab) {
    int64_t best = 0;
    double most = -INFINITY;
    for (int64_t token = 0; token < vocab; token++) {
        double own = score(log_p[token], state, token);
        if (own != own) return token;
        if (own > most) most = own, best = token;
    }
    return best;
}

// At least exp(-score) of 16 tokens
INLINE Floats inverses(Floats log_p, uint32_t state, int64_t token) {
    Integers half = (Integers)(~hashes(state, (Words)(LANES + (int32_t)token)) >> 1);
    Floats rest = larger(all(0.5f), __builtin_convertvector(half, Floats)) * (2.0f / 4294967295.0f);
    return choose(log_p < -87.0f, all(INFINITY), rest * exponential(-log_p));
}

static int64_t drawn(const float *restrict log_p, uint32_t state, int64_t vocab, float *restrict bounds) {
    float tail[WIDTH];
    Floats least = all(INFINITY);
    Integers at = {0}, strange = {0};
    for (int64_t token = 0; token < vocab; token += WIDTH) {
        Floats x;
        if (token + WIDTH > vocab) {
            for (int i = 0; i < WIDTH; i++) tail[i] = token + i < vocab ? log_p[token + i] : -INFINITY;
            x = load(tail);
        } else {
            x = load(log_p + token);
        }
        Floats bound = inverses(x, state, token);
        store(bounds + token, bound);
        at = choose_integers(bound < least, LANES + (int32_t)token, at);
        least = smaller(bound, least);
        strange |= bound != bound;
    }
    int likely = 0;
    for (int i = 1; i < WIDTH; i++) likely = least[i] < least[likely] ? i : likely;
    if (any(strange) || !(least[likely] < INFINITY)) return drawn_slowly(log_p, state, vocab);
    float limit = (float)exp(-score(log_p[at[likely]], state, at[likely])) * SLACK;
    int64_t best = -1;
    double most = -INFINITY;
    for (int64_t token = 0; token < vocab; token += WIDTH) {
        if (!any(load(bounds + token) <= limit)) continue;
        for (int64_t i = token; i < token + WIDTH && i < vocab; i++) {
            double own = bounds[i] <= limit ? score(log_p[i], state, i) : -INFINITY;
            if (own > most) most = own, best = i;
        }
    }
    return best < 0 ? drawn_slowly(log_p, state, vocab) : best;
}

// log_p [rows, vocab], `stride` apart; seeds, positions, tokens [rows]. 0: there is no memory
EXPORT int draw(const float *log_p, int64_t stride, const int64_t *seeds, const int64_t *positions, int64_t *tokens,
                int64_t rows, int64_t vocab) {
    float *bounds = malloc(whole(vocab) * sizeof(float));
    if (!bounds) return 0;
    for (int64_t row = 0; row < rows; row++)
        tokens[row] = drawn(log_p + row * stride, state_of(seeds[row], positions[row]), vocab, bounds);
    free(bounds);
    return 1;
}
