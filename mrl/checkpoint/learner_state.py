"""Learner state in Megatron's sharded form: model chunks, main parameters, Adam's moments, update counters.

Learning rates, betas and weight decay come from the configuration and are not stored: a checkpoint holds the number of
updates, from which the schedule follows. So the optimizer's part does not depend on how Megatron splits it (one
optimizer without expert parallelism; with it, one for dense and one for expert parameters).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mrl import platform
from mrl.checkpoint.optimizer_shards import optimizer_shards, weight_shards
from mrl.learner import Learner
from mrl.learner.optimizer import create_optimizer_state, requantize_weights
from mrl.learner.policy_copy import PolicyCopy
from mrl.weights.model.state import fill, sharded_adapters

ADAM_UPDATES = "adam_updates"
SCHEDULE_UPDATES = "schedule_updates"


def state_to_save(learner: Learner) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns this rank's state of the learner, uncopied, and the counters, which are equal on every rank.

    Offloaded tensors are returned from host memory. Call it inside the learner's mesh.
    """
    create_optimizer_state(learner.optimizer)
    models = _models(learner, _metadata(learner))
    shards = optimizer_shards(learner.optimizer, models, learner.memory.read)
    updates = learner.schedule.num_steps  # the schedule skips skipped updates too
    counters = {ADAM_UPDATES: updates, SCHEDULE_UPDATES: updates}
    return {**models, "optimizer": shards}, counters


class StateToLoad:
    """Buffers for a stored state, under the learner's layout. Construct and use inside its mesh."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        metadata = _metadata(learner)
        learner.memory.require("all", "loading a checkpoint")
        create_optimizer_state(learner.optimizer)
        self.models = _models(learner, metadata)
        whole = learner.optimizer.sharded_state_dict(self.models, is_loading=True, metadata=metadata)
        self._parts: list[dict[str, Any]] = list(whole.values()) if 0 in whole else [whole]

    def sharded(self) -> dict[str, Any]:
        """Returns the sharded state that Megatron fills."""
        return {**self.models, "optimizer": {str(i): part["param_state"] for i, part in enumerate(self._parts)}}

    def restore(self, loaded: dict[str, Any]) -> None:
        """Loads `loaded`: `sharded()` filled, without entries that have no parameter on this rank, and the counters."""
        for (name, room), chunk in zip(self.models.items(), self.learner.bare, strict=True):
            if room:
                fill(chunk, loaded[name])
        states = loaded.get("optimizer", {})
        parts = [{**part, "param_state": states.get(str(i), {})} for i, part in enumerate(self._parts)]
        for part in parts:
            for group in part["optimizer"]["param_groups"]:
                group["step"] = loaded[ADAM_UPDATES]
        optimizer = self.learner.optimizer
        optimizer.load_state_dict(parts[0] if len(parts) == 1 else dict(enumerate(parts)))
        platform.separate_step_tensors(optimizer)
        self.learner.schedule.num_steps = loaded[SCHEDULE_UPDATES]
        self.learner.schedule.step(0)
        requantize_weights(optimizer, self.learner.chunks)


def copy_shards(copy: PolicyCopy) -> dict[str, Any]:
    """Returns this rank's shards of the copy, uncopied, for writing or for reading into.

    Call it inside its learner's mesh.
    """
    learner = copy.learner
    models = _models(learner, _metadata(learner))
    return {"weights": weight_shards(learner.optimizer, models, learner.memory.read, copy.kept)}


def _metadata(learner: Learner) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": learner.mesh.dp_cp_group,
    }


def _models(learner: Learner, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the weights, or only the adapters if the learner has some."""
    if learner.adapters is None:
        return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(learner.bare)}
    of = learner.arch, learner.role, learner.adapters.spec, learner.mesh
    return {f"model{i}": sharded_adapters(chunk, *of) for i, chunk in enumerate(learner.bare)}


def tied_copies_are_equal(learner: Learner) -> bool:
    """Returns True if the first stage's embedding equals the last stage's copy; True on other stages. Collective over
    both.

    Training keeps them equal only if they start equal, and nothing else detects a difference.
    """
    if learner.role == "critic" or not learner.arch.tied_embeddings or learner.mesh.pp == 1:
        return True
    if not (learner.mesh.is_first_stage or learner.mesh.is_last_stage):
        return True
    chunk = learner.bare[0] if learner.mesh.is_first_stage else learner.bare[-1]
    weight = chunk.shared_embedding_or_output_weight().detach().float()
    largest = weight.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=chunk.embd_group)
    return torch.equal(largest, weight)
