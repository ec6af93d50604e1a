"""Broken or hostile model directories: one line each that names the file, before any process starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import CONFIG_ERROR, main
from mrl.data import TokenizerError, load_tokenizer
from mrl.foreign import check_links
from mrl.weights.disk.megatron_dirs import open_megatron
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.errors import WeightError
from tests.helpers.bad_models import (
    BAD_CHECKPOINTS,
    BAD_MODELS,
    BAD_WEIGHTS,
    Bad,
    link,
    settings,
    tokenizer,
    write_model,
)
from tests.helpers.tiny import make_tiny

RUN = """\
trainer: sft
run: {name: warm}
model: {path: model, from_scratch: true}
data: {train: train.jsonl, max_prompt_tokens: 16}
batch: {samples_per_step: 8}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(RUN)
    Path("train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("command", "bad"),
    [*(("train", bad) for bad in BAD_MODELS), ("data", BAD_MODELS[0])],  # both load it the same way
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_a_bad_model_is_one_line_before_anything_starts(command: str, bad: Bad, model: Path, capfd: Any) -> None:
    bad.change(model)
    assert main([command, "c.yaml"]) == CONFIG_ERROR
    head, *lines = capfd.readouterr().err.splitlines()
    assert head == "1 problem in c.yaml:" and len(lines) == 1, lines
    assert "model.path" in lines[0] and all(part in lines[0] for part in bad.says), lines[0]
    assert len(lines[0]) < 500
    assert sorted(path.name for path in Path().iterdir() if path.suffix != ".jsonl") == sorted(
        {"c.yaml", "model", *(["templates"] if Path("templates").exists() else [])}
    )


@pytest.mark.parametrize("bad", BAD_WEIGHTS, ids=lambda bad: bad.id)
def test_a_bad_weight_file_is_one_line(bad: Bad, model: Path) -> None:
    bad.change(model)
    with pytest.raises(WeightError) as caught, HFCheckpoint(model) as checkpoint:
        for name in checkpoint:
            checkpoint.source(name)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in bad.says), message
    assert len(message) < 500


@pytest.mark.parametrize("bad", BAD_CHECKPOINTS, ids=lambda bad: bad.id)
def test_a_bad_checkpoint_is_one_line(bad: Bad, model: Path) -> None:
    path = Path("checkpoints").absolute() / "step_1"
    shutil.copytree(model, path)
    bad.change(path)
    with pytest.raises(WeightError) as caught, open_megatron(path):
        raise AssertionError("not reached")
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in bad.says), message


def test_the_good_model_is_accepted(model: Path) -> None:
    with HFCheckpoint(model) as checkpoint:
        assert [checkpoint.source(name)[:].tolist() for name in "ab"] == [[0, 0], [0, 0]]
    assert load_tokenizer(model).eos_id == 1
    check_links(model)


def test_the_links_of_a_cache_are_its_own(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--some--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        shutil.move(file, cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    check_links(snapshot)
    assert load_tokenizer(snapshot).eos_id == 1
    with HFCheckpoint(snapshot) as checkpoint:
        assert len(checkpoint) == 2
    (cache / "blobs" / "config.json").unlink()
    (cache / "blobs" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"config\.json is a link to /etc/hostname, outside of the directory"):
        check_links(snapshot)


def test_a_tokenizer_without_tokenizer_json_is_measured_when_it_is_loaded(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1, "Ġ": 2, "</s>": 3, "c": 4}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"model_type": "gpt2", "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(("eos_token", "bos_token", "unk_token"), "</s>")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert load_tokenizer(tmp_path).eos_id == 3
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 4}))
    with pytest.raises(TokenizerError, match=r"the tokenizer has 5 tokens.*config\.json\) 4: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", [settings(auto_map={"AutoTokenizer": ["mine.Mine", None]}), tokenizer(model={})])
def test_a_tokenizer_that_is_refused_is_so_for_every_reader(change: Any, model: Path, monkeypatch: Any) -> None:
    """Every reader refuses such a tokenizer. It neither asks to run the tokenizer's code nor runs it."""
    (model / "mine.py").write_text("open('ran', 'w')\nclass Mine: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    change(model)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(model)
    assert "\n" not in str(caught.value) and not Path("ran").exists()


def test_a_tokenizer_that_cannot_encode_is_one_line(model: Path, capsys: Any) -> None:
    settings(model_max_length="long")(model)
    assert main(["data", "c.yaml"]) == 1
    assert capsys.readouterr().err.startswith("the tokenizer of model cannot encode text: '>' not supported")


def test_a_model_s_end_token_must_be_one_of_its_tokenizer(model: Path, capsys: Any) -> None:
    assert main(["train", "c.yaml", "model.eos_token=<|end|>"]) == CONFIG_ERROR
    assert "model.eos_token '<|end|>' is not in the vocabulary" in capsys.readouterr().err


def test_nothing_of_a_linked_file_reaches_a_conversion(tmp_path: Path, capfd: Any) -> None:
    source, secret = make_tiny(tmp_path / "llama", "llama"), tmp_path / "secret"
    secret.write_text("a password")
    link("notes.txt", str(secret))(source)
    assert main(["convert", "hf-to-megatron", str(source), str(tmp_path / "out")]) == 1
    said = capfd.readouterr().err
    assert f"mrl: {source}/notes.txt is a link to {secret}, outside of the directory" in said
    assert not (tmp_path / "out").exists()
