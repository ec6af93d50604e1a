"""Run under torchrun with 4 processes: updates by Muon and Adam against float64, under other layouts, and resumed.

Usage: muon.py WORK_DIR RESULT_JSON NAME=MODEL=LAYOUT,LAYOUT ... RESULT_JSON gets, by NAME LAYOUT: the worst relative
error of a tensor's update against float64; the error of the weights after all updates against the model's first layout;
and the same error for runs resumed from a checkpoint after half of the updates, under the checkpoint's layout and under
the model's first one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from checkpoint_tools import Weights, error, save, train, weights_of  # noqa: E402
from gradients import build, everywhere, make_rollout, overlap, parse  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.config.schema import MuonConfig, OptimizerConfig, TrainConfig  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.learner.muon import COEFFICIENTS  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402

UPDATES = 4
MUON = MuonConfig(lr_factor=0.5)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4, weight_decay=0.1, muon=MUON)
ADAMS = ("embed_tokens.weight", "lm_head.weight", "score.weight", "bias")  # besides vectors, Adam updates these


class Reference:
    """The updates in float64 on whole tensors by Hugging Face name, with Newton-Schulz on singular values."""

    def __init__(self) -> None:
        self.means: Weights = {}
        self.squares: Weights = {}
        self.count = 0

    def updates(self, weights: Weights, gradients: Weights) -> Weights:
        self.count += 1
        wide = {name: gradient.double() for name, gradient in gradients.items()}
        norm = float(torch.stack([gradient.square().sum() for gradient in wide.values()]).sum().sqrt())
        clip = min(1.0, OPTIMIZER.clip_grad / (norm + 1e-6))
        return {name: self._update(name, weights[name].double(), clip * gradient) for name, gradient in wide.items()}

    def _update(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(gradient)
        if name.endswith("e_score_correction_bias"):
            return zero  # frozen
        decay = -OPTIMIZER.lr * OPTIMIZER.weight_decay * weight if gradient.dim() > 1 and "bias" not in name else zero
        mean, square = self.means.get(name, zero), self.squares.get(name, zero)
        if gradient.dim() > 1 and not name.endswith(ADAMS):
            mean = self.means[name] = MUON.momentum * mean + (1 - MUON.momentum) * gradient
            ahead = MUON.momentum * mean + (1 - MUON.momentum) * gradient
            size = OPTIMIZER.lr * 0.2 * max(gradient.shape[-2:]) ** 0.5
            return MUON.lr_factor * (decay - size * by_singular_values(ahead))
        self.means[name] = mean = OPTIMIZER.beta1 * mean + (1 - OPTIMIZER.beta1) * gradient
        self.squares[name] = square = OPTIMIZER.beta2 * square + (1 - OPTIMIZER.beta2) * gradient.square()
        corrected = (square / (1 - OPTIMIZER.beta2**self.count)).sqrt() + OPTIMIZER.eps
        return decay - OPTIMIZER.lr * mean / (1 - OPTIMIZER.beta1**self.count) / corrected


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Applies the Newton-Schulz iterations to the singular values; they change each of these independently."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-300)
    a, b, c = COEFFICIENTS
    for _ in range(MUON.iterations):
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v


def make(model: str, layout: str, meshes: Meshes) -> dict[str, Learner]:
    name, _, option = layout.partition("/")
    overlap(option)
    mesh = meshes.get(parse(name))
    settings = TrainConfig(parallel=mesh.cfg, optimizer=OPTIMIZER, max_tokens_per_microbatch=128)
    return {"actor": build("policy", model, mesh, settings), "critic": build("critic", model, mesh, settings)}


def against_float64(learner: Learner) -> tuple[float, str]:
    """Returns the worst error of UPDATES updates, relative to the tensor's update, and the tensor."""
    reference, worst, rollout = Reference(), (0.0, ""), make_rollout(learner.arch.vocab_size)
    n = rollout.num_response_tokens
    for k in range(UPDATES):
        ids = [i for i in range(rollout.num_samples) if i % 3 != k % 3]
        learner.backward(rollout, ids, losses.cross_entropy(torch.full((n,), 1 / n)), 1.0, full_gradients=True)
        gradients = everywhere(learner, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))
        before = everywhere(learner, torch.Tensor.detach)
        learner.step()
        after = everywhere(learner, torch.Tensor.detach)
        for name, update in reference.updates(before, gradients).items():
            wrong = (after[name].double() - before[name].double() - update).norm() / (update.norm() + 1e-12)
            worst = max(worst, (float(wrong), name))
    return worst


def check(case: str, model: str, layouts: list[str], work: Path, meshes: Meshes) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    ends: list[Weights] = []
    for layout in layouts:
        wrong, tensor = against_float64(make(model, layout, meshes)["actor"])
        learners = make(model, layout, meshes)
        train(learners, range(UPDATES // 2))
        saved = save(work / f"{case}_{layout.partition('/')[0]}", 1, learners, {}, keep_last=1)
        train(learners, range(UPDATES // 2, UPDATES))
        ends.append(weights_of(learners))
        continued = []
        for other in (layout, layouts[0]):
            fresh = make(model, other, meshes)
            checkpoint.load(saved, fresh)
            train(fresh, range(UPDATES // 2, UPDATES))
            continued.append(error(weights_of(fresh), ends[-1]))
        results[f"{case} {layout}"] = {
            "float64": wrong,
            "tensor": tensor,
            "layouts": error(ends[-1], ends[0]),
            "resumed": continued[0],
            "resharded": continued[1],
        }
    return results


def main() -> None:
    platform.init_process_group(600)
    meshes, results = Meshes(600), {}
    for argument in sys.argv[3:]:
        case, model, layouts = argument.split("=")
        results |= check(case, model, layouts.split(","), Path(sys.argv[1]), meshes)
    if rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


main()
