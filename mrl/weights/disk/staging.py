"""Staging of a model directory: it appears whole or not at all, written by all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mrl.directories import Staging
from mrl.parallel import rank
from mrl.weights.agreement import WeightAgreement


@contextlib.contextmanager
def staged(target: Path, needed_bytes: int, *, overwrite: bool = False) -> Iterator[Staging]:
    """Yields the staging of `target`. Rank 0 begins, commits and ends it. Collective.

    Raises WeightError on every rank if `target` cannot be written.
    """
    staging = Staging(target, needed_bytes, overwrite=overwrite)
    begin = f"beginning {target} failed"
    try:
        WeightAgreement().on_main(begin, staging.begin)
        yield staging
    finally:
        if rank() == 0:
            staging.end()
