"""Run under torchrun with one process: PPO on a task with delayed reward, with a critic and with a frozen zero one.

Usage: critic.py MODEL_DIR RESULT_JSON SEED MODE [MODE ...]. A mode is `critic`, `zero` (the critic is frozen at 0) or
`minibatches` (a critic, and two updates of half the samples per step). RESULT_JSON gets {mode: {metric: [its value at
every step]}}; "solved" is the policy's exact probability of solving the task.

The task: a prompt is one of 8 keys, a response 6 tokens out of 8. Only the first token matters: each key has one right
answer, worth 1, paid after the last token. The reward also has a constant of the key, from -4 to 4, whatever the
response. So most of the variance of the return comes from the prompt, not from the policy, and a critic can learn it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from mrl.config.schema import RLConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.data import pack  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.models.batch import ModelBatch  # noqa: E402
from mrl.parallel import Mesh, Meshes  # noqa: E402
from mrl.trainers.rl.loop import experience_of, update  # noqa: E402
from mrl.trainers.rl.run import RLRun  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

STEPS, SAMPLES, KEYS, RESPONSE = 60, 128, 8, 6
RIGHT = torch.tensor([3, 6, 1, 4, 7, 2, 5, 0])  # the right first token for each key
LEVEL = torch.tensor([1.0, -4.0, 3.0, -2.0, 4.0, -1.0, 2.0, -3.0])  # the constant that a key adds to the reward
MODES: dict[str, dict[str, Any]] = {"critic": {}, "zero": {}, "minibatches": {"samples_per_minibatch": SAMPLES // 2}}


def config(mode: str, seed: int) -> RLConfig:
    return RLConfig.model_validate(
        {
            "trainer": "rl",
            "run": {"name": mode, "seed": seed, "steps": STEPS},
            "model": {"path": "-", "dtype": "float32", "from_scratch": True},
            "data": {"train": "-"},
            "reward": {"function": "exact_match"},
            "actor": {"optimizer": {"lr": 3e-3, "warmup_steps": 5, "beta2": 0.99}},
            "critic": {"optimizer": {"lr": 1e-2, "beta2": 0.99}, "warmup_steps": 5, "frozen": mode == "zero"},
            "batch": {"prompts_per_step": SAMPLES, **MODES[mode]},
            "algorithm": {"adv_estimator": "gae", "lam": 0.95, "value_loss": {"cliprange_value": 10.0}},
        }
    )


def open_run(cfg: RLConfig, model_dir: str, mesh: Mesh) -> RLRun:
    build = partial(Learner, mesh=mesh, dtype=torch.float32, seed=cfg.run.seed, from_scratch=True)
    arch = load_arch(model_dir)
    assert cfg.critic is not None
    actor = build("policy", arch, model_dir, cfg.actor)
    critic = build("critic", arch, model_dir, cfg.critic, trainable=not cfg.critic.frozen)
    return bare_run(cfg, actor, critic)


@torch.no_grad()
def next_token_log_probs(actor: Learner, sequences: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs of the next token, [B, vocabulary], after tokens [B, L]."""
    count, length = sequences.shape
    rows = torch.cat([sequences, torch.zeros(count, 1, dtype=torch.int64)], 1)  # `pack` needs a token to predict
    batch = pack(rollout_of(rows, length, torch.zeros(count), torch.zeros(count), 0), list(range(count)), 1, 0, 1)
    with actor.mesh.active():
        made = ModelBatch.make(batch, actor.mesh, 1.0, "logits")
        logits = actor.bare[0](batch.tokens, batch.position_ids, None, packed_seq_params=made)
    return logits[batch.response_indices.argsort(), : actor.arch.vocab_size].log_softmax(-1)


def rollout_of(rows: torch.Tensor, prompt: int, scores: torch.Tensor, log_probs: torch.Tensor, step: int) -> Rollout:
    count, length = rows.shape
    lens = torch.full((count,), length)
    return Rollout(
        step, rows.flatten(), lens, torch.full((count,), prompt), torch.arange(count), scores, log_probs.flatten()
    )


def sample(actor: Learner, step: int, generator: torch.Generator) -> Rollout:
    keys = torch.randint(0, KEYS, (SAMPLES,), generator=generator)
    rows, log_probs = keys[:, None], []
    for _ in range(RESPONSE):
        follows = next_token_log_probs(actor, rows)
        token = torch.multinomial(follows.exp(), 1, generator=generator)
        rows = torch.cat([rows, token], 1)
        log_probs.append(follows.gather(1, token))
    scores = LEVEL[keys] + (rows[:, 1] == RIGHT[keys]).float()
    return rollout_of(rows, 1, scores, torch.cat(log_probs, 1), step)


def solved(actor: Learner) -> float:
    """Returns the probability of the right first token, averaged over the keys."""
    log_probs = next_token_log_probs(actor, torch.arange(KEYS)[:, None])
    return float(log_probs.gather(1, RIGHT[:, None]).exp().mean())


def train(mode: str, seed: int, model_dir: str, mesh: Mesh) -> dict[str, list[float]]:
    cfg = config(mode, seed)
    run, generator = open_run(cfg, model_dir, mesh), torch.Generator().manual_seed(seed)
    assert cfg.critic is not None
    history: dict[str, list[float]] = {}
    for step in range(STEPS):
        exact = {"solved": solved(run.actor)}
        rollout = sample(run.actor, step, generator)
        trains_actor = step >= cfg.critic.warmup_steps
        experience, gaps = experience_of(run, rollout, trains_actor)
        metrics = exact | gaps | update(run, experience, trains_actor)
        for name, value in metrics.items():
            history.setdefault(name, []).append(value)
    return history


def main() -> None:
    model_dir, result_file, seed, *modes = sys.argv[1:]
    platform.init_process_group(120)
    mesh = Meshes(120).get(config("critic", 0).actor.parallel)
    results = {mode: train(mode, int(seed), model_dir, mesh) for mode in modes}
    Path(result_file).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
