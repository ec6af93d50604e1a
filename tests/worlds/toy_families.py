"""Runs tests/worlds/weights.py with the families of tests/helpers/toy_families.py registered."""

from __future__ import annotations

from safetensors.torch import load_file

from mrl.parallel import Meshes
from mrl.weights.convert.convert import ConvertOptions, hf_to_megatron, megatron_to_hf
from tests.helpers.toy_families import add_toys
from tests.worlds.weights import CHECKS, Job, run_checks


def convert(job: Job) -> list[str]:
    """Converts to Megatron and back; returns the tensors that differ."""
    assert job.out is not None
    for convert, source, target in ((hf_to_megatron, job.path, "there"), (megatron_to_hf, job.out / "there", "back")):
        convert(source, job.out / target, ConvertOptions(), Meshes(60))
    want, got = (load_file(path / "model.safetensors") for path in (job.path, job.out / "back"))
    return [name for name in want.keys() | got.keys() if not want[name].equal(got[name])]


add_toys()
run_checks({**CHECKS, "convert": convert}, Job)
