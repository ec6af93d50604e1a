"""`mrl data` shows the rows that training uses: the same truncation, counts and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mrl import cli
from mrl.commands.shared import load_read_only
from mrl.trainers import sft
from mrl.trainers.dpo import loop as dpo
from mrl.trainers.reward_model import loop as reward_model
from mrl.trainers.rl import main_parts
from tests.conftest import TinyModels

PAIR = {"prompt": "1+1?", "chosen": "2" * 30, "rejected": "3" * 50}
ROW = {"prompt": "1+1?", "answer": "2" * 90, "text": "1+1=" + "2" * 30}
CASES: dict[str, dict[str, Any]] = {
    "packs that cut": {"packing": {"strategy": "bfd", "seq_length": 40}},
    "packs that split": {"packing": {"strategy": "bfd_split", "seq_length": 40}},
    "packs that split texts": {
        "packing": {"strategy": "bfd_split", "seq_length": 20},
        "data": {"form": "text", "max_prompt_tokens": 1024},
    },
    "texts joined": {
        "packing": {"strategy": "wrapped", "seq_length": 20},
        "data": {"form": "text", "max_prompt_tokens": 1024},
    },
    "epochs": {"batch": {"epochs": 3}, "run": {"steps": None}},
    "rows as they are": {"data": {"max_tokens": 60}, "validation": {"rows": 2}},
    "pairs": {"trainer": "dpo"},
    "rewards": {"trainer": "reward_model", "data": {"max_tokens": 60}},
}


def write(folder: Path, model: Path, trainer: str = "sft", **sections: Any) -> Path:
    rows = PAIR if trainer in ("dpo", "reward_model") else ROW
    for name, count in (("train", 8), ("held_out", 3)):
        lines = (json.dumps(rows | {"prompt": f"{n}+1?" + "x" * (40 * (n == 2))}) for n in range(count))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text("def score(prompt, response, row):\n    return 1.0\n")
    config: dict[str, Any] = {
        "trainer": trainer,
        "run": {"name": "run", "root": str(folder), "steps": 6},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "validation": str(folder / "held_out.jsonl")},
        "batch": {"samples_per_step": 4},
    }
    config["data"] |= {"max_prompt_tokens": 20} | ({"max_tokens": 40} if rows is PAIR else {})
    if rows is PAIR:
        config["batch"] = {"rows_per_step": 4}
    if trainer == "rl":
        config |= {"batch": {"prompts_per_step": 4, "samples_per_prompt": 2}, "validation": {"prompts": 2}}
        config |= {"reward": {"function": f"{folder}/reward.py:score"}, "algorithm": {"adv_estimator": "grpo"}}
        config["rollout"] = {"sampling": {"max_new_tokens": 8}}
    for key, section in sections.items():
        config[key] = {**config.get(key, {}), **section}
    config["run"] = {key: value for key, value in config["run"].items() if value is not None}
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return folder / "c.yaml"


class Ready(Exception):
    """Raised once the trainer has read its rows."""


def notes_of_training(config: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int], Any]:
    """Returns the trainer's messages about its rows, the number of rows by data set, and its configuration."""
    cfg, notes, seen = load_read_only(config, ()), list[str](), list[Any]()
    recorder = SimpleNamespace(note=notes.append)

    def begin(*parts: Any, **named: Any) -> Any:
        raise Ready

    @contextmanager
    def started(resolved: Any) -> Iterator[Any]:
        seen.append(resolved)
        yield SimpleNamespace(world=None, recorder=recorder, begin=begin)

    if cfg.trainer == "rl":
        made = main_parts.make_generator(cfg, config.parent, None, None, recorder.note)  # type: ignore[arg-type]
        return made.notes(), [len(made.train), len(made.validation or ())], cfg
    module: Any = {"sft": sft, "dpo": dpo, "reward_model": reward_model}[cfg.trainer]
    monkeypatch.setattr(module, "set_up_run", started)
    monkeypatch.setattr(module, "build_learner", begin if cfg.trainer != "sft" else lambda *parts, **named: None)
    with pytest.raises(Ready), (module.open_sft_run if cfg.trainer == "sft" else module.open_run)(cfg):
        pass
    return notes, [], seen[0]


def agreed(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, Any]:
    """Compares `mrl data` with the trainer's messages; returns its output and the trainer's configuration."""
    notes, counts, cfg = notes_of_training(config, monkeypatch)
    notes = [note for note in notes if not note.startswith("validation: ")]  # the preview prints it next to the source
    assert cli.main(["data", str(config)]) == 0
    shown = capsys.readouterr().out
    said = shown.partition("\n\n")[0].splitlines()
    assert [line for line in said if line] == [note for note in notes if note in said] and {*notes} <= {*said}
    assert all(f": {count} prompts" in shown for count in counts)
    return shown, cfg


@pytest.mark.parametrize("case", CASES)
def test_the_preview_and_the_trainer_say_the_same(
    case: str,
    tmp_path: Path,
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write(tmp_path, tiny_models("llama"), **CASES[case])
    shown, cfg = agreed(config, monkeypatch, capsys)
    if case == "packs that cut":
        assert "data.train: 7 rows truncated to 40 tokens: they have no end" in shown
        assert "tokens of prompt, answer and EOS: 40 to 40" in shown
        assert "6 steps of 4 packs, 3.43 epochs" in shown
    if case == "packs that split":
        assert "data.train: 7 rows are longer than packing.seq_length=40 and split into pieces" in shown
        assert "data.train: 14 of these pieces, with " in shown and "and with it the question" in shown
    if case == "packs that split texts":
        assert "split into pieces" in shown and "and with it the question" not in shown
    if case == "epochs":
        assert cfg.run.steps == 6 and "6 steps of 4 rows, 3.43 epochs" in shown
    if case == "rows as they are":
        assert "data.validation: 2 prompts" in shown
    if case in ("pairs", "rewards"):
        assert "data.validation: " in shown
