"""The limit of host memory: the machine's, a Slurm job's, a container's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl import platform
from mrl.cli import main
from mrl.platform.host_limit import free_host_memory
from tests.conftest import TinyModels

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: str) -> None:
    """Writes a control group that uses 30 MiB, of which 10 MiB are file cache."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(
        (*names[:2], "memory.stat"), (limit, str(30 * MIB), f"{names[2]} {10 * MIB}"), strict=True
    ):
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("own", "limits", "free"),
    [
        ("0::/job/step", {"job/step": "max", "job": str(100 * MIB)}, 80 * MIB),
        ("0::/job/step", {"job/step": str(50 * MIB), "job": str(100 * MIB)}, 30 * MIB),
        ("0::/", {"": str(25 * MIB)}, 5 * MIB),
        ("0::/", {"": str(15 * MIB)}, 0),
        ("0::/job", {"job": "max"}, 500 * MIB),
        ("0::/of/another/machine", {}, 500 * MIB),
        ("5:cpu:/x\n4:memory:/job", {"memory/job": str(60 * MIB), "memory": str(2**63 - 4096)}, 40 * MIB),
        ("4:memory:/of/the/host", {"memory": str(60 * MIB)}, 40 * MIB),
    ],
)
def test_the_tightest_group_counts(
    own: str, limits: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=500 * MIB))
    (tmp_path / "cgroup").write_text(own + "\n")
    for name, limit in limits.items():
        group(tmp_path / "mounted" / name, V1 if name.startswith("memory") else V2, limit)
    assert free_host_memory(tmp_path, tmp_path / "mounted") == free


def test_a_conversion_that_could_not_compare_logits_does_not_begin(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "free_host_memory", lambda: 1000)
    target = tmp_path / "converted"
    assert main(["convert", "hf-to-megatron", str(tiny_models("llama")), str(target), "--verify"]) == 1
    said = capsys.readouterr().err
    assert all(fact in said for fact in ("comparing logits", "575 KB", "1 KB", "use --skip-logits"))
    assert not target.exists()
