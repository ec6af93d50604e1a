"""`mrl eval --precision-report`: fp8 recipes on a run's own samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mrl.precision import RecipeErrors, picture
from tests.helpers import zygote
from tests.helpers.tiny import make_tiny

RL = """\
trainer: rl
run: {name: one}
model: {path: tiny}
actor: {max_tokens_per_microbatch: 512}
data: {train: train.jsonl, max_prompt_tokens: 64}
batch: {prompts_per_step: 4, samples_per_prompt: 4}
rollout: {engine: transformers, sampling: {max_new_tokens: 16, temperature: 0.8}}
reward: {function: exact_match}
algorithm: {adv_estimator: grpo}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    make_tiny(root / "tiny", "qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.05)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "rl.yaml").write_text(RL)
    return root


def test_each_form_of_a_recipe_is_told_in_numbers_and_bars(folder: Path) -> None:
    rollouts = folder / "runs" / "one" / "rollouts"
    rollouts.mkdir(parents=True)
    samples = [
        {"prompt": f"{i}+{i}=", "response": f"{2 * i + i % 2} is it", "score": 1.0 - i % 2, "finish_reason": "stop"}
        for i in range(16)
    ]
    (rollouts / "step_2.jsonl").write_text('{"prompt": "of an earlier step", "response": "x", "score": 0.0}\n')
    (rollouts / "step_10.jsonl").write_text("\n".join(map(json.dumps, samples)) + "\n")
    made = zygote.run("mrl", "eval", "--precision-report", "rl.yaml", "--recipes", "blockwise,delayed", cwd=folder)
    assert made.returncode == 0, made.stderr
    assert "rollouts/step_10.jsonl: 16, " in made.stdout
    table = {
        name.strip(): [float(x.rstrip("%")) for x in numbers.split()]
        for name, numbers in re.findall(r"^(\S.*?) {2,}([\d.% ]+)$", made.stdout, re.M)
        if len(numbers.split()) == 6
    }
    forms = [f"{recipe}{part}" for recipe in ("blockwise", "delayed") for part in ("", ", head alone", " and head")]
    assert list(table) == ["bfloat16", *forms]
    for name, (mean, largest, ratio, _, cosine, length) in table.items():
        assert 0 < mean < largest and abs(ratio - mean) < 0.1 * mean, name
        assert 0.95 < cosine <= 1 and 0.9 < length < 1.1, name
    assert table["bfloat16"][0] < 0.5 * min(table[form][0] for form in forms)
    for recipe in ("blockwise", "delayed"):
        assert table[f"{recipe}, head alone"][0] < table[f"{recipe} and head"][0]
    svg = ElementTree.fromstring((folder / "runs" / "one" / "precision.svg").read_text())
    assert len(svg.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 3 * len(table)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run.name=other"], 1, "runs/other/rollouts has no training samples: train one step first"),
        (["--recipes", "tensorwise"], 2, "--recipes tensorwise: expected some of current, delayed, blockwise, mxfp8"),
        (["--samples", "0"], 2, "--samples 0: must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(folder: Path, words: list[str], code: int, says: str) -> None:
    made = zygote.run("mrl", "eval", "--precision-report", "rl.yaml", *words, cwd=folder)
    assert made.returncode == code and says in made.stderr and len(made.stderr.splitlines()) == 1, made.stderr


def test_samples_that_are_no_run_s_are_said_in_a_line(folder: Path) -> None:
    file = folder / "runs" / "broken" / "rollouts" / "step_1.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"response": \n{"response": "a"}\n')
    made = zygote.run("mrl", "eval", "--precision-report", "rl.yaml", "run.name=broken", cwd=folder)
    assert made.returncode == 1 and str(file.relative_to(folder)) in made.stderr, made.stderr
    assert len(made.stderr.splitlines()) == 1, made.stderr


def test_a_title_is_no_markup() -> None:
    row = RecipeErrors("a & b", 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert ElementTree.fromstring(picture([row], "<run>")) is not None
