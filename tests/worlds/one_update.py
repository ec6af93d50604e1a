"""Run as one process, on its GPU if it has one: a model's outputs, and one update of it.

Usage: one_update.py MODEL_DIR (OUT DTYPE LAYERS any|fixed)... The last word is the order of sums; `fixed` stays set
once it is given. OUT gets log-probs, entropies and the weights after a step of SFT, values and the weights after a step
of a critic, in float32 on the CPU, and the kind of layers in use.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mrl import platform

platform.install()

from gradients import make_rollout  # noqa: E402

from mrl.algo import aggregate  # noqa: E402
from mrl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig, ValueLossConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Meshes  # noqa: E402

# with its usual eps Adam makes a full step even if a gradient is only rounding, such as that of a key's bias
SMOOTH = OptimizerConfig(lr=1e-2, eps=0.1)
MODEL, *WAYS = sys.argv[1:]


def make(role: Any, meshes: Meshes, dtype: str, layers: Any) -> Learner:
    train, mesh = TrainConfig(layers=layers, optimizer=SMOOTH), meshes.get(ParallelConfig())
    return Learner(role, load_arch(MODEL), MODEL, train, mesh, dtype=getattr(torch, dtype), seed=1)


def updated(learner: Learner, rollout: Rollout, loss: losses.Loss) -> dict[str, Any]:
    metrics = learner.backward(rollout, range(rollout.num_samples), loss, 1.0) | learner.step()
    weights = {name: tensor.float().cpu().clone() for name, tensor in learner.exporter.stream()}
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "weights": weights}


def main() -> None:
    platform.init_process_group(120.0)
    meshes = Meshes(120)
    for first in range(0, len(WAYS), 4):
        out, dtype, layers, order = WAYS[first : first + 4]
        if order == "fixed":
            platform.enable_determinism()
        torch.save(one_update(make("policy", meshes, dtype, layers), make("critic", meshes, dtype, layers)), out)
    torch.distributed.destroy_process_group()


def one_update(actor: Learner, critic: Learner) -> dict[str, Any]:
    rollout = make_rollout(actor.arch.vocab_size)
    weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
    log_probs, entropy = actor.log_probs(rollout, 0.7)
    values = critic.values(rollout)
    sft = updated(actor, rollout, losses.cross_entropy(weights))
    returns = torch.linspace(-1, 1, rollout.num_response_tokens)
    of_critic = updated(critic, rollout, losses.value(ValueLossConfig(), values, returns, weights, weights))
    outputs = {"log_probs": log_probs, "entropy": entropy, "values": values}
    kind = actor.bare[0].config.transformer_impl
    return {"outputs": outputs, "actor": sft, "critic": of_critic, "layers": kind}


main()
