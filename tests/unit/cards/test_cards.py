"""Model cards: an export's description, made from its run's files alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from mrl.cards import CardFacts, WeightsOrigin, merged_card, write_card, write_run_card
from mrl.cards.base_model import base_model
from mrl.cards.portable import portable
from mrl.observe import Recorder
from mrl.weights.disk.digest import file_digests, weight_files, whole_digest
from tests.conftest import TinyModels

ROWS = [
    {"step": 1, "reward/mean": 0.25, "validation/score": 0.5, "kl/ref": 0.0, "time/update": 1.0},
    {"step": 2, "reward/mean": 0.75, "kl/ref": 0.125, "time/update": 2.0, "actor/skipped": 1.0},
    {"step": 3, "reward/mean": 0.625, "validation/score": 0.875, "kl/ref": 0.25, "time/update": 1.0},
    {"step": 4, "reward/mean": 0.9, "validation/score": 1.0, "time/update": 1.0},
]


@pytest.fixture
def base(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """Copies a model's directory, with a card, to the layout of the hub's cache."""
    snapshot = tmp_path / "secret_home" / "models--Org--Tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_models("llama"), snapshot)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Tiny\n")
    return snapshot


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "secret_home" / "my run | ---"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return run_dir


def state(base: Path, **more: Any) -> dict[str, Any]:
    train = "/secret_home/me/data/train.jsonl"
    config = {
        "trainer": "rl",
        "run": {"name": "n", "root": "/secret_home/me/runs", "steps": 4, "seed": 7, "wandb": {"entity": "me"}},
        "model": {"path": str(base), "from_scratch": False},
        "actor": {"parallel": {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1}},
        "algorithm": {"adv_estimator": "gae"},
        "data": {"train": train, "validation": "held/out.jsonl"},
        "reward": {"function": "/secret_home/me/reward.py:score", "servers": [{"url": "http://host7:80"}]},
        "rollout": {"urls": ["http://host7:30000"], "note": "http://user:pw@host8/x"},
    }
    contents = {"data.train": {train: {"bytes": 2048, "digest": "feed" * 8}}}
    return {"config": config | more, "data_contents": contents}


def a_card(base: Path, run_dir: Path, export: Path, step: int = 3) -> str:
    shutil.copytree(base, export, ignore=shutil.ignore_patterns("README.md"))
    origin = WeightsOrigin(run_dir, state(base), step)
    facts = CardFacts.of(origin, export, file_digests(weight_files(export)), file_digests(weight_files(base)))
    assert write_card(facts, export) == ""
    return (export / "README.md").read_text()


def test_a_card_is_one_of_the_hubs_and_says_what_the_run_has_measured(
    base: Path, run_dir: Path, tmp_path: Path
) -> None:
    text = a_card(base, run_dir, tmp_path / "hf")
    data = ModelCard(text).data
    assert (data.base_model, data.license, data.pipeline_tag) == ("Org/Tiny", "apache-2.0", "text-generation")
    assert [(r.metric_name, r.metric_value) for r in data.eval_results] == [("validation/score", 0.875)]
    assert "| `reward/mean` | 0.25 | 0.75 (step 2) | 0.625 |" in text  # only steps up to the exported weights count
    assert "| `kl/ref` | 0 |  | 0.25 |" in text  # neither more nor less of it is better
    assert "after 3 steps of PPO on `train.jsonl`, with the reward `reward.py:score`" in text
    assert "The run was planned for 4 steps" in text and "not finite: 1." in text
    assert "| `train.jsonl` | 2.048 KB | blake2b feedfeed" in text
    assert (tmp_path / "hf" / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_card_tells_no_stranger_where_it_was_made(base: Path, run_dir: Path, tmp_path: Path) -> None:
    text = a_card(base, run_dir, tmp_path / "hf")
    for private in ("secret_home", str(tmp_path), "host7", "host8", "user:", "entity"):
        assert private not in text


def test_a_card_says_what_was_left_out_of_the_data(base: Path, run_dir: Path, tmp_path: Path) -> None:
    train = "/secret_home/me/data/train.jsonl"
    with Recorder(run_dir, 4) as recorder:
        recorder.note("waiting for the engine")
        recorder.note(f"data.train, {train}: 3 rows left out: none of their tokens is learnt")
        recorder.note("data.validation: 1 rows cut to 8 tokens: they have no end")
    text = a_card(base, run_dir, tmp_path / "hf")
    assert (
        "- data.train, train.jsonl: 3 rows left out: none of their tokens is learnt\n- data.validation: 1 rows" in text
    )
    assert "waiting" not in text and "secret_home" not in text


def test_a_card_lists_files_of_one_name(base: Path, run_dir: Path, tmp_path: Path) -> None:
    sources = {f"/data/{name}/train.jsonl": {"bytes": 1000, "digest": name} for name in ("gsm8k", "math")}
    origin = WeightsOrigin(run_dir, state(base) | {"data_contents": {"data.train": sources}}, 3)
    write_card(CardFacts.of(origin, base, {}, {}), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| `train.jsonl` | 1 KB | blake2b gsm8k |\n| `train.jsonl` | 1 KB | blake2b math |" in text
    assert "PPO on `train.jsonl`, with the reward" in text and "datasets" not in text


def test_a_merged_model_says_of_what_it_is_made(base: Path, tmp_path: Path) -> None:
    adapter, export, target = (tmp_path / name for name in ("secret_adapter", "staging", "ours"))
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"adapters")
    shutil.copytree(base, export, ignore=shutil.ignore_patterns("README.md"))
    assert merged_card(base, adapter, export, target, 7, 0.125) == ""
    card = ModelCard.load(export / "README.md")
    assert (card.data.base_model, card.data.license) == ("Org/Tiny", "apache-2.0")
    assert card.data.base_model_relation == "merge" and "# ours" in card.text
    assert "the adapters of 7 layers" in card.text and "12.5%" in card.text
    for directory in (base, adapter, export):
        assert whole_digest(file_digests(weight_files(directory))) in card.text
    assert str(tmp_path) not in (export / "README.md").read_text()


def test_what_a_reader_has_edited_is_kept(base: Path, run_dir: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    a_card(base, run_dir, first)
    facts = CardFacts.of(WeightsOrigin(run_dir, state(base), 4), first, {}, {})
    second.mkdir()
    assert write_card(facts, second, first) == "" and "after 4 steps" in (second / "README.md").read_text()
    mine = (second / "README.md").read_text().replace("# my run", "# Our model")
    (second / "README.md").write_text(mine)
    third.mkdir()
    assert "edited by hand" in write_card(facts, third, second)
    assert (third / "README.md").read_text() == mine


def test_an_export_without_a_card_says_why(base: Path, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"no": "step"}\n')
    note = write_run_card(WeightsOrigin(run_dir, state(base), 3), tmp_path, tmp_path / "hf", {}, {})
    assert "hf has no README.md" in note and "metrics.jsonl" in note


def test_no_half_of_a_card_is_left(base: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, origin = tmp_path / "hf", WeightsOrigin(run_dir, state(base), 3)
    export.mkdir()

    def full(self: Path, text: str, **how: str) -> None:
        self.write_bytes(text[:10].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in write_run_card(origin, export, tmp_path / "earlier", {}, {})
    assert list(export.iterdir()) == []


def test_a_model_of_random_weights_has_no_base(base: Path, run_dir: Path, tmp_path: Path) -> None:
    origin = WeightsOrigin(run_dir, state(base, model={"path": str(base), "from_scratch": True}), 3)
    assert origin.base_files() == []
    facts = CardFacts.of(origin, base, {}, {})
    (tmp_path / "hf").mkdir()
    write_card(facts, tmp_path / "hf")
    text = (tmp_path / "hf" / "README.md").read_text()
    assert "Random weights after 3 steps" in text and "base_model" not in text


def test_a_critic_with_weights_of_its_own_has_a_base_beside_a_random_actor(base: Path, run_dir: Path) -> None:
    models = {"model": {"path": "/somewhere/else", "from_scratch": True}, "critic": {"path": str(base)}}
    assert WeightsOrigin(run_dir, state(base, **models), 3, "critic").base == base
    assert WeightsOrigin(run_dir, state(base, **models), 3).base is None


def test_where_a_base_comes_from(base: Path, tmp_path: Path) -> None:
    found = base_model(base)
    assert (found.name, found.revision) == ("Org/Tiny", "a" * 40)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_bytes(b"---\n\xff: [\n---\n")
    plain = base_model(tmp_path / "mine")
    assert (plain.name, plain.revision, plain.license) == ("mine", None, {})


def test_a_configuration_for_strangers() -> None:
    told = portable({"path": "a/b/c", "api_key_file": "k", "x": ["~/y/z", "q"], "function": "r/s.py:f", "token": "t"})
    assert told == {"path": "c", "x": ["z", "q"], "function": "s.py:f", "token": "***"}


def test_adapters_are_loaded_beside_their_base(base: Path, run_dir: Path, tmp_path: Path) -> None:
    export = tmp_path / "adapter"
    export.mkdir()
    (export / "adapter_config.json").write_text('{"peft_type": "LORA", "task_type": "CAUSAL_LM"}')
    write_card(CardFacts.of(WeightsOrigin(run_dir, state(base), 3), export, {}, {}), export)
    card = ModelCard.load(export / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "Org/Tiny") and "lora" in card.data.tags
    assert card.data.base_model_relation == "adapter"
    assert "PeftModel.from_pretrained(model, PATH)" in card.text and "--enable-lora --lora-paths" in card.text
