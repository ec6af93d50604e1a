"""Run under torchrun: updates of the actor with corrections (importance weights) and restrictions (masks, clipping).

Usage: policy_update.py MODEL_DIR RESULT_JSON LAYOUT. RESULT_JSON gets {case: metrics of an update of all samples at
learning rate 0, or of a step}; see tests/distributed/algo/test_policy_update.py for the expected values.
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
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.trainers.rl.experience import forward_passes, make_experience  # noqa: E402
from mrl.trainers.rl.loop import update, update_actor  # noqa: E402
from mrl.trainers.rl.policy_update import policy_targets  # noqa: E402
from mrl.trainers.rl.run import RLRun  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402
from tests.worlds.gradients import SEQ, TEN_STEPS, TIMEOUT_S, build, make_rollout, parse  # noqa: E402

EVERY = range(len(SEQ))
REJECTED = 4  # a sample
Metrics = dict[str, float]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
REJECTION = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 2.0}


class World:
    def __init__(self, model_dir: str, layout: str) -> None:
        mesh = Meshes(TIMEOUT_S).get(parse(layout))
        self.build = lambda lr: build(
            "policy",
            model_dir,
            mesh,
            TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=80, optimizer=OptimizerConfig(lr=lr)),
        )
        self.still = self.build(0.0)

    def experience(
        self, actor: Learner, rollout: Rollout, *, single: bool = False, **settings: Any
    ) -> tuple[RLRun, Any]:
        """Returns the run and its experience."""
        minibatch = rollout.num_samples if single else 5
        sizes = {"prompts_per_step": 5, "samples_per_prompt": 2, "samples_per_minibatch": minibatch}
        batch = sizes | settings.pop("batch", {})
        algorithm = {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9, "whiten_advantages": False} | settings
        cfg = RLConfig.model_validate(TEN_STEPS | {"algorithm": algorithm, "batch": batch})
        single = single and cfg.batch.epochs_per_step == 1
        run = bare_run(cfg, actor, None)
        passes = forward_passes(cfg.algorithm, rollout, 1.0, actor, single_update=single)
        return run, make_experience(cfg.algorithm, rollout, passes, 0.0)

    def rollout(self) -> Rollout:
        rollout = make_rollout(self.still.arch.vocab_size)
        return replace(rollout, rollout_log_probs=self.still.log_probs(rollout, 1.0)[0])

    def one(self, rollout: Rollout, **settings: Any) -> Metrics:
        run, experience = self.experience(self.still, rollout, **settings)
        return update_actor(run, experience, range(rollout.num_samples), 0) | experience.metrics


def shifted(rollout: Rollout, by: float, sample: int | None = None) -> Rollout:
    """Returns the rollout with the engine's log-probs lower by `by`, everywhere or in one sample."""
    where = torch.ones(rollout.num_samples) if sample is None else torch.eye(rollout.num_samples)[sample]
    return replace(
        rollout, rollout_log_probs=rollout.rollout_log_probs - by * where.repeat_interleave(rollout.response_lens)
    )


def without(run: RLRun, exp: Any, sample: int) -> Metrics:
    """Returns the metrics of an update without the sample, with the others' advantages unchanged."""
    others = torch.tensor([i for i in EVERY if i != sample])
    smaller = exp.pick(others)
    return update_actor(run, smaller, range(len(others)), 0)


def corrections(world: World) -> dict[str, Metrics]:
    rollout = world.rollout()
    tokens, sequences = {"rollout_is": "token", "rollout_is_threshold": 3.0}, {"rollout_is": "sequence"}
    far = shifted(rollout, -4.0, REJECTED)
    found = {
        "plain": world.one(rollout),
        "weights 1.5": world.one(shifted(rollout, 0.4054651), rollout_correction=tokens),
        "weights cut to 2": world.one(shifted(rollout, 9.0), rollout_correction=sequences),
    }
    for mode in ("vanilla", "gspo"):
        loss = {"loss_mode": mode, **CLIP}
        found[f"{mode} rejects"] = world.one(far, rollout_correction=REJECTION, policy_loss=loss)
        run, exp = world.experience(world.still, rollout, policy_loss=loss)
        found[f"{mode} without"] = without(run, exp, REJECTED)
    geo_mean, lower = {"loss_mode": "geo_mean", **CLIP}, shifted(rollout, 0.4054651)
    found["geo_mean"] = world.one(rollout, policy_loss=geo_mean)
    found["geo_mean, weights 1.5"] = world.one(lower, policy_loss=geo_mean, rollout_correction=tokens)
    found["everything rejected"] = world.one(shifted(rollout, 4.0), rollout_correction=REJECTION)
    return found


def high_entropy(world: World) -> dict[str, Metrics]:
    rollout = world.rollout()
    run, exp = world.experience(world.still, rollout, policy_loss={"high_entropy_token_ratio": 0.2})
    targets = policy_targets(run, exp, 0)
    taken = exp.entropies >= exp.entropies.sort(descending=True).values[int(0.2 * exp.entropies.numel()) - 1]
    want = {
        "actor/pg_loss": float(-(exp.advantages * taken).sum() / taken.numel()),
        "share": float((targets.policy_weights > 0).float().mean()),
    }
    return {"high entropy": update_actor(run, exp, EVERY, 0), "high entropy by hand": want}


def left_behind(world: World) -> dict[str, Metrics]:
    """Checks that a bad response is masked if the engine prefers it, and a good one, more than the trainer does."""
    rollout = world.rollout()
    bad, good = (int(scores.argmin()) for scores in (rollout.scores, -rollout.scores))
    rollout = shifted(shifted(rollout, -2.0, bad), -2.0, good)
    run, exp = world.experience(world.still, rollout, policy_loss={"off_policy_mask_threshold": 1.0})
    of_bad = torch.arange(rollout.num_samples).repeat_interleave(rollout.response_lens) == bad
    want = {
        "actor/pg_loss": float(-(exp.advantages * ~of_bad).mean()),
        "actor/off_policy_masked": float(of_bad.float().mean()),
    }
    return {"left behind": update_actor(run, exp, EVERY, 0), "left behind by hand": want}


def mismatches(world: World) -> dict[str, Metrics]:
    rollout = make_rollout(world.still.arch.vocab_size)
    found = {}
    for single in (True, False):
        run, exp = world.experience(world.still, rollout, single=single)
        assert (exp.trainer_log_probs is None) == single
        found[f"mismatch {single}"] = update(run, exp, trains_actor=True)
        if exp.trainer_log_probs is not None:
            found[f"mismatch {single}"] |= run.mismatch.check(rollout, exp.trainer_log_probs, exp.is_new)
    return found


def controls(world: World) -> dict[str, Metrics]:
    rollout = world.rollout()
    run, exp = world.experience(world.still, rollout, ratio_threshold=10.0, policy_loss={"loss_mode": "cispo", **CLIP})
    far = replace(exp, old_log_probs=exp.old_log_probs - 3.0)
    near = replace(exp, old_log_probs=exp.old_log_probs - 2.0)
    found = {"ratio 20": update_actor(run, far, EVERY, 1), "ratio 7": update_actor(run, near, EVERY, 1)}
    bad = replace(rollout, scores=-rollout.scores.abs())  # so that all log-probs decrease
    for name, target in (("stops", 1e-3), ("goes on", 1e3)):
        run, exp = world.experience(world.build(0.05), bad, batch={"epochs_per_step": 3}, target_kl=target)
        found[name] = update(run, exp, trains_actor=True)
    return found


def shuffles(worlds: dict[str, World]) -> dict[str, Metrics]:
    """Trains three passes in mini-batches of five samples, under each layout."""
    found = {}
    for layout, world in worlds.items():
        for shuffle in (False, True):
            batch = {"epochs_per_step": 3, "shuffle_minibatches": shuffle}
            run, exp = world.experience(world.build(0.05), world.rollout(), batch=batch)
            found[f"{layout}, shuffled: {shuffle}"] = update(run, exp, trains_actor=True)
    return found


def main() -> None:
    model_dir, result_file, layout = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    world = World(model_dir, layout)
    found = corrections(world) | high_entropy(world) | left_behind(world) | mismatches(world) | controls(world)
    found |= shuffles({layout: world, "dp2": World(model_dir, "dp2")})
    if rank() == 0:
        Path(result_file).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
