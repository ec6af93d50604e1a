"""Configurations with one mistake in asynchronous or multi-turn rollouts, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import Bad
from tests.helpers.bad_sampling_configs import ESTIMATOR, GRPO

SAMPLING, ONE_STEP, CORRECTION = (
    "rollout:\n",
    "rollout:\n  max_staleness: 1\n",
    "  rollout_correction: {rollout_is: token}\n",
)
AHEAD = GRPO.replace(SAMPLING, ONE_STEP).replace(ESTIMATOR, ESTIMATOR + CORRECTION)
AGENT = GRPO + "agent:\n  rollout: mine.py:Env\n  max_tokens: 64\n"
STALENESS, INTERRUPT = "rollout.max_staleness", "rollout.interrupt"
PARTIAL = "rollout:\n  interrupt: at_step_end\n"
ENGINE = "  old_log_probs: engine\n  policy_loss:\n    loss_mode: gpg\n"

BAD_ROLLOUT = [
    Bad(
        "samples of older weights, uncorrected",
        SAMPLING,
        ONE_STEP,
        "algorithm.rollout_correction.rollout_is",
        ("off-policy", STALENESS, "algorithm.old_log_probs"),
        "algorithm:",
        base=GRPO,
    ),
    Bad(
        "older samples without a ratio",
        CORRECTION,
        ENGINE,
        "algorithm.policy_loss.loss_mode",
        ("gpg has no ratio", STALENESS),
        base=AHEAD,
    ),
    Bad(
        "ahead by engines that sleep",
        ONE_STEP,
        ONE_STEP + "  release: cache\n",
        "rollout.release",
        ("cannot generate meanwhile", STALENESS),
        base=AHEAD,
    ),
    Bad(
        "more groups than are learnt, drawn at once",
        SAMPLING,
        SAMPLING + "  oversample: 2.0\n",
        "rollout.oversample",
        ("no effect", INTERRUPT),
        base=GRPO,
    ),
    Bad(
        "segments that do not divide a response",
        ONE_STEP,
        PARTIAL + "  oversample: 2.0\n  segment_tokens: 3\n",
        "rollout.segment_tokens",
        ("3 does not divide 8",),
        base=AHEAD,
    ),
    Bad(
        "segments of groups that a step waits for",
        ONE_STEP,
        PARTIAL + "  segment_tokens: 4\n",
        "rollout.oversample",
        ("must be above 1", INTERRUPT),
        "rollout:\n",
        base=AHEAD,
    ),
    Bad(
        "a former key",
        "max_staleness: 1",
        "overlap: one_step",
        "rollout.overlap",
        ("is no key any more", "one_step is max_staleness: 1"),
        base=AHEAD,
    ),
    Bad(
        "segments that never continue",
        ONE_STEP,
        ONE_STEP + "  segment_tokens: 4\n",
        "rollout.segment_tokens",
        ("no effect", INTERRUPT),
        base=AHEAD,
    ),
    Bad(
        "responses of a step that end early with another one",
        ONE_STEP,
        PARTIAL + "  max_staleness: 1\n  oversample: 2.0\n",
        INTERRUPT,
        ("are not generated during training", STALENESS),
        "  interrupt:",
        base=AHEAD,
    ),
    Bad(
        "an order of groups that are all waited for",
        SAMPLING,
        SAMPLING + "  order: first_done\n",
        "rollout.order",
        ("no effect", STALENESS),
        base=GRPO,
    ),
    Bad(
        "greedy responses of other weights",
        ONE_STEP,
        ONE_STEP + "  interrupt: at_sync\n",
        "algorithm.adv_estimator",
        ("needs a greedy response of the same weights", INTERRUPT),
        "  adv_estimator:",
        base=AHEAD.replace("adv_estimator: grpo", "adv_estimator: remax"),
    ),
    Bad(
        "a program that is not there",
        "mine.py:Env",
        "mine.py:Absent",
        "agent.rollout",
        ("not define 'Absent'",),
        base=AGENT,
    ),
    Bad(
        "a program that cannot wait", "mine.py:Env", "mine.py:score", "agent.rollout", ("`async def score",), base=AGENT
    ),
    Bad(
        "an environment of verifiers without an endpoint",
        "mine.py:Env",
        "verifiers:json",
        "agent.rollout",
        ("set agent.endpoint: true", "agent.endpoint (default)"),
        base=AGENT,
    ),
    Bad(
        "an environment of verifiers that is not installed",
        "mine.py:Env\n",
        "verifiers:me/no-where?size=3\n  endpoint: true\n",
        "agent.rollout",
        ("there is no module no_where: install the package of the environment 'me/no-where'",),
        "  rollout: verifiers",
        base=AGENT.replace("  max_prompt_tokens", "  chat_template: true\n  max_prompt_tokens"),
    ),
    Bad(
        "a parser that is none",
        "mine.py:Env\n",
        "mine.py:Env\n  parser: xml\n",
        "agent.parser",
        ("gpt_oss, fenced, and not path/to/file.py:name",),
        base=AGENT,
    ),
    Bad(
        "a trajectory without room",
        "max_tokens: 64",
        "max_tokens: 12",
        "agent.max_tokens",
        ("8 prompt tokens + 8 new tokens", "data.max_prompt_tokens"),
        base=AGENT,
    ),
    Bad(
        "a trajectory that the model has no places for",
        "max_tokens: 64",
        "max_tokens: 64000",
        "agent.max_tokens",
        ("64000 tokens of a trajectory do not fit",),
        base=AGENT,
    ),
    Bad(
        "a step that is longer than its trajectory",
        "max_tokens: 64",
        "max_tokens: 64\n  step_timeout_s: 40\n  trajectory_timeout_s: 20",
        "agent.step_timeout_s",
        ("40 s for a step exceed 20 s", "agent.trajectory_timeout_s"),
        "  step_timeout_s: 40",
        base=AGENT,
    ),
    Bad(
        "tokens of turns at the same place",
        "adv_estimator: grpo",
        "adv_estimator: optimal_token_baseline",
        "algorithm.adv_estimator",
        ("tir_optimal_token_baseline",),
        base=AGENT,
    ),
    *(
        Bad(
            f"{key} without a chat template",
            "max_tokens: 64",
            f"max_tokens: 64\n  {key}: {value}",
            f"agent.{key}",
            ("needs a chat template", "data.chat_template"),
            base=AGENT.replace("mine.py:Env", program),
        )
        for key, value, program in (("endpoint", "true", "mine.py:score"), ("thoughts", "strip", "mine.py:Env"))
    ),
    Bad(
        "a harness that is a class",
        "max_tokens: 64",
        "max_tokens: 64\n  endpoint: true",
        "agent.rollout",
        ("Env is a class", "agent.endpoint"),
        "  rollout: mine.py",
        base=AGENT.replace("  max_prompt_tokens", "  chat_template: true\n  max_prompt_tokens"),
    ),
    Bad(
        "a greedy response that may be left out",
        "max_tokens: 64",
        "max_tokens: 64\n  on_error: leave_out",
        "agent.on_error",
        ("remax needs the greedy response of every group", "algorithm.adv_estimator"),
        base=AGENT.replace("adv_estimator: grpo", "adv_estimator: remax"),
    ),
    Bad(
        "a greedy response whose score may be left out",
        "reward:\n",
        "reward:\n  on_error: leave_out\n",
        "reward.on_error",
        ("remax needs the score of every greedy response", "algorithm.adv_estimator"),
        base=AGENT.replace("adv_estimator: grpo", "adv_estimator: remax"),
    ),
    Bad(
        "a reward model's server judges turns",
        "reward:\n  function: exact_match\n",
        "reward:\n  manager: model\n  servers: {judge: {url: http://127.0.0.1:1, api: sglang}}\n",
        "reward.servers.judge.api",
        ("not the turns of an agent", "agent"),
        base=AGENT,
    ),
    Bad(
        "an environment's score without one",
        "exact_match",
        "environment",
        "reward",
        ("`agent:`",),
        "reward:",
        base=GRPO,
    ),
]
