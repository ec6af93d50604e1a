"""Save and load all that a run needs to go on: its trained models and what the loop keeps."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.checkpoint import directory, torch_dist
from mrl.checkpoint.agreement import CheckpointError, on_main, together
from mrl.checkpoint.learner_state import LearnerState, tied_copies_are_equal
from mrl.learner import Learner
from mrl.parallel import rank

SHAPE_FREE = ("max_positions", "initializer_range", "eos_token_ids")  # may differ from the checkpoint's


def save(run_dir: Path, step: int, learners: dict[str, Learner], state: dict[str, Any], keep_last: int) -> Path:
    """Writes RUN_DIR/checkpoints/step_N and returns it; then removes all but the last `keep_last`. Collective.

    learners: trainable ones, by a name that `load` finds them under
    state: anything that JSON can hold; rank 0's is written

    Megatron's random states are not part of it: nothing in training draws from them.

    Raises CheckpointError on every rank if any rank fails (disk full, no permission, ...); there is no step_N then and
    older checkpoints are as they were.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least the newest checkpoint is kept")
    _require_trainable(learners)
    final = directory.root(run_dir) / f"step_{step}"
    tmp = final.with_name(f"{final.name}.tmp")
    try:
        on_main(f"making {tmp}", lambda: directory.begin(tmp))
        for name, learner in learners.items():
            _save_learner(learner, tmp / name)
        kinds = {name: _kind(learner) for name, learner in learners.items()}
        on_main(f"completing {final}", lambda: directory.finish(tmp, final, kinds, state))
    except BaseException:
        if rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)  # a leftover is no checkpoint, and the next save takes it away
        raise
    on_main(f"removing old checkpoints beside {final}", lambda: directory.prune(final.parent, keep_last, final))
    return final


def load(path: Path, learners: dict[str, Learner]) -> dict[str, Any]:
    """Puts the checkpoint's weights, optimizer states and schedules into `learners`; returns `state`. Collective.

    The learners may have another layout or dtype than those that were saved. Learning rates and the like stay those of
    the configuration.

    Raises CheckpointError on every rank if the checkpoint is incomplete or damaged, or of other models.
    """
    _require_trainable(learners)
    manifest, state = on_main(f"opening {path}", lambda: directory.read(path))
    together(f"comparing the run with {path}", lambda: _compare(manifest["learners"], learners))
    for name, learner in learners.items():
        _load_learner(learner, path / name)
    return state


def _require_trainable(learners: dict[str, Learner]) -> None:
    frozen = [name for name, learner in learners.items() if not learner.trainable]
    if frozen:
        raise ValueError(f"{', '.join(frozen)}: not trained, so there is nothing to save or load")


def _save_learner(learner: Learner, path: Path) -> None:
    with learner.mesh.active():
        state = together(f"collecting the state for {path}", lambda: LearnerState(learner, is_loading=False))
        torch_dist.write(state.sharded(), state.counters(), path, learner.mesh.dp_cp_group)


def _load_learner(learner: Learner, path: Path) -> None:
    with learner.mesh.active():
        state = together(f"making room for {path}", lambda: LearnerState(learner, is_loading=True))
        loaded = torch_dist.read(state.sharded(), path)
        together(f"restoring {path}", lambda: _restore(state, loaded))


def _restore(learner_state: LearnerState, loaded: dict[str, Any]) -> None:
    learner_state.restore(loaded)
    if not tied_copies_are_equal(learner_state.learner):
        raise CheckpointError("the first stage's embedding and the last stage's copy of it differ")


def _kind(learner: Learner) -> dict[str, Any]:
    return {"role": learner.role, "arch": {k: v for k, v in asdict(learner.arch).items() if k not in SHAPE_FREE}}


def _compare(stored: dict[str, Any], learners: dict[str, Learner]) -> None:
    problems = []
    for name, learner in learners.items():
        if name not in stored:
            problems.append(f"there is no {name} in it, but {', '.join(stored)}")
            continue
        here, there = _kind(learner), stored[name]
        if here["role"] != there["role"]:
            problems.append(f"{name} is a {here['role']}, in the checkpoint a {there['role']}")
        keys = here["arch"].keys() | there["arch"].keys()
        for key in sorted(keys):
            if (a := here["arch"].get(key)) != (b := there["arch"].get(key)):
                problems.append(f"{name}: {key} is {a}, in the checkpoint {b}")
    if problems:
        raise CheckpointError("; ".join(problems))
