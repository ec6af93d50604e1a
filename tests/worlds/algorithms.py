"""Run under torchrun: some steps of every algorithm on the same rollouts, under one layout.

Usage: algorithms.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT. The layout `one` writes the rollouts and the weights
of each algorithm to the reference file. Another layout trains on those rollouts and is compared with those weights:
RESULT_JSON gets {algorithm: [worst relative difference of a tensor, its name, least relative change of a tensor since
the start, true if the weights equal those of PPO's loss]}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from mrl.config.schema import OptimizerConfig, RLConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.options.estimators import ESTIMATORS  # noqa: E402
from mrl.options.losses import POLICY_LOSSES  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from mrl.trainers.rl.experience import forward_passes, make_experience  # noqa: E402
from mrl.trainers.rl.loop import update  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402
from tests.helpers.slow import RUN_SLOW  # noqa: E402
from tests.worlds.gradients import TEN_STEPS, TIMEOUT_S, build, compare, everywhere, make_rollout, parse  # noqa: E402

STEPS = 5 if RUN_SLOW else 2  # in the second step the critic's values are no longer zero
Weights = dict[str, torch.Tensor]
ESTIMATOR_SETTINGS: dict[str, dict[str, Any]] = {
    "gae": {"lam": 0.95, "value_loss": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 10.0}},
    "gpg": {"gpg_f_norm": 2.0},
    "gdpo": {"gdpo_reward_keys": ("score", "form"), "gdpo_reward_weights": (1.0, 0.5)},
    "reinforce_plus_plus": {"gamma": 0.99},
}
LOSS_SETTINGS: dict[str, dict[str, Any]] = {  # each loss's own terms have an effect
    "gspo": {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.1},
    "geo_mean": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    "cispo": {"clip_ratio_low": 0.2},
    "dppo_tv": {"divergence_low": 0.01, "divergence_high": 0.01},
    "dppo_kl": {"divergence_low": 1e-3, "divergence_high": 1e-3},
    "vespo": {"vespo_k_pos": 0.2, "vespo_k_neg": 0.3, "vespo_lambda_pos": 0.1, "vespo_lambda_neg": 0.2},
}
OFF_POLICY = 0.3  # standard deviation of the noise in the engine's log-probs: many ratios are clipped
RECIPES: dict[str, dict[str, Any]] = {
    "dapo": {"policy_loss": {"clip_ratio_high": 0.28}, "old_log_probs": "engine"},
    "dr_grpo": {"norm_adv_by_std_in_grpo": False, "policy_loss": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    "kl_cov from the old policy on": {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.1}},
    "high entropy tokens": {"policy_loss": {"high_entropy_token_ratio": 0.2}},
    "truncated importance weights": {"rollout_correction": {"rollout_is": "token"}},
    "rejected responses": {
        "rollout_correction": {"rollout_is": "sequence", "rollout_rs": "seq_max_k3", "rollout_rs_threshold": "20"}
    },
    "off-policy sequence mask": {"policy_loss": {"off_policy_mask_threshold": 0.01}},
    "bias-corrected KL": {"kl": {"use_in_loss": True, "coef": 0.5, "bias_correction": True}},
    "resampled, whitened in scale only": {
        "adv_estimator": "reinforce_plus_plus",
        "whiten_shift_mean": False,
        "pf_ppo": {"reweight_method": "pow"},
    },
    "token baseline of weighted samples": {
        "adv_estimator": "optimal_token_baseline",
        "zero_tail": True,
        "rollout_correction": {"rollout_is": "token"},
    },
    "gspo by tokens": {
        "old_log_probs": "engine",
        "policy_loss": {"loss_mode": "gspo", "loss_agg_mode": "token-mean", **LOSS_SETTINGS["gspo"]},
    },
    "geo_mean with weights of tokens": {
        "policy_loss": {"loss_mode": "geo_mean", **LOSS_SETTINGS["geo_mean"]},
        "rollout_correction": {"rollout_is": "token"},
    },
}


class EnginesPolicy:
    """A reference whose log-probs are the engine's."""

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        return rollout.rollout_log_probs, torch.zeros_like(rollout.rollout_log_probs)


def algorithms() -> dict[str, dict[str, Any]]:
    named = [name for name in ESTIMATORS if name != "function"]
    found = {name: {"adv_estimator": name, **ESTIMATOR_SETTINGS.get(name, {})} for name in named}
    for mode in (mode for mode in POLICY_LOSSES if mode != "function"):
        loss = {"loss_mode": mode, **LOSS_SETTINGS.get(mode, {})}
        found[f"loss {mode}"] = {"adv_estimator": "grpo", "policy_loss": loss, "old_log_probs": "engine"}
    return found | {name: {"adv_estimator": "grpo", **recipe} for name, recipe in RECIPES.items()}


def make_rollouts(actor: Learner) -> list[Rollout]:
    """Returns rollouts from a policy near the actor's, with everything that an estimator may need."""
    rollouts = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(100 + step)
        rollout = make_rollout(actor.arch.vocab_size, seed=step)
        log_probs, _ = actor.log_probs(rollout, 1.0)
        parts = torch.stack([rollout.scores, 100 * torch.rand(rollout.num_samples, generator=g)], 1)
        rollouts.append(
            replace(
                rollout,
                step=step,
                score_parts=parts,
                greedy_scores=torch.randn(rollout.num_samples, generator=g)[rollout.group],
                rollout_log_probs=log_probs + OFF_POLICY * torch.randn(log_probs.shape, generator=g),
            )
        )
    return rollouts


class Trainer:
    """Actor and critic under one layout. Every algorithm starts from the same weights."""

    def __init__(self, model_dir: str, mesh: Mesh) -> None:
        self.mesh = mesh
        optimizer = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
        train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=80, optimizer=optimizer)
        self.actor, self.critic = (build(role, model_dir, mesh, train) for role in ("policy", "critic"))
        self.first = [[p.detach().clone() for p in parameters(each)] for each in (self.actor, self.critic)]

    def start_again(self) -> None:
        for learner, first in zip((self.actor, self.critic), self.first, strict=True):
            for parameter, value in zip(parameters(learner), first, strict=True):
                parameter.data.copy_(value)
            learner.optimizer.reload_model_params()
            for part in learner.optimizer.chained_optimizers:
                part.optimizer.state.clear()

    def weights_after(self, algorithm: dict[str, Any], rollouts: list[Rollout]) -> Weights:
        """Returns the actor's weights after all steps of two updates each."""
        self.start_again()
        critic = self.critic if algorithm["adv_estimator"] == "gae" else None
        settings = TEN_STEPS | {"algorithm": algorithm, "critic": {} if critic else None}
        cfg = RLConfig.model_validate(settings)
        run = bare_run(cfg, self.actor, critic)
        ref: Any = EnginesPolicy() if cfg.algorithm.kl.use_in_loss else None
        for rollout in rollouts:
            passes = forward_passes(cfg.algorithm, rollout, 1.0, self.actor, critic, ref)
            experience = make_experience(cfg.algorithm, rollout, passes, 0.0)
            update(run, experience, trains_actor=True)
        return self.weights()

    def weights(self) -> Weights:
        return everywhere(self.actor, torch.Tensor.detach)


def parameters(learner: Learner) -> list[torch.nn.Parameter]:
    return [parameter for chunk in learner.bare for parameter in chunk.parameters()]


def main() -> None:
    model_dir, reference_file, result_file, layout = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    trainer = Trainer(model_dir, Meshes(TIMEOUT_S).get(parse(layout)))
    before, alone = trainer.weights(), layout == "one"
    rollouts, want = (make_rollouts(trainer.actor), {}) if alone else torch.load(reference_file, weights_only=False)
    got = {name: trainer.weights_after(algorithm, rollouts) for name, algorithm in algorithms().items()}
    if alone:
        again = trainer.weights_after(algorithms()["grpo"], rollouts)
        assert all(torch.equal(got["grpo"][name], tensor) for name, tensor in again.items()), "not from the start"
        torch.save((rollouts, got), reference_file)
    elif rank() == 0:
        plain = want["loss vanilla"]
        results = {
            name: [
                *compare((0.0, got[name]), (0.0, want[name]))[1:],
                least_change(before, want[name]),
                same(plain, want[name]),
            ]
            for name in want
        }
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def least_change(before: Weights, after: Weights) -> float:
    return min(float((after[name] - before[name]).norm() / (before[name].norm() + 1e-9)) for name in before)


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


if __name__ == "__main__":
    main()
