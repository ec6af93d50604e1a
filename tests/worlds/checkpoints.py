"""Run under torchrun with 4 processes: save and load under many layouts, and saves and loads that fail.

Usage: checkpoints.py WORK_DIR TIED_MODEL MOE_MODEL OTHER_MODEL. Prints one JSON object a case: {"case": ..., ...}.

The tests ask of each case what a run that did not stop gives: weights when saved, and after more updates.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl import platform

platform.install()

from gradients import make_rollout, parse  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.checkpoint import Saver, learner_state, torch_dist  # noqa: E402
from mrl.config.schema import CheckpointConfig, OptimizerConfig, TrainConfig, ValueLossConfig  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.models import load_arch  # noqa: E402
from mrl.parallel import Meshes, rank, world_size  # noqa: E402

OPTIMIZER = OptimizerConfig(lr=2e-2, warmup_steps=6, weight_decay=0.1)  # still warming up when saved
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
        return {
            "actor": self.learner("policy", self.tied, layout, seed),
            "critic": self.learner("critic", self.tied, layout, seed),
        }


def train(learners: dict[str, Learner], updates: range) -> None:
    """Update k uses samples that follow from k alone."""
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


def save(run: Path, step: int, learners: dict[str, Learner], state: dict[str, Any], keep_last: int) -> Path:
    """Waited for."""
    saver = Saver(run, CheckpointConfig(keep_last=keep_last, timeout_s=120), lambda written: None)
    saver.save(step, learners, state)
    saver.wait()
    return run / "checkpoints" / f"step_{step}"


def weights_of(learners: dict[str, Learner]) -> Weights:
    """All weights by learner and Hugging Face name, on every rank."""
    mine: Weights = {}
    for name, learner in learners.items():
        with learner.mesh.active():
            mine |= {f"{name}.{key}": tensor.clone() for key, tensor in learner.exporter.stream()}
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, mine)
    return {key: tensor for box in boxes for key, tensor in box.items()}


def error(got: Weights, want: Weights) -> float:
    """The worst relative L2 error of a tensor; 0.0 only if all are equal to the bit."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    if all(torch.equal(got[name], want[name]) for name in want):
        return 0.0
    return max(float((got[n].double() - w.double()).norm() / w.double().norm()) for n, w in want.items()) or 1e-30


def stored_difference(a: Path, b: Path, vocab: int) -> dict[str, float]:
    """Largest absolute difference between two checkpoints by kind of tensor, padded vocabulary rows left out."""
    worst: dict[str, float] = {}
    for name in json.loads((a / "complete").read_text())["learners"]:
        x, y = (dist_checkpointing.load_plain_tensors(str(path / name)) for path in (a, b))
        assert x.keys() == y.keys(), sorted(x.keys() ^ y.keys())
        for key in x:
            kind, one, two = "counters", torch.as_tensor(x[key]), torch.as_tensor(y[key])
            if isinstance(x[key], torch.Tensor):
                kind = key.split(".")[2] if key.startswith("optimizer.state.") else "weights"
                padded = "word_embeddings" in key or "output_layer" in key
                one, two = (t[:vocab] if padded else t for t in (x[key], y[key]))
            worst[kind] = max(worst.get(kind, 0.0), float((one - two).abs().max()))
    return worst


def report(case: str, **values: Any) -> None:
    if rank() == 0:
        print(json.dumps({"case": case, **values}), flush=True)


def same_everywhere(action: Callable[[], Any]) -> str:
    """The message of the CheckpointError that `action` raises, which must be the same on every rank."""
    try:
        action()
        message = "no error"
    except checkpoint.CheckpointError as raised:
        message = str(raised)
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, message)
    assert len(set(boxes)) == 1, boxes
    return message


def resharding(
    world: World, case: str, run: Path, make: Callable[[str, int], dict[str, Learner]], layouts: list[str]
) -> None:
    """Saved under the first layout; loaded under each of them, into learners with other weights."""
    learners = make(layouts[0], 1)
    train(learners, range(3))
    saved = save(run, 3, learners, {"step": 3, "kl_controller": {"value": 0.1}}, keep_last=2)
    at_save = weights_of(learners)
    train(learners, range(3, 5))
    at_end = weights_of(learners)
    report(f"{case} saved", moved=min_change(at_save, at_end), files=sorted(p.name for p in saved.iterdir()))
    for layout in layouts:
        fresh = make(layout, 99)
        before = error(weights_of(fresh), at_save)
        state = checkpoint.load(saved, fresh)
        loaded = error(weights_of(fresh), at_save)
        again = save(run.with_name(f"{run.name}_{layout}"), 3, fresh, {}, keep_last=1)
        stored = stored_difference(saved, again, vocab_of(fresh))
        train(fresh, range(3, 5))
        continued = error(weights_of(fresh), at_end)
        report(f"{case} {layout}", before=before, loaded=loaded, stored=stored, continued=continued, state=state)


def min_change(a: Weights, b: Weights) -> float:
    """Over tensors: the least relative change."""
    return min(float((a[n].double() - b[n].double()).norm() / b[n].double().norm()) for n in a)


def bfloat16_before_the_first_update(world: World) -> None:
    def make(seed: int) -> dict[str, Learner]:
        return {"actor": world.learner("policy", world.tied, "tp2", seed, torch.bfloat16)}

    learners, run = make(1), world.work / "bf16"
    first = save(run, 0, learners, {}, keep_last=2)
    train(learners, range(2))
    second = save(run, 2, learners, {}, keep_last=2)
    train(learners, range(2, 3))
    at_end = weights_of(learners)
    for name, path, updates in (("unstarted", first, range(3)), ("started", second, range(2, 3))):
        fresh = make(99)
        checkpoint.load(path, fresh)
        train(fresh, updates)
        report(f"bfloat16 {name}", continued=error(weights_of(fresh), at_end))


@contextlib.contextmanager
def held_up() -> Iterator[Callable[[], None]]:
    """No rank writes a file before what this gives is called."""
    go, write = threading.Event(), torch_dist.Shards.write

    def later(shards: torch_dist.Shards) -> Any:
        assert go.wait(100)
        return write(shards)

    torch_dist.Shards.write = later  # type: ignore[method-assign]
    try:
        yield go.set
    finally:
        go.set()
        torch_dist.Shards.write = write  # type: ignore[method-assign]


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def beside_the_training(world: World) -> None:
    """A save whose files are written only after two more updates, against one that is waited for."""
    learners, run = world.pair("tp2.pp2", 1), world.work / "beside"
    random.seed(rank()), np.random.seed(rank()), torch.manual_seed(rank())
    train(learners, range(3))
    waited_for, at_save = save(run, 2, learners, {}, keep_last=5), weights_of(learners)
    written: list[checkpoint.Written] = []
    saver = Saver(run, CheckpointConfig(keep_last=5, timeout_s=120), written.append)
    with held_up() as go:
        saver.save(3, learners, {"step": 3})
        drawn = draws()
        train(learners, range(3, 5))
        saver.poll()
        meanwhile = {"latest": str(checkpoint.latest(run).name), "written": len(written), "writing": saver.is_writing}  # type: ignore[union-attr]
        late = same_everywhere(lambda: saver.wait(0.2))
        go()
        saver.wait()
    path, state = written[0].path, checkpoint.load(written[0].path, learners)
    loaded, stored = error(weights_of(learners), at_save), stored_difference(waited_for, path, vocab_of(learners))
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, (drawn, draws()))
    report(
        "beside", meanwhile=meanwhile, late=late, loaded=loaded, stored=stored, draws=boxes, latest=path.name, **state
    )
    report_failure_beside(saver, learners, run)


def report_failure_beside(saver: Saver, learners: dict[str, Learner], run: Path) -> None:
    """One rank's writer fails while all ranks train; then the same saver works again."""
    with limited_files(on_rank=2), held_up() as go:
        saver.save(4, learners, {})
        go()
        train(learners, range(5, 6))
        message = same_everywhere(lambda: poll_to_the_end(saver))
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    saver.save(5, learners, {})
    saver.wait()
    report("beside: a writer fails", message=message, names=names, latest=str(checkpoint.latest(run).name))  # type: ignore[union-attr]


def poll_to_the_end(saver: Saver) -> None:
    while saver.is_writing:
        saver.poll()
        time.sleep(0.05)


@contextlib.contextmanager
def limited_files(on_rank: int) -> Iterator[None]:
    """This rank cannot write more than 2 kB into a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def vocab_of(learners: dict[str, Learner]) -> int:
    return next(iter(learners.values())).arch.vocab_size


def failing_saves(world: World, learners: dict[str, Learner]) -> None:
    run = world.work / "failing"
    save(run, 1, learners, {}, keep_last=1)

    def attempt(case: str, state: dict[str, Any], **more: Any) -> None:
        message = same_everywhere(lambda: save(run, 2, learners, state, keep_last=1))
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        report(case, message=message, names=names, latest=str(checkpoint.latest(run).name), **more)  # type: ignore[union-attr]

    with limited_files(on_rank=2):
        attempt("save: rank 2 cannot write", {})
    attempt("save: state is not JSON", {"kl": torch.zeros(1)})
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=1000)  # type: ignore[assignment]
    attempt("save: disk full", {})
    shutil.disk_usage = real
    save(run, 2, learners, {}, keep_last=1)
    report("save: works again", names=sorted(path.name for path in (run / "checkpoints").iterdir()))


def failing_loads(world: World, learners: dict[str, Learner], good: Path) -> None:
    def damaged(name: str, change: Callable[[Path], None]) -> Path:
        path = world.work / name / "checkpoints" / "step_3"
        if rank() == 0:
            shutil.copytree(good, path)
            change(next((path / "actor").glob("__1_*.distcp")))
        torch.distributed.barrier()
        return path

    truncated = damaged("truncated", lambda file: file.write_bytes(file.read_bytes()[:-100]))
    report("load: truncated", message=same_everywhere(lambda: checkpoint.load(truncated, learners)))
    garbled = damaged("garbled", lambda file: file.write_bytes(bytes(len(file.read_bytes()))))
    report("load: garbled", message=same_everywhere(lambda: checkpoint.load(garbled, learners)))
    missing = damaged("missing", Path.unlink)
    report("load: missing", message=same_everywhere(lambda: checkpoint.load(missing, learners)))
    other = {"actor": world.learner("policy", world.other, "tp2", 1)}
    report("load: other model", message=same_everywhere(lambda: checkpoint.load(good, other)))
    swapped = {"actor": learners["critic"], "reward": learners["actor"]}
    report("load: other learners", message=same_everywhere(lambda: checkpoint.load(good, swapped)))
    report_tied_copies(learners["actor"])
    critic = learners["critic"]
    with critic.mesh.active():
        wanted = learner_state.LearnerState(critic, is_loading=True).sharded()
        message = same_everywhere(lambda: torch_dist.read(wanted, good / "actor"))
    report("load: other names", message=message)


def report_tied_copies(actor: Learner) -> None:
    """The check that follows every load, before and after the last stage's copy is changed."""
    before = learner_state.tied_copies_are_equal(actor)
    if actor.mesh.is_last_stage:
        actor.bare[-1].shared_embedding_or_output_weight().data[3] += 1e-3
    after = learner_state.tied_copies_are_equal(actor)
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, (before, after))
    report("tied copies", equal=[b for b, _ in boxes], after_change=[a for _, a in boxes])


def main() -> None:
    work, tied, moe, other = sys.argv[1:]
    platform.init_process_group(120)
    world = World(Path(work), tied, moe, other)
    pair_run = world.work / "pair"
    resharding(world, "pair", pair_run, world.pair, ["tp2.pp2", "dp4", "pp4", "tp4", "pp2.vpp2"])
    resharding(
        world,
        "moe",
        world.work / "moe",
        lambda layout, seed: {"actor": world.learner("policy", world.moe, layout, seed)},
        ["ep2", "ep1", "ep4", "tp2.ep2.pp2"],
    )
    resharding(
        world,
        "tied",
        world.work / "tied",
        lambda layout, seed: {"actor": world.learner("policy", world.tied, layout, seed)},
        ["dp4", "pp2", "pp2.vpp2"],
    )
    bfloat16_before_the_first_update(world)
    beside_the_training(world)
    learners = world.pair("tp2.pp2", 1)
    failing_saves(world, learners)
    failing_loads(world, learners, pair_run / "checkpoints" / "step_3")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
