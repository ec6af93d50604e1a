"""Adaptations of the platform, each tested in its own process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.platform import kept_memory
from tests.helpers.python_process import run_python

pytestmark = pytest.mark.long

IMPORT_SPECS = "from mrl import platform; platform.install(); import megatron.core.models.gpt.gpt_layer_specs"


@pytest.fixture
def shell_package(tmp_path: Path) -> Path:
    """Makes a transformer-engine without its compiled part."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('no pytorch part found')\n")
    info = tmp_path / "transformer_engine-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n")
    return tmp_path


DOCTOR = """
from rich.console import Console
from mrl import doctor, platform
Console(width=250).print(doctor.table(platform.features()))
"""


def test_a_shell_package_is_named_by_doctor_and_does_not_stop_megatron(shell_package: Path) -> None:
    done = run_python(f"{DOCTOR}{IMPORT_SPECS}; print(platform.applied())", path=shell_package)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "transformer-engine" in line)
    assert "2.9.0, unusable" in row and "no pytorch part found" in row
    assert "megatron-core" in done.stdout and "0.16.1" in done.stdout
    assert "te_without_gpu" in done.stdout.splitlines()[-1]
    assert "Warning" not in done.stderr


@pytest.fixture
def whole_package(tmp_path: Path) -> Path:
    """Makes an importable transformer-engine and apex, and torch's cudnn folder."""
    for name in ("transformer_engine/pytorch", "apex", "nvidia/cudnn"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("transformer_engine", "transformer_engine/pytorch", "apex"):
        (tmp_path / name / "__init__.py").write_text("")
    return tmp_path


def test_without_a_gpu_megatron_takes_no_kernels_for_gpus(whole_package: Path) -> None:
    """Megatron uses no GPU packages on a machine without a GPU. It would import them, and end with "no CUDA-capable
    device is detected"."""
    code = (
        "from mrl import platform; platform.install(); import megatron.core.optimizer, sys; "
        "print(platform.applied(), [sys.modules[name] for name in ('transformer_engine', 'apex')])"
    )
    done = run_python(code, path=whole_package)
    assert done.returncode == 0, done.stderr
    assert "te_without_gpu" in done.stdout and "[None, None]" in done.stdout


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, "nvidia/cudnn"), pytest.param({"CUDNN_HOME": "/own"}, "/own", marks=pytest.mark.slow)]
)
def test_transformer_engine_is_told_of_torch_s_cudnn(whole_package: Path, given: dict[str, str], wanted: str) -> None:
    """transformer-engine uses torch's cudnn. By itself it uses the CUDA toolkit's, and its attention fails with two
    versions in one process."""
    code = (
        "from mrl.platform import fused; fused.transformer_engine_fault(); import os; print(os.environ['CUDNN_HOME'])"
    )
    done = run_python(code, path=whole_package, **given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(wanted)


@pytest.mark.slow
def test_adaptation_can_be_switched_off_to_see_what_it_prevents(shell_package: Path) -> None:
    done = run_python(IMPORT_SPECS, path=shell_package, MRL_PLATFORM_OFF="te_without_gpu,broken_te")
    assert done.returncode != 0
    assert "no pytorch part found" in done.stderr


PLAIN = """
import json, os, resource, warnings
import torch, torch.distributed as dist
from mrl import platform
from mrl.platform import kept_memory
platform.install()
found = {}

compiled = torch.cuda._is_compiled
torch.cuda._is_compiled = lambda: True
found["torch for cuda"] = [platform.backend(), str(platform.device())]
torch.cuda._is_compiled = compiled

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def asked_for_huge_pages():
    place = torch.ones(64 << 20, dtype=torch.uint8).data_ptr()
    for line in open("/proc/self/smaps"):
        first, _, rest = line.partition("-")
        if rest and " " not in first and ":" not in first:
            here = int(first, 16) <= place < int(rest.split()[0], 16)
        elif here and line.startswith("VmFlags:"):
            return "hg" in line.split()
if kept_memory.returns_large_blocks():
    found["new pages"] = min(pages() for _ in range(9))  # a small block may have come to lie in the way once
    found["huge pages"] = asked_for_huge_pages()

def add(name):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    groups, one = [dist.new_group([0]) for _ in range(8)], torch.ones(1)
    for group in groups:
        dist.all_reduce(one, group=group)
    print(name, float(one), len(os.listdir("/proc/self/task")) < 8 + 8 * 2 + 4, flush=True)
    dist.destroy_process_group()
add("parent")
if pid := os.fork():
    print("copy ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    add("copy")
    os._exit(0)

import megatron.core.models.gpt.gpt_layer_specs
warnings.warn("mine")
found["device"] = [platform.backend(), str(platform.device())]
with torch.device("meta"):
    found["in a device's context"] = str(torch.arange(3).device)
print(json.dumps(found))
"""


@dataclass
class Plain:
    """Results and output of a process without broken packages. found: results by question; said: lines before them"""

    found: dict[str, Any]
    said: list[str]
    stderr: str


@pytest.fixture(scope="module")
def plain() -> Plain:
    done = run_python(PLAIN, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    return Plain(json.loads(found), said, done.stderr)


def test_a_torch_for_cuda_sees_no_gpu_in_its_own_stand_in(plain: Plain) -> None:
    """torch with CUDA sees no GPU in its own fallback. Ranks ask NVML, and torch then counts devices; Megatron is told
    that there is one."""
    assert plain.found["torch for cuda"] == ["gloo", "cpu"]


@pytest.mark.skipif(
    not kept_memory.returns_large_blocks(), reason="only glibc gives memory back at once, and only CPUs care"
)
def test_memory_that_was_given_back_is_had_again_without_new_pages(plain: Plain) -> None:
    assert plain.found["new pages"] < 1000  # 64 MiB have 16,384 pages


@pytest.mark.skipif(not kept_memory.returns_large_blocks(), reason="as above")
def test_large_tensors_are_asked_for_in_huge_pages(plain: Plain) -> None:
    """Large tensors request huge pages ('hg' in /proc); the system decides whether there are any."""
    assert plain.found["huge pages"] is True


def test_gloo_s_groups_share_a_thread_that_a_copy_of_the_process_makes_anew(plain: Plain) -> None:
    assert plain.said == ["parent 1.0 True", "copy 1.0 True", "copy ended with 0"], plain.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins apply only without CUDA")
def test_own_warnings_survive_install(plain: Plain) -> None:
    assert "UserWarning: mine" in plain.stderr
    assert plain.found["device"] == ["gloo", "cpu"]


def test_device_context_still_works_after_install(plain: Plain) -> None:
    """torch.device contexts still work after `install`. transformers builds models under torch.device("meta"); real
    tensors there would stay uninitialized."""
    assert plain.found["in a device's context"] == "meta", plain.stderr
