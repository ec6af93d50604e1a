"""Configurations with one mistake in averages, moving references, replay or demonstrations, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import GAE, KL_ON, PPO, Bad

WITH_KL = PPO.replace(GAE, KL_ON)
DEMONSTRATIONS = "  data: {train: train.jsonl, max_prompt_tokens: 8}\n"


def bad(id: str, new: str, key: str, says: tuple[str, ...], at: str, base: str = PPO) -> Bad:
    """Returns the valid configuration with `new` inserted before its reward section."""
    return Bad(id, "\nreward:", f"\n{new}reward:", key, says, at, base)


BAD_REUSE = [
    bad(
        "an average that nobody uses",
        "ema: {decay: 0.99}\n",
        "ema",
        ("no effect", "checkpoint.export_hf (default)", "ema.in_validation (default)"),
        "ema:",
    ),
    bad(
        "an average that never moves",
        "ema: {decay: 1.0}\ncheckpoint: {export_hf: true}\n",
        "ema.decay",
        ("less than 1",),
        "ema:",
    ),
    bad(
        "an average validated without data",
        "ema: {in_validation: true}\n",
        "ema.in_validation",
        ("no effect", "data.validation"),
        "ema:",
    ),
    bad(
        "a reference without the average",
        "ref: {policy: ema}\n",
        "ref.policy",
        ("needs a weight average", "ema (default)"),
        "ref:",
        WITH_KL,
    ),
    bad(
        "a layout of an average",
        "ref:\n  policy: ema\n  parallel: {tensor: 2}\nema: {}\n",
        "ref.parallel",
        ("no effect", "ref.policy"),
        "  parallel: {tensor: 2}\n",
        WITH_KL,
    ),
    bad(
        "a path of a refreshed reference",
        "ref:\n  policy: refreshed\n  refresh_every_steps: 2\n  path: dense\n",
        "ref.path",
        ("no effect", "ref.policy"),
        "  path: dense\nreward",
        WITH_KL,
    ),
    bad(
        "refreshing a frozen reference",
        "ref: {refresh_every_steps: 2}\n",
        "ref.refresh_every_steps",
        ("no effect", "ref.policy (default)"),
        "ref:",
        WITH_KL,
    ),
    bad(
        "refreshed without a period",
        "ref: {policy: refreshed}\n",
        "ref.refresh_every_steps",
        ("required by refreshed", "ref.policy"),
        "ref:",
        WITH_KL,
    ),
    bad(
        "refreshed after the end",
        "ref: {policy: refreshed, refresh_every_steps: 20}\n",
        "ref.refresh_every_steps",
        ("20 steps of 20", "run.steps"),
        "ref:",
        WITH_KL,
    ),
    bad(
        "a moving reference without a KL term",
        "ref: {policy: refreshed}\n",
        "ref.policy",
        ("no effect", "algorithm.kl.use_in_loss"),
        "ref:",
    ),
    bad(
        "a buffer smaller than its draws",
        "replay: {buffer_prompts: 4, prompts_per_step: 8}\n",
        "replay.prompts_per_step",
        ("8 exceeds the 4 prompts", "replay.buffer_prompts"),
        "replay:",
    ),
    bad(
        "draws that fill no mini-batch",
        "replay: {buffer_prompts: 32, prompts_per_step: 4}\n",
        "replay.prompts_per_step",
        ("4 prompts x 1 samples = 4", "batch.samples_per_minibatch"),
        "replay:",
    ),
    bad(
        "too young for the draws",
        "replay: {buffer_prompts: 64, prompts_per_step: 32, max_age_steps: 1}\n",
        "replay.max_age_steps",
        ("fewer than the 32", "replay.prompts_per_step", "batch.prompts_per_step"),
        "replay:",
    ),
    bad(
        "older than the buffer",
        "replay: {buffer_prompts: 32, prompts_per_step: 8, max_age_steps: 2}\n",
        "replay.max_age_steps",
        ("no effect", "last 2 steps", "replay.buffer_prompts"),
        "replay:",
    ),
    bad(
        "replay without a ratio",
        "replay: {buffer_prompts: 32, prompts_per_step: 8}\n",
        "replay",
        ("no ratio", "algorithm.policy_loss.loss_mode", "algorithm.rollout_correction.rollout_is (default)"),
        "replay:",
        PPO.replace(GAE, GAE + "  policy_loss: {loss_mode: gpg}\n"),
    ),
    bad(
        "demonstrations for fewer than all replicas",
        f"ptx:\n  coef: 0.1\n  samples_per_update: 1\n{DEMONSTRATIONS}",
        "ptx.samples_per_update",
        ("2 data-parallel replicas", "actor.parallel"),
        "  samples_per_update: 1",
        PPO.replace("  nproc: 4", "  nproc: 8"),
    ),
    bad(
        "demonstrations that leave no room",
        "ptx:\n  coef: 0.1\n  samples_per_update: 4\n  data: {train: train.jsonl, max_prompt_tokens: 64}\n",
        "ptx.data.max_prompt_tokens",
        ("no room for answers", "model.path"),
        "  data: {train: train.jsonl, max_prompt_tokens: 64}",
    ),
]
