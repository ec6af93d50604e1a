"""Configurations with one mistake in estimators, score shaping or dynamic sampling, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import GAE, PPO, Bad

GRPO = (
    PPO.replace("critic:\n  warmup_steps: 2\n", "")
    .replace("  prompts_per_step: 16", "  prompts_per_step: 8\n  samples_per_prompt: 2")
    .replace(GAE, "  adv_estimator: grpo\n")
)
SORTED = GRPO.replace("function: exact_match", "function: sorted_digits")
GROUPS, ESTIMATOR = "  adv_estimator: grpo\n  filter_groups: ", "  adv_estimator: grpo\n"
GDPO = "  adv_estimator: gdpo\n  gdpo_reward_keys: [score, exact_match]\n"
DAPO = SORTED.replace("reward:\n", "reward:\n  manager: dapo\n  overlong: {buffer_tokens: 4}\n")

BAD_SAMPLING = [
    Bad(
        "gdpo without components",
        ESTIMATOR,
        "  adv_estimator: gdpo\n",
        "algorithm.gdpo_reward_keys",
        ("required by gdpo", "algorithm.adv_estimator"),
        "algorithm:",
        base=GRPO,
    ),
    Bad(
        "gdpo's weights",
        ESTIMATOR,
        GDPO + "  gdpo_reward_weights: [1.0]\n",
        "algorithm.gdpo_reward_weights",
        ("1 weights for 2 components", "algorithm.gdpo_reward_keys"),
        base=SORTED,
    ),
    Bad(
        "gdpo weighs nothing",
        ESTIMATOR,
        GDPO + "  gdpo_reward_weights: [0.0, 0.0]\n",
        "algorithm.gdpo_reward_weights",
        ("all weights are 0",),
        base=SORTED,
    ),
    Bad(
        "a component twice",
        ESTIMATOR,
        "  adv_estimator: gdpo\n  gdpo_reward_keys: [score, score]\n",
        "algorithm.gdpo_reward_keys",
        ("names a component twice",),
        base=GRPO,
    ),
    Bad(
        "components without gdpo",
        ESTIMATOR,
        ESTIMATOR + "  gdpo_reward_keys: [score]\n",
        "algorithm.gdpo_reward_keys",
        ("no effect", "grpo", "algorithm.adv_estimator"),
        base=GRPO,
    ),
    Bad(
        "a divisor of another estimator",
        ESTIMATOR,
        ESTIMATOR + "  gpg_f_norm: 2.0\n",
        "algorithm.gpg_f_norm",
        ("no effect", "grpo", "algorithm.adv_estimator"),
        base=GRPO,
    ),
    Bad(
        "tails of another estimator",
        ESTIMATOR,
        ESTIMATOR + "  zero_tail: true\n",
        "algorithm.zero_tail",
        ("no effect", "grpo", "algorithm.adv_estimator"),
        base=GRPO,
    ),
    Bad(
        "KL in a reward that gdpo does not read",
        ESTIMATOR,
        GDPO + "  kl: {coef: 0.1, use_in_reward: true}\n",
        "algorithm.kl.use_in_reward",
        ("no effect", "gdpo", "components of the reward only", "use_in_loss", "algorithm.adv_estimator"),
        base=SORTED,
    ),
    Bad(
        "a clipped score that gdpo does not read",
        ESTIMATOR,
        GDPO + "  score_clip: 1.0\n",
        "algorithm.score_clip",
        ("no effect", "not the score", "algorithm.adv_estimator"),
        base=SORTED,
    ),
    Bad(
        "a score of truncated responses that gdpo does not read",
        "  function: sorted_digits\n",
        "  function: sorted_digits\n  truncated_score: 0.0\n",
        "reward.truncated_score",
        ("no effect", "score is not one of gdpo_reward_keys", "algorithm.gdpo_reward_keys"),
        base=SORTED.replace(ESTIMATOR, "  adv_estimator: gdpo\n  gdpo_reward_keys: [exact_match]\n"),
    ),
    Bad(
        "whitening where nothing is whitened",
        ESTIMATOR,
        ESTIMATOR + "  whiten_advantages: false\n",
        "algorithm.whiten_advantages",
        ("no effect", "grpo", "algorithm.adv_estimator"),
        base=GRPO,
    ),
    Bad(
        "centred without being scaled",
        ESTIMATOR,
        ESTIMATOR + "  use_score_norm: true\n",
        "algorithm.use_score_norm",
        ("no effect", "algorithm.use_score_scaling (default)"),
        base=GRPO,
    ),
    Bad(
        "scaled twice",
        ESTIMATOR,
        ESTIMATOR + "  use_score_scaling: true\n",
        "algorithm.use_score_scaling",
        ("no effect", "each group's own standard deviation", "algorithm.norm_adv_by_std_in_grpo (default)"),
        base=GRPO,
    ),
    Bad(
        "scaled, and drawn by scores of which only the shares count",
        ESTIMATOR,
        ESTIMATOR + "  pf_ppo: {reweight_method: pow}\n  use_score_scaling: true\n",
        "algorithm.use_score_scaling",
        ("no effect", "each group's own standard deviation"),
        base=GRPO,
    ),
    Bad(
        "a metric that nobody looks at",
        ESTIMATOR,
        GROUPS + "{metric: acc}\n",
        "algorithm.filter_groups.metric",
        ("no effect", "algorithm.filter_groups.enable (default)"),
        base=GRPO,
    ),
    Bad(
        "a component of nothing",
        ESTIMATOR,
        GROUPS + "{enable: true, metric: acc}\n",
        "algorithm.filter_groups.metric",
        ("the reward has no component 'acc', only score, exact_match, right_positions", "reward.manager (default)"),
        base=SORTED,
    ),
    Bad(
        "the name of the only component",
        ESTIMATOR,
        GROUPS + "{enable: true, metric: sorted_digits}\n",
        "algorithm.filter_groups.metric",
        ("no component 'sorted_digits', only score,",),
        base=SORTED,
    ),
    Bad(
        "a part of one of several components, without its name",
        ESTIMATOR,
        GROUPS + "{enable: true, metric: exact_match}\n",
        "algorithm.filter_groups.metric",
        ("only score, sorted_digits, overlong, sorted_digits/exact_match, sorted_digits/right_positions",),
        base=DAPO,
    ),
    Bad(
        "a component that some rows do not have",
        ESTIMATOR,
        GROUPS + "{enable: true, metric: math}\n",
        "algorithm.filter_groups.metric",
        ("rows of the data source 'words' have no component 'math', only score, multiple_choice, format",),
        base=SORTED.replace(
            "  function: sorted_digits\n",
            "  manager: recipe\n  recipe: {sums: {math: 1}, words: {multiple_choice: 1, format: 1}}\n",
        ),
    ),
    Bad(
        "a component of gdpo's that nothing gives",
        "gdpo_reward_keys: [score, exact_match]",
        "gdpo_reward_keys: [score, exact]",
        "algorithm.gdpo_reward_keys",
        ("no component 'exact', only score",),
        base=SORTED.replace(ESTIMATOR, GDPO),
    ),
    Bad(
        "groups that differ in length alone",
        ESTIMATOR,
        GROUPS + "{enable: true}\n",
        "algorithm.filter_groups.metric",
        ("the score includes overlong", "set sorted_digits, or score", "reward.manager"),
        "  filter_groups:",
        base=DAPO,
    ),
    Bad(
        "groups of a recipe that differ in length alone",
        ESTIMATOR,
        GROUPS + "{enable: true}\n",
        "algorithm.filter_groups.metric",
        ("the score includes length", "set exact_match or math, or score"),
        "  filter_groups:",
        base=SORTED.replace(
            "  function: sorted_digits\n",
            "  manager: recipe\n  recipe: {'*': {exact_match: 1, math: 1, length: 0.1}}\n"
            "  length: {full_tokens: 2, zero_tokens: 8}\n",
        ),
    ),
    Bad(
        "rounds of no dynamic sampling",
        ESTIMATOR,
        GROUPS + "{max_num_gen_batches: 3}\n",
        "algorithm.filter_groups.max_num_gen_batches",
        ("no effect", "no groups are filtered", "algorithm.filter_groups.enable (default)"),
        base=GRPO,
    ),
    Bad(
        "groups of one are all equal",
        GAE,
        GAE + "  filter_groups: {enable: true}\n",
        "batch.samples_per_prompt",
        ("would be dropped", "algorithm.filter_groups.enable"),
        "batch:",
    ),
    Bad(
        "rounds too small",
        ESTIMATOR,
        GROUPS + "{enable: true, prompts_per_round: 2, max_num_gen_batches: 3}\n",
        "algorithm.filter_groups.prompts_per_round",
        ("2 prompts x 3 rounds = 6", "the 8 groups", "batch.prompts_per_step"),
        base=GRPO,
    ),
    Bad(
        "further rounds of data in order",
        "  max_prompt_tokens: 8\n",
        "  max_prompt_tokens: 8\n  shuffle: false\n",
        "data.shuffle",
        ("repeat the same prompts", "algorithm.filter_groups.enable"),
        base=GRPO.replace(ESTIMATOR, GROUPS + "{enable: true}\n"),
    ),
    Bad(
        "no filter there",
        ESTIMATOR,
        GROUPS + "{function: 'gone.py:keep'}\n",
        "algorithm.filter_groups.function",
        ("cannot read gone.py",),
        base=GRPO,
    ),
    Bad(
        "fewer groups at once than a step needs",
        ESTIMATOR,
        GROUPS + "{enable: true, prompts_per_round: 2}\n",
        "algorithm.filter_groups.prompts_per_round",
        ("2 groups started at once are fewer than the 8", "batch.prompts_per_step"),
        base=GRPO,
    ),
    *(
        Bad(
            f"a mean that {estimator} subtracts in any case",
            ESTIMATOR,
            f"  adv_estimator: {estimator}\n  use_score_scaling: true\n  use_score_norm: true\n",
            "algorithm.use_score_norm",
            ("no effect", f"{estimator} subtracts a mean of its own", "algorithm.adv_estimator"),
            base=GRPO,
        )
        for estimator in ("rloo", "remax", "opo")
    ),
    *(
        Bad(
            f"scaled before {estimator} whitens",
            ESTIMATOR,
            f"  adv_estimator: {estimator}\n  use_score_scaling: true\n",
            "algorithm.use_score_scaling",
            ("no effect", f"{estimator} whitens its advantages", "algorithm.whiten_advantages (default)"),
            base=GRPO,
        )
        for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ),
]
