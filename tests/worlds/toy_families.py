"""tests/worlds/weights.py, where the families of tests/toy_families.py are known too."""

from __future__ import annotations

from mrl.parallel import Meshes
from mrl.weights.disk.stored_names import stored_names
from tests.toy_families import add_toys
from tests.worlds.weights import CHECKS, Job, error_of, run_checks


def convert(job: Job) -> str:
    """What a conversion says to the model."""
    return error_of(lambda: stored_names(job.arch, str(job.path), "policy", Meshes(60)))


add_toys()
run_checks({**CHECKS, "convert": convert}, Job)
