"""Skips updates with a non-finite loss or gradient: counts them, logs them, and ends the run after too many.

All ranks see the same losses and gradient norms, so every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.core import Rollout
from mrl.learner import Learner
from mrl.observe import NONFINITE, Recorder, SilentRecorder, append_jsonl


class NonFiniteError(RuntimeError):
    """Too many steps in a row skipped an update, or the last step applied none. Raised on every rank."""


class NoGradientError(RuntimeError):
    """A nonzero loss gives the adapters no gradient: the graph between adapters and loss is cut. Raised on every
    rank."""


def require_gradient(learner: Learner, metrics: Mapping[str, float]) -> None:
    """Raises NoGradientError if `metrics` of a backward and optimizer step show a loss but no gradient in the
    adapters."""
    if learner.adapters is not None and metrics["loss"] and metrics["grad_norm"] == 0:
        raise NoGradientError(f"an update with loss {metrics['loss']:.4g} has a gradient of 0 in all LoRA adapters")


class Updates:
    """Counts the learners' updates. A skipped update adds a line to RUN_DIR/nonfinite.jsonl:

    step, update: as in metrics.jsonl, and the number of the update among the step's updates of this role (from 1)
    role, loss, grad_norm: loss and grad_norm are text if JSON has no number for them
    by: source of the samples: "outputs" (non-finite model outputs at their tokens), "targets" (non-finite targets), or
    "mini-batch" (neither: all of the update's samples)
    sample_ids, rows: indices among the step's training samples, and their rows in data.train

    limit: steps in a row with a skipped update that end the run
    writes: True on one rank only
    """

    def __init__(self, run_dir: Path, limit: int, recorder: Recorder | SilentRecorder, *, writes: bool) -> None:
        self.file, self._limit = run_dir / NONFINITE, limit
        self._recorder, self._writes = recorder, writes
        self._made: dict[str, int] = {}  # updates of this step, by role
        self._skipped: dict[str, int] = {}  # of these
        self.unlearned: list[str] = []  # roles that had updates in the last step, none of them applied
        self.in_a_row = 0  # consecutive steps with a skipped update; both are part of the run's state

    def state_dict(self) -> dict[str, Any]:
        return {"nonfinite_in_a_row": self.in_a_row, "unlearned": self.unlearned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.unlearned = state["nonfinite_in_a_row"], state.get("unlearned", [])

    def note(
        self,
        role: str,
        learner: Learner,
        rollout: Rollout,
        sample_ids: Sequence[int],
        metrics: dict[str, float],
        targets: Sequence[Tensor] = (),
    ) -> None:
        """Counts an update: a `learner.backward` over `rollout` and the `learner.step` that followed. Collective.

        sample_ids: of the rollout's samples in the step; metrics: as the two calls returned them
        targets: flat [R] vectors that went into the loss, such as advantages
        """
        self._made[role] = self._made.get(role, 0) + 1
        if metrics["skipped"]:
            self._skipped[role] = self._skipped.get(role, 0) + 1
            by, suspects = _suspects(learner, rollout, targets)
            if self._writes:
                rows = rollout.rows.tolist() if rollout.rows is not None else [None] * rollout.num_samples
                places = [sample_ids[sample] for sample in suspects]
                self._write_down(role, metrics, rollout.step, by, places, [rows[sample] for sample in suspects])

    def note_update(self, role: str, metrics: dict[str, float], step: int, sample_ids: Iterable[int]) -> None:
        """Counts an update of step `step` (from 0) over these samples, without looking for the samples at fault."""
        self._made[role] = self._made.get(role, 0) + 1
        if metrics["skipped"]:
            self._skipped[role] = self._skipped.get(role, 0) + 1
            places = list(sample_ids)
            self._write_down(role, metrics, step, "mini-batch", places, [None] * len(places))

    def end_of_step(self, step: int) -> None:
        """Ends step `step` (from 1). Raises NonFiniteError after `limit` or more steps in a row with a skipped
        update."""
        made, skipped = sum(self._made.values()), sum(self._skipped.values())
        self.unlearned = [role for role, count in self._made.items() if count == self._skipped.get(role, 0)]
        self._made, self._skipped = {}, {}
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        why = "loss or gradient was not finite"
        self._recorder.note(
            f"step {step}: {skipped} of {made} updates skipped because the {why}; their samples: {self.file}"
        )
        if self.in_a_row >= self._limit:
            raise NonFiniteError(
                f"{self.in_a_row} consecutive steps up to step {step} had an update whose {why} "
                f"(run.max_nonfinite_steps). These updates were not applied: look at their samples and data rows in "
                f"{self.file}"
            )

    def end_of_run(self) -> None:
        """Raises NonFiniteError if the last step applied no update of some role, whatever the limit. Called after the
        last step, with everything saved."""
        if self.unlearned:
            raise NonFiniteError(
                f"the last step applied no update of the {' and the '.join(self.unlearned)}: loss or gradient was not "
                f"finite. The saved weights are those before it: look at its samples and data rows in {self.file}"
            )

    def _write_down(
        self,
        role: str,
        metrics: dict[str, float],
        step: int,
        by: str,
        places: list[int],
        rows: list[int | None],
    ) -> None:
        if not self._writes:
            return
        line = {"step": step + 1, "update": self._made[role], "role": role}
        values = {name: metrics[name] for name in ("loss", "grad_norm")}
        samples = {"by": by, "sample_ids": places, "rows": rows}
        row = line | values | samples
        self._recorder.write_guarded("the skipped update's samples", lambda: append_jsonl(self.file, row))


def _suspects(learner: Learner, rollout: Rollout, targets: Sequence[Tensor]) -> tuple[str, Sequence[int]]:
    """Returns the source of the suspicion and the indices of the suspect samples in the rollout."""
    if outputs := learner.last_outputs.nonfinite_samples(rollout):
        return "outputs", outputs
    if targets:
        bad = rollout.dense(~torch.stack(list(targets)).isfinite().all(0)).any(1)
        if found := bad.nonzero().flatten().tolist():
            return "targets", found
    return "mini-batch", range(rollout.num_samples)


def over_updates(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means over the applied updates (over all if none was applied), and the number of skipped ones."""
    applied = [row for row in rows if not row["skipped"]]
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in applied if name in row] or [row[name] for row in rows if name in row]
        means[name] = sum(values) / len(values)
    return means | {"skipped": sum(row["skipped"] for row in rows)}


def named(role: str, metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics under their logged names: `loss` becomes ROLE/loss; a name with a slash stays."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
