"""Run under torchrun with 4 processes: saves and loads under many layouts, and saves and loads that fail.

Usage: checkpoints.py WORK_DIR TIED_MODEL MOE_MODEL OTHER_MODEL CASE=LAYOUT,LAYOUT ... [CASE=MODEL=LAYOUT,LAYOUT ...].
The cases `pair`, `moe` and `tied` imply their models. Prints one JSON object per case: {"case": ..., ...}.

The tests compare each case with an uninterrupted run: the weights at the save, and after more updates.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_tools import (
    World,
    error,
    held_up,
    limited_files,
    min_change,
    report,
    same_everywhere,
    save,
    stored_difference,
    train,
    vocab_of,
    weights_of,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from mrl import checkpoint, platform
from mrl.checkpoint import Saver, directory, learner_state, torch_dist
from mrl.checkpoint.torch_dist import ShardedWrite
from mrl.config.schema import CheckpointConfig
from mrl.learner import Learner
from mrl.parallel import rank, world_size
from tests.helpers.slow import slow_cases


def resharding(
    world: World, case: str, run: Path, make: Callable[[str, int], dict[str, Learner]], layouts: list[str]
) -> None:
    """Saves under the first layout, and loads under each layout into learners with other weights."""
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


def bfloat16_before_the_first_update(world: World) -> None:
    """Saves and resumes actor and critic in bfloat16 before and after the first update; the critic's head is
    float32."""

    def make(seed: int, layout: str = "tp2") -> dict[str, Learner]:
        dtype = torch.bfloat16
        return {
            "actor": world.learner("policy", world.tied, layout, seed, dtype),
            "critic": world.learner("critic", world.tied, layout, seed, dtype),
        }

    learners, run = make(1), world.work / "bf16"
    first = save(run, 0, learners, {}, keep_last=2)
    train(learners, range(2))
    second, at_save = save(run, 2, learners, {}, keep_last=2), weights_of(learners)
    train(learners, range(2, 3))
    at_end = weights_of(learners)
    for name, path, updates in (("unstarted", first, range(3)), ("started", second, range(2, 3))):
        fresh = make(99)
        checkpoint.load(path, fresh)
        train(fresh, updates)
        report(f"bfloat16 {name}", continued=error(weights_of(fresh), at_end))
    for layout in ("dp4", *slow_cases("pp2")):
        fresh = make(99, layout)
        checkpoint.load(second, fresh)
        report(f"bfloat16 {layout}", loaded=error(weights_of(fresh), at_save))
    head = at_end["critic.score.weight"]
    report("bfloat16 head", dtype=str(head.dtype), rounding=float((head - head.bfloat16().float()).abs().max()))


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def beside_the_training(world: World) -> None:
    """Compares an asynchronous save, whose files are written only after two more updates, with a synchronous one."""
    learners, run = world.pair("tp2.pp2", 1), world.work / "beside"
    random.seed(rank()), np.random.seed(rank()), torch.manual_seed(rank())
    train(learners, range(3))
    waited_for, at_save = save(run, 2, learners, {}, keep_last=5), weights_of(learners)
    written: list[checkpoint.SavedCheckpoint] = []
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
    """Makes one rank's writer fail while all ranks train, and then saves with the same saver."""
    with limited_files(on_rank=2), held_up() as go:
        saver.save(4, learners, {})
        go()
        train(learners, range(5, 6))
        message = same_everywhere(lambda: poll_to_the_end(saver))
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    saver.save(5, learners, {})
    saver.wait()
    report("beside: a writer fails", message=message, names=names, latest=str(checkpoint.latest(run).name))  # type: ignore[union-attr]


def writers_in_turns(world: World) -> None:
    """Reports which ranks write files at the same time. Every write is prolonged."""
    learners, run = world.pair("tp2.pp2", 1), world.work / "turns"
    spans: list[tuple[float, float]] = []
    real = ShardedWrite.write

    def slow(part: ShardedWrite) -> Any:
        began = time.monotonic()
        result = real(part)
        time.sleep(0.1)
        spans.append((began, time.monotonic()))
        return result

    ShardedWrite.write = slow  # type: ignore[method-assign]
    for step, writers in enumerate(("every_rank", "one_rank", *slow_cases("one_node")), 1):
        spans.clear()
        saver = Saver(run, CheckpointConfig(keep_last=5, writers=writers, timeout_s=120), lambda written: None)
        saver.save(step, learners, {})
        saver.wait()
        boxes: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(boxes, spans)
        report(f"writers: {writers}", spans=boxes)
    ShardedWrite.write = real  # type: ignore[method-assign]
    one, two = run / "checkpoints" / "step_1", run / "checkpoints" / "step_2"
    report("writers", stored=stored_difference(one, two, vocab_of(learners)))


def poll_to_the_end(saver: Saver) -> None:
    while saver.is_writing:
        saver.poll()
        time.sleep(0.05)


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


def _flip_a_bit(file: Path) -> None:
    """Changes the lowest bit of a number in the largest tensor of a `.distcp` file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


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
    flipped = damaged("flipped", _flip_a_bit)
    report("load: one bit", message=same_everywhere(lambda: checkpoint.load(flipped, learners)))
    missing = damaged("missing", Path.unlink)
    report("load: missing", message=same_everywhere(lambda: checkpoint.load(missing, learners)))
    report_poisoned(world, learners, good)
    other = {"actor": world.learner("policy", world.other, "tp2", 1)}
    report("load: other model", message=same_everywhere(lambda: checkpoint.load(good, other)))
    swapped = {"actor": learners["critic"], "reward": learners["actor"]}
    report("load: other learners", message=same_everywhere(lambda: checkpoint.load(good, swapped)))
    report_tied_copies(learners["actor"])
    critic = learners["critic"]
    with critic.mesh.active():
        wanted = learner_state.StateToLoad(critic).sharded()
        message = same_everywhere(lambda: torch_dist.read(wanted, good / "actor"))
    report("load: other names", message=message)


class Poison:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.path), 0o777, True)


def report_poisoned(world: World, learners: dict[str, Learner], good: Path) -> None:
    """Loads checkpoints in which one file, of each kind in turn, contains code, with a matching manifest."""
    for case, change in POISONED.items():
        path, ran = world.work / f"poisoned_{case}" / "checkpoints" / "step_3", world.work / f"ran_{case}"
        if rank() == 0:
            shutil.copytree(good, path)
            file = change(path, Poison(ran))
            manifest = json.loads((path / directory.MANIFEST).read_text())
            manifest["files"] = {name: (path / name).stat().st_size for name in manifest["files"]}
            (path / directory.MANIFEST).write_text(json.dumps(manifest))
        named = [str(file.relative_to(path)) if rank() == 0 else ""]
        torch.distributed.broadcast_object_list(named)

        read = checkpoint.load_samples if case == "kept" else partial(checkpoint.load, learners=learners)
        report(f"poisoned: {case}", message=same_everywhere(partial(read, path)), file=named[0], ran=ran.exists())


def poison_metadata(path: Path, poison: Poison) -> Path:
    file = path / "actor" / ".metadata"
    file.write_bytes(pickle.dumps(poison))
    return file


def deep_format(path: Path, poison: Poison) -> Path:
    file = path / "actor" / "metadata.json"
    file.write_text("[" * 100_000 + "]" * 100_000)
    return file


def poison_whole(name: str) -> Callable[[Path, Poison], Path]:
    def change(path: Path, poison: Poison) -> Path:
        for file in sorted(path.glob(name)) or [path / name]:
            torch.save(poison, file)
        return path / Path(name).parent

    return change


def poison_item(kind: type) -> Callable[[Path, Poison], Path]:
    """Returns a change that redirects the metadata of the first tensor or object to appended code."""

    def change(path: Path, poison: Poison) -> Path:
        described = path / "actor" / ".metadata"
        content = pickle.loads(described.read_bytes())
        index = next(i for i in content.storage_data if isinstance(content.state_dict_metadata[i.fqn], kind))
        place = content.storage_data[index]
        file = path / "actor" / place.relative_path
        archive = io.BytesIO()
        torch.save([poison], archive)
        place.offset, place.length = file.stat().st_size, len(archive.getvalue())
        with file.open("ab") as out:
            out.write(archive.getvalue())
        described.write_bytes(pickle.dumps(content))
        return file

    return change


POISONED: dict[str, Callable[[Path, Poison], Path]] = {
    "metadata": poison_metadata,
    "format": deep_format,
    "common": poison_whole("actor/common.pt"),
    "tensor": poison_item(TensorStorageMetadata),
    "object": poison_item(BytesStorageMetadata),
    "random": poison_whole("random/rank_*.pt"),
    "kept": poison_whole("kept.pt"),
}


def report_tied_copies(actor: Learner) -> None:
    """Checks that the test of tied weights, which follows every load, detects a change in the last stage's copy."""
    before = learner_state.tied_copies_are_equal(actor)
    if actor.mesh.is_last_stage:
        actor.bare[-1].shared_embedding_or_output_weight().data[3] += 1e-3
    after = learner_state.tied_copies_are_equal(actor)
    boxes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(boxes, (before, after))
    report("tied copies", equal=[b for b, _ in boxes], after_change=[a for _, a in boxes])


def actor_of(world: World, model: str, layout: str, seed: int) -> dict[str, Learner]:
    return {"actor": world.learner("policy", model, layout, seed)}


def main() -> None:
    work, tied, moe, other, *cases = sys.argv[1:]
    platform.init_process_group(120)
    world = World(Path(work), tied, moe, other)
    pair_run = world.work / "pair"
    named = {"pair": world.pair, "moe": partial(actor_of, world, moe), "tied": partial(actor_of, world, tied)}
    for each in cases:
        case, *model, layouts = each.split("=")
        make = partial(world.both, *model) if model else named[case]
        resharding(world, case, world.work / case, make, layouts.split(","))
    bfloat16_before_the_first_update(world)
    beside_the_training(world)
    writers_in_turns(world)
    learners = world.pair("tp2.pp2", 1)
    failing_saves(world, learners)
    failing_loads(world, learners, pair_run / "checkpoints" / "step_3")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
