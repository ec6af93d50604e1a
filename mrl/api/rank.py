"""Program of a run that a script starts: `python -m mrl.api.rank FILE` starts its ranks, which run the same command."""

from __future__ import annotations

import argparse
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.tree import Source
from mrl.ports import is_a_rank

if TYPE_CHECKING:
    from mrl.trainers.shared.callbacks import TrainerCallback


def write(file: Path, config: Source, overrides: Sequence[str], callbacks: Sequence[TrainerCallback]) -> None:
    """Writes what the program needs."""
    import cloudpickle

    from mrl.files import write_atomically

    write_atomically(file, pickle.dumps((sys.path, config, overrides, cloudpickle.dumps(callbacks))))


def main() -> int:
    """Starts the ranks, or trains as one of them; returns the exit code of `mrl train`."""
    from mrl.resilience import preemption

    (preemption.restore_default_signals if is_a_rank() else preemption.exit_as_resumable)()
    paths, config, overrides, callbacks = pickle.loads(Path(sys.argv[1]).read_bytes())
    if is_a_rank():
        sys.path += [entry for entry in paths if entry not in sys.path]  # for what the callbacks import
        return _train(config, overrides, callbacks)
    from mrl.commands import shared, train

    args = argparse.Namespace(config=config, overrides=overrides, nodes=1, is_program=True)
    try:
        return shared.exit_code_of(lambda: train.lead(args, ["mrl.api.rank", sys.argv[1]]))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _train(config: Source, overrides: Sequence[str], callbacks: bytes) -> int:
    """Trains as one rank of the world that the environment describes."""
    from mrl.resilience import rank

    rank.set_up_process()
    from mrl import failure
    from mrl.commands import world
    from mrl.config.loader import load

    with failure.noted():
        found = pickle.loads(callbacks)
        cfg = load(config, overrides, joined=world.joined_machine())
    return world.run_rank(cfg, found)


if __name__ == "__main__":
    sys.exit(main())
