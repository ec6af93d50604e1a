"""Saving and loading of all that a run needs to resume: trained models, their copies, random states and the loop's
state.

Saving has two halves. `stage` is collective and produces a checkpoint that further training does not change.
`StagedCheckpoint.write` is then independent of the training, and may run in a thread beside it over its own process
group.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from mrl import platform
from mrl.checkpoint import directory, torch_dist, writer_turns
from mrl.checkpoint.agreement import RANKS, CheckpointAgreement, CheckpointError, describe
from mrl.checkpoint.learner_state import StateToLoad, copy_shards, state_to_save, tied_copies_are_equal
from mrl.checkpoint.torch_dist import ShardedWrite
from mrl.checkpoint.writer_turns import Writers
from mrl.files import sync
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.parallel import gather, rank, world_size
from mrl.weights.disk.torch_dist_files import read_plain
from mrl.weights.errors import WeightError

Checkpointable = Learner | PolicyCopy  # a trained model, or a second set of its weights

_WORDS = {("adapters", "base"): "the digest of the adapters' base weights"}
SHAPE_FREE = ("max_positions", "initializer_range", "eos_token_ids")  # may differ from the checkpoint's


@dataclass
class StagedCheckpoint:
    """Checkpoint planned on all ranks; this rank's part of it.

    final: RUN_DIR/checkpoints/step_N, which exists only after `write` has succeeded
    nbytes: of the tensors, over all ranks
    copy_s: seconds it took to plan the files and copy the tensors
    """

    final: Path
    nbytes: int
    copy_s: float
    _parts: list[ShardedWrite]
    _kinds: dict[str, Any]
    _state: dict[str, Any]
    _random: dict[str, Any]
    _samples: Any
    _free: int
    _turns: list[int]

    @property
    def tmp(self) -> Path:
        return staging_path(self.final)

    def write(self, ranks: CheckpointAgreement) -> None:
        """Writes the files and renames them once all are complete. Collective over `ranks`, in any thread.

        Raises CheckpointError on every rank if any rank fails (disk full, no permission, ...). Then step_N does not
        exist, and older checkpoints are unchanged.
        """
        try:
            written = [self._write_in_turns(part, ranks) for part in self._parts]
            ranks.together(f"writing {self.tmp / directory.RANDOM}", self._write_random)
            ranks.on_main(f"writing {self.tmp / directory.SAMPLES}", self._write_samples)
            completing = f"completing {self.final}"
            everyone = ranks.collect(completing, written)
            ranks.on_main(completing, lambda: self._complete(everyone))
        except BaseException:
            discard(self.tmp)
            raise

    def _write_in_turns(self, part: ShardedWrite, ranks: CheckpointAgreement) -> list[WriteResult]:
        mine: list[WriteResult] = []
        for turn in range(max(self._turns) + 1):
            is_mine = self._turns[rank()] == turn
            mine += ranks.together(self._what(part), part.write if is_mine else list)
        return mine

    def _what(self, part: ShardedWrite) -> str:
        return f"writing {part.directory} ({_size(self.nbytes)} in all; {_size(self._free)} were free)"

    def _write_random(self) -> None:
        file = self.tmp / directory.RANDOM / f"rank_{rank()}.pt"
        torch.save(self._random, file)
        sync(file)

    def _write_samples(self) -> None:
        if self._samples is not None:
            torch.save(self._samples, self.tmp / directory.SAMPLES)
            sync(self.tmp / directory.SAMPLES)

    def _complete(self, everyone: list[Any]) -> None:
        for part, results in zip(self._parts, zip(*everyone, strict=True), strict=True):
            part.complete(list(results))
        directory.finish(self.tmp, self.final, self._kinds, self._state)


def staging_path(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp")


def discard(tmp: Path) -> None:
    """Deletes `tmp` on rank 0. A leftover is not a checkpoint, and the next save deletes it."""
    if rank() == 0:
        shutil.rmtree(tmp, ignore_errors=True)


def stage(
    run_dir: Path,
    step: int,
    learners: Mapping[str, Checkpointable],
    state: dict[str, Any],
    samples: Any,
    writers: Writers,
    *,
    copy: bool,
) -> StagedCheckpoint:
    """Plans RUN_DIR/checkpoints/step_N and, with `copy`, copies its contents into host memory. Collective.

    learners: trainable ones, and copies, by the name that `load` uses
    state: anything that JSON can hold; rank 0's is written
    samples: of a replay buffer, or prefetched; immutable tensors and plain values; rank 0's are written, for
    `load_samples`
    writers: the ranks that write concurrently; the others take turns
    copy: training may go on before `write`; without it the learners must not change until then

    Raises CheckpointError on every rank if any rank fails, or if the disk is too full.
    """
    _require_trainable(learners)
    final = directory.root(run_dir) / f"step_{step}"
    tmp = staging_path(final)
    try:
        RANKS.on_main(f"making {tmp}", lambda: directory.begin(tmp))
        RANKS.together(f"finding {tmp}", lambda: _require(tmp))
        began = time.monotonic()
        parts = [_stage_part(part, tmp / name, copy) for name, part in learners.items()]
        copy_s = time.monotonic() - began
        of_main = _nbytes(samples) if rank() == 0 else 0
        nbytes = sum(gather(of_main + sum(part.nbytes for part in parts)))
        free = RANKS.on_main(f"looking for space in {tmp}", lambda: _space_for(nbytes, tmp))
    except BaseException:
        discard(tmp)
        raise
    kinds = {name: _kind(learner) for name, learner in learners.items()}
    order = writer_turns.turns_of_ranks(writers)
    return StagedCheckpoint(final, nbytes, copy_s, parts, kinds, state, platform.random_state(), samples, free, order)


def load(path: Path, learners: Mapping[str, Checkpointable]) -> dict[str, Any]:
    """Loads the checkpoint's weights, optimizer states and schedules into `learners`; returns `state`. Collective.

    The learners may have another layout or dtype than the saved ones. Learning rates and the like stay those of the
    configuration. Random states are restored if the number of ranks is unchanged. No process on this machine can remove
    the checkpoint meanwhile.

    Raises CheckpointError on every rank if the checkpoint is incomplete or damaged, or of other models.
    """
    _require_trainable(learners)
    with contextlib.ExitStack() as stack:
        RANKS.together(f"opening {path}", lambda: stack.enter_context(directory.hold_for_reading(path)))
        manifest, state = RANKS.on_main(f"opening {path}", lambda: directory.read(path))
        RANKS.together(f"comparing the run with {path}", lambda: _compare(manifest["learners"], learners))
        for name, part in learners.items():
            if isinstance(part, Learner):
                _load_learner(part, path / name)
            else:
                _load_copy(part, path / name)
        RANKS.together(f"restoring random states of {path}", lambda: _load_random(path / directory.RANDOM))
    return state


def load_samples(path: Path) -> Any:
    """Returns the `samples` that rank 0 passed to `stage`; for rank 0 alone, after `load`.

    Raises CheckpointError if there is none, or it cannot be read.
    """
    file = path / directory.SAMPLES
    if not file.is_file():
        held = "the samples of a replay buffer, or prefetched ones"
        raise CheckpointError(f"{path} lacks {directory.SAMPLES}, which holds {held}")
    try:
        return read_plain(file, file)
    except WeightError as error:
        raise CheckpointError(str(error)) from error


def _require_trainable(learners: Mapping[str, Checkpointable]) -> None:
    frozen = [name for name, part in learners.items() if isinstance(part, Learner) and not part.trainable]
    if frozen:
        raise ValueError(f"{', '.join(frozen)}: the model is not trained, so there is nothing to save or load")


def _stage_part(part: Checkpointable, path: Path, copy: bool) -> ShardedWrite:
    learner = part if isinstance(part, Learner) else part.learner

    def collect() -> tuple[dict[str, Any], dict[str, int]]:
        return state_to_save(part) if isinstance(part, Learner) else (copy_shards(part), {})

    with learner.active():
        state, counters = RANKS.together(f"collecting the state for {path}", collect)
        return torch_dist.plan(state, counters, path, learner.mesh.dp_cp_group, copy=copy)


def _load_learner(learner: Learner, path: Path) -> None:
    """Loads on the device, then restores the previous offload level: one model at a time fits there."""
    level = RANKS.together(f"making room for {path}", lambda: learner.memory.move("all"))
    with learner.active():
        state = RANKS.together(f"making room for {path}", lambda: StateToLoad(learner))
        loaded = torch_dist.read(state.sharded(), path)
        RANKS.together(f"restoring {path}", lambda: _restore(state, loaded))
    RANKS.together(f"freeing the buffers of {path}", lambda: learner.memory.move(level))


def _load_copy(copy: PolicyCopy, path: Path) -> None:
    with copy.learner.active():
        torch_dist.read(RANKS.together(f"making room for {path}", lambda: copy_shards(copy)), path)


def _load_random(folder: Path) -> None:
    if len(list(folder.iterdir())) != world_size():
        return
    file = folder / f"rank_{rank()}.pt"
    state = read_plain(file, file)
    try:
        platform.restore_random_state(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{file} does not contain random states ({describe(error)})") from error


def _restore(learner_state: StateToLoad, loaded: dict[str, Any]) -> None:
    learner_state.restore(loaded)
    if not tied_copies_are_equal(learner_state.learner):
        raise CheckpointError("the embedding of the first pipeline stage and its copy on the last stage differ")


def _kind(part: Checkpointable) -> dict[str, Any]:
    role, learner = (part.role, part) if isinstance(part, Learner) else ("copy", part.learner)
    kind = {"role": role, "arch": {k: v for k, v in learner.arch.record().items() if k not in SHAPE_FREE}}
    if learner.adapters is not None:
        kind["adapters"] = learner.adapters.spec.record() | {"base": learner.adapters.base}
    return kind


def _compare(stored: dict[str, Any], learners: Mapping[str, Checkpointable]) -> None:
    problems = []
    for name, learner in learners.items():
        if name not in stored:
            problems.append(f"it has no {name}, only {', '.join(stored)}")
            continue
        here, there = _kind(learner), stored[name]
        if here["role"] != there["role"]:
            problems.append(f"{name} is a {here['role']} in this run and a {there['role']} in the checkpoint")
        if ("adapters" in here) != ("adapters" in there):
            owner = "this run trains" if "adapters" in here else "the checkpoint holds"
            problems.append(f"{name}: only {owner} LoRA adapters: set lora as in the checkpoint's run")
            continue
        for section in ("arch", "adapters"):
            mine, theirs = here.get(section, {}), there.get(section, {})
            for key in sorted(mine.keys() | theirs.keys()):
                if (a := mine.get(key)) != (b := theirs.get(key)):
                    problems.append(f"{name}: {_WORDS.get((section, key), key)} is {a} here and {b} in the checkpoint")
    if problems:
        raise CheckpointError("; ".join(problems))


def _require(tmp: Path) -> None:
    if not tmp.is_dir():
        raise CheckpointError("it is missing on this node: put run.root on a file system that all nodes share")


def _nbytes(samples: Any) -> int:
    """Bytes of the tensors in dicts and lists."""
    if isinstance(samples, torch.Tensor):
        return samples.nbytes
    inner = samples.values() if isinstance(samples, dict) else samples if isinstance(samples, list | tuple) else ()
    return sum(map(_nbytes, inner))


def _space_for(needed: int, tmp: Path) -> int:
    free = shutil.disk_usage(tmp).free
    if free < needed:
        raise CheckpointError(f"not enough disk space: {_size(needed)} needed, {_size(free)} free")
    return free


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
