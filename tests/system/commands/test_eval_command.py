"""`mrl eval` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.reward_model_config import rows_of
from tests.helpers.reward_model_config import write as write_reward_model
from tests.helpers.sft_config import write
from tests.system.trainers.test_sft import nll
from tests.unit.evaluation.test_eval import judge


def test_held_out_rows_by_the_command(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models("llama")
    config = write(tmp_path, model)
    done = zygote.run("mrl", "eval", config, "--out", tmp_path / "out", "run.name=none")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out/eval.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    for name, value in nll(model, rows).items():
        assert found["metrics"][f"validation/{name}"] == pytest.approx(value, rel=1e-5)
    assert "validation/perplexity/a" in done.stdout and (tmp_path / "out/eval.html").is_file()
    assert found["weights"] == str(model)


def test_how_often_a_reward_model_prefers_what_people_did(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = judge(tiny_models, tmp_path)
    made = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config, rows = write_reward_model(tmp_path, model), rows_of("pairs")

    def score(row: dict[str, Any], key: str) -> float:
        ids = [*tokenizer(row["prompt"] + row[key])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return float(made.eval()(torch.tensor([ids])).logits)

    done = zygote.run("mrl", "eval", config, "--out", tmp_path / "out", "run.name=none")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out/eval.json").read_text())["estimates"]
    margins = [score(row, "chosen") - score(row, "rejected") for row in rows]
    assert found["margin"]["value"] == pytest.approx(np.mean(margins), abs=1e-5)
    assert found["agreement"]["value"] == np.mean([margin > 0 for margin in margins])
    of_a = [margin > 0 for margin, row in zip(margins, rows, strict=True) if row["data_source"] == "a"]
    assert found["agreement/a"]["value"] == pytest.approx(np.mean(of_a))
    assert found["agreement"]["low"] <= found["agreement"]["value"] <= found["agreement"]["high"]
