"""Run with one process: checkpoints between the layer implementations of CPUs and GPUs. Usage: layer_kinds.py WORK
DENSE MOE

The GPU's layers are imitated: norms with an extra state as transformer-engine's have, without fp8 or with delayed
scaling, and for the dense model a vocabulary that is padded as on GPUs. Prints one line of JSON per case: the
difference after a load and after another update, the number of extra states in both models, and their vocabulary rows.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from checkpoint_tools import World, error, save, train, weights_of

from mrl import checkpoint, platform
from mrl.families.table import VOCAB_ALIGN, VOCAB_ALIGN_GPU
from mrl.learner import Learner
from mrl.models import gpt, specs
from mrl.models.norm import RMSNorm
from mrl.weights.disk.fp8_state import RECIPES


class NormWithState(RMSNorm):
    """A norm like transformer-engine's without fp8: its extra state is empty, but a strict load requires it."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class NormWithScale(RMSNorm):
    """A norm like transformer-engine's with delayed scaling: its scale depends on the past and is stored pickled."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale += 0.01 * self.training
        return super().forward(x) * self.scale

    def get_extra_state(self) -> torch.Tensor:
        state = {
            "recipe": DelayedScaling(),
            "scale_fwd": torch.tensor(self.scale, dtype=torch.float64),
            "extra_fp8_variables": {"num_gemms": 1},
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is not None:
            self.scale = float(pickle.loads(state.numpy().tobytes())["scale_fwd"])


@dataclass
class DelayedScaling:
    margin: int = 0


def learner(world: World, model: str, kind: str, seed: int) -> dict[str, Learner]:
    vars(specs)["RMSNorm"] = NORMS[kind]
    vars(gpt)["VOCAB_ALIGN"] = VOCAB_ALIGN_GPU if kind == "other" and model == world.tied else VOCAB_ALIGN
    return {"actor": world.learner("policy", model, "dp1", seed)}


NORMS = {"plain": RMSNorm, "other": NormWithState, "fp8": NormWithScale}


def objects(learners: dict[str, Learner]) -> int:
    return sum("_extra_state" in key for key in learners["actor"].bare[0].state_dict())


def check(world: World, model: str, source: str, target: str) -> dict[str, Any]:
    """Trains two updates, saves, and compares a third update of the saved learner with one of a learner of the other
    kind that loads the checkpoint."""
    first, second = learner(world, model, source, 1), learner(world, model, target, 2)
    train(first, range(2))
    path = save(world.work / f"{Path(model).name} {source}", 2, first, {}, keep_last=1)
    checkpoint.load(path, second)
    loaded = error(weights_of(second), weights_of(first))
    for learners in (first, second):
        train(learners, range(2, 3))
    return {
        "loaded": loaded,
        "continued": error(weights_of(second), weights_of(first)),
        "objects": objects(first),
        "others": objects(second),
        "rows": [learners["actor"].bare[0].embedding.word_embeddings.weight.size(0) for learners in (first, second)],
    }


def main() -> None:
    DelayedScaling.__module__ = RECIPES
    for name in ("transformer_engine", "transformer_engine.common", RECIPES):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules[RECIPES])["DelayedScaling"] = DelayedScaling
    platform.init_process_group(120.0)
    work, dense, moe = sys.argv[1:]
    world = World(Path(work), dense, moe, dense)
    for model in (dense, moe):
        for source, target in (("plain", "other"), ("other", "plain"), ("fp8", "fp8"))[: 3 if model == dense else 2]:
            print(json.dumps({"case": f"{Path(model).name} {source}", **check(world, model, source, target)}))
    torch.distributed.destroy_process_group()


main()
