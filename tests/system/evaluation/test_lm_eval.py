"""`mrl eval --lm-eval` with the real lm-evaluation-harness and a local task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl import cli
from tests.conftest import TinyModels
from tests.helpers.sft_config import write

pytest.importorskip("lm_eval", reason="the package lm_eval (extra lm-eval) is not installed")

TASK = """
task: tiny_sums
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_a_task_s_accuracy_is_that_of_the_likelier_choice(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{n} + 1 =", "choices": [f" {n + 1}", f" {n + 2}"], "answer": 0} for n in range(8)]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks/sums.yaml").write_text(TASK.format(file=tmp_path / "sums.jsonl"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = tiny_models("llama")
    config = write(tmp_path, model)
    words = ["eval", str(config), "--lm-eval", "tiny_sums", "--lm-eval-path", str(tmp_path / "tasks"), "--rows", "6"]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/eval.json").read_text())
    made, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)

    def log_prob(question: str, choice: str) -> float:
        ids, begun = tokenizer(question + choice)["input_ids"], len(tokenizer(question)["input_ids"])
        with torch.no_grad():
            each = made(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return float(sum(each[i, ids[i + 1]] for i in range(begun - 1, len(ids) - 1)))

    right = [
        log_prob(row["question"], row["choices"][0]) > log_prob(row["question"], row["choices"][1]) for row in rows
    ]
    accuracy = found["estimates"]["tiny_sums/acc"]
    assert accuracy["value"] == pytest.approx(sum(right[:6]) / 6) and accuracy["low"] < accuracy["high"]
    assert found["data"] == "tiny_sums" and found["weights"] == str(model) and (tmp_path / "out/eval.html").is_file()
    assert cli.main(["eval", str(config), "--lm-eval", "nowhere"]) == 1
    assert "lm_eval has no task nowhere" in capsys.readouterr().err
