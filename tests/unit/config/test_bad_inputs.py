"""Bad input of every kind is refused in one line, in bounded time, before any process starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mrl import cli
from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.data import tokenizer as tokenizer_module
from tests.conftest import TinyModels
from tests.helpers.bad_configs import DENSE, PPO, Bad
from tests.helpers.bad_inputs import FILES, GOOD_ROW, MESSAGES, OVERRIDES, ROWS, TEMPLATES, VALUES, BadInput
from tests.helpers.refused import refusal, write_run
from tests.helpers.tiny import tiny_tokenizer

ODD = """\
async def later(prompt, response, row): ...
def two(prompt, response): ...
def keyword(prompt, response, row, *, style): ...
def nothing(): ...
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def files(folder: Path) -> None:
    for name in ("dense", "halves", "chain"):
        (folder / name).mkdir()
    Path("dense/config.json").write_text(json.dumps(DENSE))
    Path("dense/model.safetensors").touch()
    Path("halves/dataset_dict.json").write_text("[]")
    for i in range(30):
        Path(f"chain/{i}.yaml").write_text(f"base: {i + 1}.yaml\n")
    for pipe in ("pipe", "pipe.jsonl"):
        os.mkfifo(pipe)
    Path("none.jsonl").write_text("\n\n")
    Path("none.json").write_text("[ ]")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), "none.parquet")
    Path("odd.py").write_text(ODD)
    Path("nul.py").write_bytes(b"def f(p, r, row): return 0.0\0\n")
    Path("train.jsonl").write_text(GOOD_ROW + "\n")
    Path("bad.parquet").write_text("PAR1 and nothing more PAR1")
    Path("deep.jsonl").write_text('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    Path("latin.jsonl").write_bytes('{"prompt": "\xe9t\xe9"}\n'.encode("latin-1"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("bad", FILES, ids=lambda bad: bad.id)
def test_a_file_that_is_no_configuration(bad: BadInput, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_bytes(bad.contents)
    line = refusal(capsys, "train", "c.yaml", code=2)
    assert all(part in line for part in bad.says), line


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("bad", VALUES, ids=lambda bad: bad.id)
def test_a_value_that_nothing_can_use(bad: Bad, capsys: pytest.CaptureFixture[str]) -> None:
    assert bad.old in PPO
    text = PPO.replace(bad.old, bad.new)
    Path("c.yaml").write_text(text)
    number = text[: text.index(bad.new) + len(bad.new)].count("\n") + 1
    line = refusal(capsys, "train", "c.yaml", code=2)
    assert line.startswith((f"  c.yaml:{number}: {bad.key}", f"  c.yaml:{number - 1}: {bad.key}")), line
    assert all(part in line for part in bad.says), line


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("bad", OVERRIDES, ids=lambda bad: bad.id)
def test_an_override_that_cannot_be_read(bad: BadInput) -> None:
    Path("c.yaml").write_text(PPO)
    with pytest.raises(ConfigError) as refused:
        load("c.yaml", [os.fsdecode(bad.contents)])
    heading, line = str(refused.value).splitlines()
    assert heading == "1 problem in c.yaml:" and all(part in line for part in bad.says), line
    assert line.encode() and len(line) < 500


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", [".", "pipe", "/dev/zero", "n" * 300, "a\0b", "\udcff.yaml"])
def test_what_is_no_file_at_all(name: str) -> None:
    Path("\udcff.yaml").write_text(PPO)
    with pytest.raises(ConfigError) as refused:
        load(name)
    heading, line = str(refused.value).splitlines()
    assert "cannot read" in line and (heading + line).encode()


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.mark.parametrize("key", ["policy_loss", "advantage"])
def test_an_algorithm_of_the_user_s_own_that_fails(model: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failing user's algorithm is found by a trial on a few tokens."""
    write_run(model)
    Path("mine.py").write_text("def f(inputs): return inputs.gone\n")
    estimator = "algorithm.adv_estimator=" + ("function" if key == "advantage" else "reinforce_plus_plus")
    line = refusal(capsys, "train", "c.yaml", estimator, f"algorithm.{key}.function=mine.py:f", code=1)
    assert line.startswith(f"algorithm.{key}.function 'mine.py:f', tried out on a few tokens: AttributeError: "), line


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("value", [".nan", "null", "[1]"])
def test_an_option_that_no_function_can_take(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option of an unsupported type is refused in one line that names the key as it is written."""
    Path("mine.py").write_text("def f(inputs, slope=1): ...\n")
    Path("c.yaml").write_text(PPO)
    options = f"{{function: mine.py:f, options: {{slope: {value}}}}}"
    line = refusal(capsys, "train", "c.yaml", f"algorithm.policy_loss={options}", code=2)
    assert "algorithm.policy_loss.options.slope: must be a finite number, a string, true or false, got " in line
    loss = load("c.yaml", [f"algorithm.policy_loss={options.replace(value, '3')}"], gpus=0).algorithm.policy_loss
    assert type(loss.options["slope"]) is int, "a function may count with it"


@pytest.mark.usefixtures("files")
def test_a_former_name_does_not_hide_other_mistakes() -> None:
    Path("c.yaml").write_text(PPO.replace("tensor: 2", "tensor: 4"))
    with pytest.raises(ConfigError) as refused:
        load("c.yaml", ["algorithm.policy_loss={loss_mode: dppo_kl, clip_ratio_low: x}"], gpus=0)
    keys = [problem.keys[0] for problem in refused.value.problems]
    assert keys[0] == "algorithm.policy_loss.clip_ratio_low" and "actor.parallel.tensor" in keys


@pytest.mark.parametrize("bad", ROWS, ids=lambda bad: bad.id)
def test_a_row_that_no_run_can_use(model: Path, bad: BadInput, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(model, bad.contents)
    line = refusal(capsys, "train", "c.yaml", code=1)
    assert all(part in line for part in bad.says), line


@pytest.mark.parametrize("bad", MESSAGES, ids=lambda bad: bad.id)
def test_a_message_that_no_model_should_see(model: Path, bad: BadInput, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(model, bad.contents, chat=True)
    line = refusal(capsys, "train", "c.yaml", code=1)
    assert all(part in line for part in bad.says), line


@pytest.mark.parametrize(
    ("bad", "command"),
    [
        *(pytest.param(bad, "train", id=f"{bad.id}-train") for bad in TEMPLATES),
        *(
            pytest.param(bad, "data", id=f"{bad.id}-data", marks=[] if bad.id == "syntax" else pytest.mark.slow)
            for bad in TEMPLATES
        ),
    ],
)
def test_a_template_that_dresses_nothing(
    folder: Path, bad: BadInput, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_S", 0.3)
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 10_000)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = bad.contents.decode()
    tokenizer.save_pretrained(folder / "model")
    Path("model/config.json").write_text(json.dumps(DENSE | {"vocab_size": 320, "max_position_embeddings": 128}))
    write_run(Path("model"), chat=True)
    line = refusal(capsys, command, "c.yaml", code=1)
    assert line.startswith("rows.jsonl:1: ") and all(part in line for part in bad.says), line


def test_a_byte_order_mark_is_no_mistake(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(model, b"\xef\xbb\xbf" + GOOD_ROW.encode())
    Path("c.yaml").write_bytes(b"\xef\xbb\xbf" + Path("c.yaml").read_bytes())
    assert cli.main(["data", "c.yaml", "--samples", "1"]) == 0
    assert "rows.jsonl:1: 4 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("files")
def test_a_section_takes_over_another_s_keys() -> None:
    text = PPO.replace("actor:\n", "actor: &train\n").replace(
        "critic:\n", "critic:\n  <<: *train\n  optimizer: {lr: 2e-6}\n"
    )
    Path("c.yaml").write_text(text)
    cfg = load("c.yaml", ["rollout={<<: [{servers: 2}, {servers: 3, tensor: 2}], tensor: 1}"], gpus=0)
    assert cfg.critic.parallel == cfg.actor.parallel and cfg.critic.warmup_steps == 2
    assert (cfg.actor.optimizer.lr, cfg.critic.optimizer.lr) == (1e-6, 2e-6), "what is written beside << goes first"
    assert (cfg.rollout.servers, cfg.rollout.tensor) == (2, 1), "and the first section that has a key"


@pytest.mark.usefixtures("files")
def test_a_mistake_in_keys_taken_over_is_named_where_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    text = PPO.replace("actor:\n", "actor: &train\n").replace("critic:\n", "critic:\n  <<: *train\n")
    Path("c.yaml").write_text(text.replace("lr: 1e-6", "lrr: 1e-6"))
    assert cli.main(["train", "c.yaml"]) == 2
    err = capsys.readouterr().err
    assert "c.yaml:13: actor.optimizer.lrr: unknown key; did you mean lr?" in err
    assert "c.yaml:13: critic.optimizer.lrr: unknown key; did you mean lr?" in err
