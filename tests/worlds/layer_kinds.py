"""Run with 1 process: checkpoints between kinds of layer. Usage: layer_kinds.py WORK DENSE MOE

The other kind is imitated: norms that keep an object beside their weight, as transformer-engine's do. A line of JSON
a case: what differs after a load and after another update, and how many such objects the two models have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_tools import World, error, save, train, weights_of

from mrl import checkpoint, platform
from mrl.learner import Learner
from mrl.models import specs
from mrl.models.norm import RMSNorm


class NormWithState(RMSNorm):
    """As transformer-engine's without fp8: an object that says nothing, and that a strict load asks for."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


def learner(world: World, model: str, kind: str, seed: int) -> dict[str, Learner]:
    vars(specs)["RMSNorm"] = NormWithState if kind == "other" else RMSNorm
    return {"actor": world.learner("policy", model, "dp1", seed)}


def objects(learners: dict[str, Learner]) -> int:
    return sum("_extra_state" in key for key in learners["actor"].bare[0].state_dict())


def check(world: World, model: str, source: str, target: str) -> dict[str, Any]:
    """Two updates, a checkpoint, and a third update by the learner that has made it and by one of the other kind."""
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
    }


def main() -> None:
    platform.init_process_group(120.0)
    work, dense, moe = sys.argv[1:]
    world = World(Path(work), dense, moe, dense)
    for model in (dense, moe):
        for source, target in (("plain", "other"), ("other", "plain")):
            print(json.dumps({"case": f"{Path(model).name} {source}", **check(world, model, source, target)}))
    torch.distributed.destroy_process_group()


main()
