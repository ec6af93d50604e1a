"""Building blocks of the checkpoint checks: learners under a layout, updates, comparisons, simulated full disks."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from gradients import make_rollout, parse  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.checkpoint import Checkpointable, Saver, torch_dist  # noqa: E402
from mrl.config.schema import CheckpointConfig, OptimizerConfig, TrainConfig, ValueLossConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Meshes, rank, world_size  # noqa: E402
from tests.helpers.stored import differences  # noqa: E402

OPTIMIZER = OptimizerConfig(lr=2e-2, warmup_steps=6, weight_decay=0.1)  # still in the warm-up at the save
Weights = dict[str, torch.Tensor]


class World:
    def __init__(self, work: Path, tied: str, moe: str, other: str) -> None:
        self.work, self.tied, self.moe, self.other = work, tied, moe, other
        self.meshes = Meshes(120)

    def learner(self, role: str, model: str, layout: str, seed: int, dtype: torch.dtype = torch.float32) -> Learner:
        mesh = self.meshes.get(parse(layout))
        train = TrainConfig(parallel=mesh.cfg, optimizer=OPTIMIZER, max_tokens_per_microbatch=128)
        return Learner(role, load_arch(model), model, train, mesh, dtype=dtype, seed=seed, from_scratch=True)  # type: ignore[arg-type]

    def pair(self, layout: str, seed: int) -> dict[str, Learner]:
        return self.both(self.tied, layout, seed)

    def both(self, model: str, layout: str, seed: int) -> dict[str, Learner]:
        return {
            "actor": self.learner("policy", model, layout, seed),
            "critic": self.learner("critic", model, layout, seed),
        }


def train(learners: dict[str, Learner], updates: range) -> None:
    """Trains the learners by some updates. The samples of update k depend only on k."""
    for learner in learners.values():
        rollout = make_rollout(learner.arch.vocab_size)
        n = rollout.num_response_tokens
        weights, zeros = torch.full((n,), 1 / n), torch.zeros(n)
        for k in updates:
            ids = [i for i in range(rollout.num_samples) if i % 3 != k % 3]
            noise = torch.randn(n, generator=torch.Generator().manual_seed(k))
            loss = (
                losses.cross_entropy(weights)
                if learner.role == "policy"
                else losses.value(ValueLossConfig(), zeros, noise, weights, weights)
            )
            learner.backward(rollout, ids, loss, 1.0)
            learner.step()


def save(
    run: Path,
    step: int,
    learners: Mapping[str, Checkpointable],
    state: dict[str, Any],
    keep_last: int,
    kept: Any = None,
) -> Path:
    """Saves a checkpoint, waits until it is complete and returns its path."""
    saver = Saver(run, CheckpointConfig(keep_last=keep_last, timeout_s=120), lambda written: None)
    saver.save(step, learners, state, kept)
    saver.wait()
    return run / "checkpoints" / f"step_{step}"


def weights_of(learners: dict[str, Learner]) -> Weights:
    """Returns all weights by learner and Hugging Face name, on every rank."""
    mine: Weights = {}
    for name, learner in learners.items():
        with learner.mesh.active():
            mine |= {f"{name}.{key}": tensor.clone() for key, tensor in learner.exporter.stream()}
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, mine)
    return {key: tensor for box in boxes for key, tensor in box.items()}


def error(got: Weights, want: Weights) -> float:
    """Returns the worst relative L2 error of a tensor; 0.0 only if all tensors are bitwise equal."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    if all(torch.equal(got[name], want[name]) for name in want):
        return 0.0
    return max(float((got[n].double() - w.double()).norm() / w.double().norm()) for n, w in want.items()) or 1e-30


def stored_difference(a: Path, b: Path, vocab: int) -> dict[str, float]:
    """Returns the largest absolute difference of two checkpoints by kind of tensor, on rank 0; else an empty dict."""
    worst: dict[str, float] = {}
    found = differences(a, b, vocab, lambda x, y: float((x - y).abs().max())) if rank() == 0 else {}
    for (_, kind), difference in found.items():
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


def report(case: str, **values: Any) -> None:
    if rank() == 0:
        print(json.dumps({"case": case, **values}), flush=True)


def same_everywhere(action: Callable[[], Any]) -> str:
    """Returns the message of the CheckpointError that `action` raises. The message must be the same on every rank."""
    try:
        action()
        message = "no error"
    except checkpoint.CheckpointError as raised:
        message = str(raised)
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, message)
    assert len(set(boxes)) == 1, boxes
    return message


def min_change(a: Weights, b: Weights) -> float:
    """Returns the least relative change of a tensor."""
    return min(float((a[n].double() - b[n].double()).norm() / b[n].double().norm()) for n in a)


@contextlib.contextmanager
def held_up() -> Iterator[Callable[[], None]]:
    """Blocks all writes of files until the yielded function is called."""
    go, write = threading.Event(), torch_dist.ShardedWrite.write

    def later(shards: torch_dist.ShardedWrite) -> Any:
        assert go.wait(100)
        return write(shards)

    torch_dist.ShardedWrite.write = later  # type: ignore[method-assign]
    try:
        yield go.set
    finally:
        go.set()
        torch_dist.ShardedWrite.write = write  # type: ignore[method-assign]


@contextlib.contextmanager
def limited_files(on_rank: int) -> Iterator[None]:
    """Limits files that rank `on_rank` writes to 2 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def vocab_of(learners: dict[str, Learner]) -> int:
    return next(iter(learners.values())).arch.vocab_size
