"""Asynchronous checkpoints of one run, written one at a time, so that at most one is held in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl import platform
from mrl.checkpoint import directory
from mrl.checkpoint.agreement import CheckpointAgreement, CheckpointError, describe
from mrl.checkpoint.run import Checkpointable, StagedCheckpoint, stage
from mrl.config.schema import CheckpointConfig
from mrl.parallel import gather


@dataclass(frozen=True)
class SavedCheckpoint:
    """Complete checkpoint.

    nbytes: of its tensors, over all ranks
    copy_s: seconds to plan the files and copy the tensors into host memory
    write_s: seconds from then to the completion
    """

    path: Path
    nbytes: int
    copy_s: float
    write_s: float


class Saver:
    """Writes RUN_DIR/checkpoints/step_N in a thread of each rank, over a separate process group.

    Construction and all methods but `close` are collective. They raise CheckpointError on every rank for an error on
    any; an error in the background is raised by the next call. A failed checkpoint leaves nothing on disk.

    on_written: called for each complete checkpoint, on every rank, by the method that finds it complete
    """

    def __init__(self, run_dir: Path, cfg: CheckpointConfig, on_written: Callable[[SavedCheckpoint], None]) -> None:
        self.run_dir, self.cfg, self._on_written = run_dir, cfg, on_written
        self._group = self._new_group()
        self._writing: _Writing | None = None

    def save(
        self,
        step: int,
        learners: Mapping[str, Checkpointable],
        state: dict[str, Any],
        samples: Any = None,
        best: int | None = None,
    ) -> None:
        """Returns once everything is copied into host memory, while the files are still being written.

        With `asynchronous: false` nothing is copied, and the files are complete on return.

        learners, state, samples: as `stage` takes them; best: steps of the checkpoint that stays besides the last ones

        Waits for the previous save first and raises its error (CheckpointError) before doing anything.
        """
        self.wait()
        staged = stage(self.run_dir, step, learners, state, samples, self.cfg.writers, copy=self.cfg.asynchronous)
        self._writing = _Writing(staged, self._group, self.cfg, best)
        if not self.cfg.asynchronous:
            self.wait()

    @property
    def is_writing(self) -> bool:
        """True between a `save` and the call that reports its outcome; equal on every rank."""
        return self._writing is not None

    def poll(self) -> None:
        """Checks the outcome of the last save without waiting for it."""
        if self._writing is None:
            return
        answers = gather(self._writing.answer())
        if all(finished for finished, _ in answers):
            self._end([problem for _, problem in answers if problem])

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the last save is complete, if there is one.

        Raises CheckpointError after `timeout_s`, by default checkpoint.timeout_s.
        """
        if self._writing is None:
            return
        limit = self.cfg.timeout_s if timeout_s is None else timeout_s
        self._writing.thread.join(limit)
        answers = gather(self._writing.answer())
        late = [str(r) for r, (finished, _) in enumerate(answers) if not finished]
        if late:
            where = f"rank {', '.join(late)} of {len(answers)}"
            raise CheckpointError(
                f"{self._writing.staged.final} is still being written after {limit:.0f} s ({where}); older checkpoints "
                "are complete: check the disk, or raise checkpoint.timeout_s if it is just slow"
            )
        self._end([problem for _, problem in answers if problem])

    def close(self, timeout_s: float = 20.0) -> None:
        """Waits up to `timeout_s` for the files being written, and ignores the outcome."""
        if self._writing is not None:
            self._writing.thread.join(timeout_s)

    def _end(self, problems: list[str]) -> None:
        assert self._writing is not None
        done, self._writing = self._writing, None
        if problems:
            self._group = self._new_group()  # the old one may be broken, or still in use by a thread
            raise CheckpointError("; ".join(dict.fromkeys(problems)))
        self._on_written(SavedCheckpoint(done.staged.final, done.staged.nbytes, done.staged.copy_s, done.seconds))

    def _new_group(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.cfg.timeout_s))


class _Writing:
    """Checkpoint being written to disk."""

    def __init__(
        self, staged: StagedCheckpoint, group: dist.ProcessGroup, cfg: CheckpointConfig, best: int | None
    ) -> None:
        self.staged, self.cfg, self._best = staged, cfg, best
        self.seconds = 0.0
        self._problem: str | None = None
        self.thread = threading.Thread(target=self._run, args=(group,), daemon=True, name="checkpoint-writer")
        self.thread.start()

    def answer(self) -> tuple[bool, str | None]:
        """Returns (finished, error message) of this rank."""
        return not self.thread.is_alive(), self._problem

    def _run(self, group: dist.ProcessGroup) -> None:
        began = time.monotonic()
        final, ranks = self.staged.final, CheckpointAgreement(group)
        try:
            platform.use_device()
            self.staged.write(ranks)
            ranks.on_main(f"removing old checkpoints beside {final}", lambda: self._prune(final))
        except Exception as error:
            self._problem = describe(error)
        self.seconds = time.monotonic() - began

    def _prune(self, final: Path) -> None:
        directory.prune(final.parent, self.cfg.keep_last, self.cfg.keep_every_steps, final, self._best)
