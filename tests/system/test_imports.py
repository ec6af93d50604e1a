"""Modules that must be importable without heavy packages, each tested in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_nothing_heavy_is_imported() -> None:
    program = "import sys; from mrl.cli import main; main(['config', 'data']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_it_costs_the_launcher_nothing_to_import(tmp_path: Path) -> None:
    code = "import sys, mrl; before = set(sys.modules); import mrl.files; print(*sys.modules.keys() - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in found if name.split(".")[0] not in sys.stdlib_module_names | {"mrl"}}
    assert {name for name in found if name.startswith("mrl")} == {"mrl.files"}


def test_it_starts_without_torch() -> None:
    code = "import sys; from mrl.cli import main; main(['plan', 'yaml_configs/sft_qwen7b_8gpu.yaml']); "
    code += "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("code", "without"), [("import mrl", ["torch", "pydantic", "yaml"]), ("from mrl import PPOTrainer", ["torch"])]
)
def test_python_s_own_interface_is_quick_to_import(code: str, without: list[str]) -> None:
    code = f"import sys; {code}; print([name for name in {without} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_the_arch_does_not_import_megatron() -> None:
    code = "import sys, mrl.families.table; print('megatron.core' in sys.modules or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_the_room_is_importable_without_torch() -> None:
    without = {"torch", "math_verify", "pydantic", "httpx"}  # each worker would have to import these
    code = f"import sys, mrl.reward.worker, mrl.reward.pool; print({without} & {{*sys.modules}})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], timeout=60, cwd=root, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_algorithms_need_torch_alone() -> None:
    """The algorithms need only torch, and import within 1.5 s of processor time after it."""
    heavy = {"megatron", "transformers", "triton", "sglang"}
    code = "import sys, time, torch; start = time.process_time(); import mrl.algo.core, mrl.algo.preference; "
    code += f"print({heavy} & {{*sys.modules}}, time.process_time() - start < 1.5)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "set() True\n", done.stderr


def test_benchmarks_and_tools_can_be_imported() -> None:
    """All but those that need TRL (trl_*) or Megatron-Core 0.19 (resharding)."""
    bench = ROOT / "tools" / "bench"
    names = [file.stem for file in bench.glob("[!_]*.py") if not file.name.startswith(("trl_", "resharding"))]
    lines = ["import sys", f"sys.path.append({str(bench)!r})", "import tools.hammer, tools.soak"]
    lines += [f"import tools.bench.{name}" for name in names]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
