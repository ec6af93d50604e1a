"""The export of a run names the tokens that end a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mrl.cli import main
from mrl.weights.merge import merge
from tests.conftest import TinyModels
from tests.helpers.runs import train
from tests.unit.data.test_sft_data import CHATML, TALK, with_template


@pytest.mark.parametrize("adapted", [True, False])
def test_a_run_exports_what_it_has_learnt_to_stop_with(
    tmp_path: Path, tiny_models: TinyModels, capfd: pytest.CaptureFixture[str], adapted: bool
) -> None:
    """A run exports its chat template and the end-of-turn token that it has learned: with its model, its adapters,
    their merged model, and what is converted from its checkpoint.
    """
    shutil.copytree(tiny_models("llama", vocab_size=272), tmp_path / "model")
    end = with_template(tmp_path / "model", CHATML).hf.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.9}')
    (tmp_path / "mine.jinja").write_text(CHATML + "{# mine #}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    config = {
        "trainer": "sft",
        "run": {"name": "run", "root": str(tmp_path), "steps": 1, "trackers": []},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "chat_template": str(tmp_path / "mine.jinja")},
        **({"actor": {"lora": {"rank": 2}}} if adapted else {}),
        "data": {"train": str(tmp_path / "rows.jsonl"), "form": "messages", "chat_template": True},
        "batch": {"samples_per_step": 1},
        "checkpoint": {"export_hf": True, "every_steps": 1},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    said = train(tmp_path, tmp_path / "c.yaml").terminal
    before, of_the_run = said.index("the chat template ends the assistant's turns"), said.index("learns to stop with")
    assert before < of_the_run
    convert = ["convert", "megatron-to-hf", str(tmp_path / "run/checkpoints/step_1"), str(tmp_path / "converted")]
    assert main([*convert, *(["--adapter"] if adapted else [])]) == 0
    written = [tmp_path / "run/hf", tmp_path / "converted"]
    if adapted:
        merge(tmp_path / "model", tmp_path / "run/adapter", tmp_path / "merged", 1 << 30)
        written += [tmp_path / "run/adapter", tmp_path / "merged"]
    for directory in written:
        assert json.loads((directory / "generation_config.json").read_text()) == {
            "eos_token_id": [2, end],
            "top_p": 0.9,
        }
        assert (directory / "chat_template.jinja").read_text().endswith("{# mine #}")
    (tmp_path / "mine.jinja").unlink()
    convert[-1] = str(tmp_path / "again")
    assert main([*convert, *(["--adapter"] if adapted else [])]) == 0
    assert "mine.jinja, the chat template of the run, is missing" in capfd.readouterr().err
