// PPO's clipped surrogate with the dual clip, as mrl/kernels/clipped_loss.py describes it: value, metrics and gradient in
// one pass. float32, [n].
#include "vectors.h"

typedef struct {
    float low, high, ceiling, furthest;
} Clip;

#define SUMS 6
#define PART 4096  // tokens whose sums are float32 before they are added up in float64

// sums [6]: loss, clipfrac, ppo_kl, clipfrac_lower, approxkl, ratio
EXPORT void clipped_loss(const float *restrict log_probs, const float *restrict old_log_probs,
                         const float *restrict advantages, const float *restrict weights,
                         const float *restrict metric_weights, const Clip *clip, float *restrict gradient,
                         double *restrict sums, int64_t n) {
    const Floats most = all(1.0f + clip->high), fewest = all(1.0f - clip->low), furthest = all(clip->furthest);
    const float ceiling = clip->ceiling;
    for (int s = 0; s < SUMS; s++) sums[s] = 0;
    for (int64_t part = 0; part < n; part += PART) {
        int64_t end = part + PART < n ? part + PART : n;
        Floats sum[SUMS] = {0};
        for (int64_t i = part; i < end; i += WIDTH) {
            int64_t left = end - i;
            Floats advantage = load_some(advantages + i, left), weight = load_some(weights + i, left);
            Floats of_metrics = load_some(metric_weights + i, left);
            Floats log_ratio = load_some(log_probs + i, left) - load_some(old_log_probs + i, left);
            Floats near = smaller(furthest, larger(-furthest, log_ratio));
            Integers is_far = near != log_ratio;
            log_ratio = near;
            Floats ratio = exponential_near(log_ratio), gain = ratio * advantage;
            Floats bounded = smaller(most, larger(fewest, ratio)) * advantage;
            Floats least = smaller(gain, bounded);
            Floats floor = smaller(advantage, all(0.0f)) * ceiling;
            Integers is_clipped = bounded < gain, is_below = floor > least;
            Floats moving = choose(is_clipped | is_below | is_far, all(0.0f), gain);
            least = choose(is_below, floor, least);
            store_some(gradient + i, -moving * weight, left);
            sum[0] -= least * weight;
            sum[1] += choose(is_clipped, of_metrics, all(0.0f));
            sum[2] -= log_ratio * of_metrics;
            sum[3] += choose(is_below, of_metrics, all(0.0f));
            sum[4] += log_ratio * log_ratio * of_metrics * 0.5f;
            sum[5] += ratio * of_metrics;
        }
        for (int s = 0; s < SUMS; s++) sums[s] += sum_of(sum[s]);
    }
}
