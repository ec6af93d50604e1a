"""A rank of a run that a script has started: `python -m mrl.api.rank FILE`."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.tree import Source

if TYPE_CHECKING:
    from mrl.trainers.shared.callbacks import TrainerCallback


def write(file: Path, config: Source, overrides: Sequence[str], callbacks: Sequence[TrainerCallback]) -> None:
    """Writes what the ranks need."""
    import cloudpickle

    from mrl.files import write_atomically

    content = cloudpickle.dumps((config, overrides, callbacks))
    write_atomically(file, pickle.dumps((sys.path, content)))


def main() -> int:
    """Trains as one rank of the world that the environment describes; returns the exit code."""
    from mrl.resilience import preemption, rank

    preemption.restore_default_signals()
    rank.set_up_process()
    from mrl import failure
    from mrl.commands import world
    from mrl.config.loader import load

    paths, content = pickle.loads(Path(sys.argv[1]).read_bytes())
    sys.path += [entry for entry in paths if entry not in sys.path]  # for what the callbacks import
    with failure.noted():
        config, overrides, callbacks = pickle.loads(content)
        cfg = load(config, overrides, joined=world.joined_machine())
    return world.run_rank(cfg, callbacks)


if __name__ == "__main__":
    sys.exit(main())
