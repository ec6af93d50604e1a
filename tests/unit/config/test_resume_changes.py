"""Changes of the configuration that a resumed run accepts or refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from mrl.config.file_fingerprint import changed_files, fingerprint
from mrl.config.resume import ConfigChanged, check_resume, is_key, may_change, snapshot, unknown
from mrl.config.schema import RLConfig
from mrl.config.tokenizer_files import TOKENIZER_FILES
from mrl.config.trainers.diffusion import DDPOConfig
from mrl.config.trainers.dpo import DPOConfig
from mrl.observe import rewind
from tests.helpers.train_tools import write_config


def test_a_key_changes_what_the_run_computes_unless_it_is_known_not_to() -> None:
    free = [key for key in keys(RLConfig) if may_change(key)]
    assert {"run.steps", "run.nproc", "actor.parallel.tensor", "critic.parallel", "rollout.urls"} <= set(free)
    assert {"rollout.servers", "sync.transport", "checkpoint.every_steps", "data.validation"} <= set(free)
    fixed = set(keys(RLConfig)) - set(free)
    assert {"run.seed", "model.path", "model.dtype", "data.train", "data.shuffle", "reward.function"} <= fixed
    assert {"rollout.deterministic", "rollout.quantization"} <= fixed, "it is what samples are drawn by"
    assert {"actor.optimizer.lr", "critic.warmup_steps", "rollout.engine", "rollout.sampling.temperature"} <= fixed
    assert all(key in fixed for key in keys(RLConfig) if key.split(".")[0] in ("algorithm", "batch"))


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from keys(option, f"{prefix}{name}.")


def test_changes_are_found_named_and_accepted_by_name(tmp_path: Path) -> None:
    def made(**changes: Any) -> RLConfig:
        return RLConfig.model_validate_json(json.dumps(yaml.safe_load(file.read_text()) | changes))

    file = write_config(tmp_path, tmp_path)
    stored, before = snapshot(made()), made()
    del stored["config"]["checkpoint"]["on_error"]  # as if a later version added the key
    assert check_resume(stored, before, tmp_path) == []
    moved = made(actor={"optimizer": {"lr": 1e-3}, "parallel": {"tensor": 2}})
    assert [str(change) for change in check_resume(stored, moved, tmp_path)] == ["actor.parallel.tensor: 1 -> 2"]
    with pytest.raises(ConfigChanged, match=r"critic: null -> a section") as raised:
        check_resume(stored, made(critic={}, batch={"prompts_per_step": 5}), tmp_path)
    assert "batch.prompts_per_step: 4 -> 5" in str(raised.value)
    assert "'checkpoint.accept_changes=[critic, batch.prompts_per_step, batch.samples_per_prompt]'" in str(raised.value)
    check_resume(stored, made(critic={}, checkpoint={"accept_changes": ("critic",)}), tmp_path)
    with (tmp_path / "train.jsonl").open("a") as data:
        data.write("{}\n")
    with pytest.raises(ConfigChanged, match=r"data.train: .*train.jsonl of \d+ bytes.* -> .edited: \d+ bytes"):
        check_resume(stored, before, tmp_path)


def test_a_key_of_an_adapter_may_change_as_the_run_s(tmp_path: Path) -> None:
    def made(**adapters: Any) -> RLConfig:
        return RLConfig.model_validate_json(json.dumps(yaml.safe_load(file.read_text()) | {"adapters": adapters}))

    def reward(workers: int, function: str = "math") -> dict[str, Any]:
        return {"reward": {"function": function, "workers": workers}}

    file = write_config(tmp_path, tmp_path)
    stored = snapshot(made(a={}, b=reward(2)))
    found = check_resume(stored, made(b=reward(3), a={}), tmp_path)
    assert [str(change) for change in found] == ["adapters.b.reward.workers: 2 -> 3"]
    with pytest.raises(ConfigChanged) as raised:
        check_resume(stored, made(a={"optimizer": {"lr": 0.5}}, b=reward(3, "arithmetic")), tmp_path)
    assert "adapters.a.optimizer: null -> {" in str(raised.value)
    assert 'adapters.b.reward.function: "math" -> "arithmetic"' in str(raised.value)
    assert "accept_changes=[adapters.a.optimizer, adapters.b.reward.function]" in str(raised.value)
    assert is_key(RLConfig, "adapters.a.optimizer") and is_key(RLConfig, "adapters.b.reward.function")
    with pytest.raises(ConfigChanged, match=r'adapters: \["a", "b"\] -> \["a", "c"\]'):
        check_resume(stored, made(a={}, c={}), tmp_path)


def test_data_edited_without_a_change_of_its_size_is_noticed(tmp_path: Path) -> None:
    def made(*accepted: str, **changes: Any) -> RLConfig:
        text = yaml.safe_load(file.read_text()) | {"checkpoint": {"accept_changes": accepted}} | changes
        return RLConfig.model_validate_json(json.dumps(text))

    file, data = write_config(tmp_path, tmp_path), tmp_path / "train.jsonl"
    (tmp_path / "table").mkdir()
    (tmp_path / "table/part.parquet").write_text("rows")
    both = {"train": [str(data), str(tmp_path / "table")], "max_prompt_tokens": 16}
    stored, one = snapshot(made(data=both)), snapshot(made())
    rows = data.read_bytes()
    data.write_bytes(rows.replace(b"1", b"2", 1))
    assert len(data.read_bytes()) == len(rows)
    with pytest.raises(ConfigChanged, match=rf"data.train: .{data} of (\d+) bytes, digest \w+. -> .edited: \1 bytes"):
        check_resume(one, made(), tmp_path)
    [change] = check_resume(one, made("data.train"), tmp_path)
    assert str(change).startswith("data.train: ")
    older = {"config": one["config"], "data_bytes": {"data.train": len(rows)}}
    assert check_resume(older, made(), tmp_path) == []
    of_data, of_files = unknown(older, made())
    assert "the checkpoint has no digests of data" in of_data and unknown(one, made()) == []
    assert "no digests of files: changes to the contents of model.path, reward.function" in of_files

    data.write_bytes(rows)
    held_out = {"train": str(data), "validation": str(tmp_path / "validation.jsonl"), "max_prompt_tokens": 16}
    judged = snapshot(made(data=held_out))
    (tmp_path / "validation.jsonl").write_text("{}\n")
    [change] = check_resume(judged, made(data=held_out), tmp_path)
    assert str(change).startswith("data.validation: ") and "edited: 3 bytes" in str(change), "said, and no hindrance"
    (tmp_path / "table/.lock").write_text("")
    assert check_resume(stored, made(data=both), tmp_path) == []
    (tmp_path / "table/part.parquet").write_text("cows")
    with pytest.raises(ConfigChanged, match=r"table of 4 bytes, digest \w+. -> .edited: 4 bytes"):
        check_resume(stored, made(data=both), tmp_path)


def test_functions_that_were_edited_are_noticed(tmp_path: Path) -> None:
    """Edits of a user's function are noticed, also in modules of its folder that it imports, but not in other files."""

    def made(*accepted: str) -> RLConfig:
        text = yaml.safe_load(file.read_text()) | {"checkpoint": {"accept_changes": accepted}}
        return RLConfig.model_validate_json(json.dumps(text))

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    file, own = write_config(tmp_path, tmp_path), tmp_path / "reward.py"
    write("reward.py", f"import json, mrl.core\nimport words\n{own.read_text()}")
    write("words.py", "from tables.short import LIST\n")
    write("tables/__init__.py", "")
    write("tables/short.py", "LIST = 1\n")
    stored = snapshot(made())
    for name in ("other.py", "mrl/core.py", "json_notes.txt"):
        write(name, "")
    os.utime(own, (1, 1))
    assert check_resume(stored, made(), tmp_path) == []
    write("tables/short.py", "LIST = 2\n")
    with pytest.raises(ConfigChanged, match=rf"reward.function: .{own}. -> .edited: tables/short.py") as refused:
        check_resume(stored, made(), tmp_path)
    assert "'checkpoint.accept_changes=[reward.function]'" in str(refused.value)
    [change] = check_resume(stored, made("reward.function"), tmp_path)
    assert "tables/short.py" in str(change)
    write("tables/short.py", "LIST = 1\n")
    own.write_text(own.read_text() + "\n")
    (tmp_path / "words.py").unlink()
    with pytest.raises(ConfigChanged, match="edited: reward.py, tables/__init__.py, tables/short.py and 1 more"):
        check_resume(stored, made(), tmp_path)


@pytest.mark.parametrize("key", ["model.path", "ref.path", "critic.path", "reward.model.path"])
def test_other_weights_of_a_model_that_no_checkpoint_has_are_noticed(tmp_path: Path, key: str) -> None:
    """Other weights of a model that is not in the checkpoint are noticed, even with equal shapes and the same path."""
    file, frozen = write_config(tmp_path, tmp_path / "actor"), str(tmp_path / "frozen")
    for name in ("actor", "frozen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1000))
    text, kl = yaml.safe_load(file.read_text()), {"kl": {"use_in_loss": True, "coef": 0.1}}
    more: dict[str, Any] = {
        "model.path": {"algorithm": text["algorithm"] | kl},  # the reference has the actor's first weights
        "ref.path": {"algorithm": text["algorithm"] | kl, "ref": {"path": frozen}},
        "critic.path": {"critic": {"path": frozen, "frozen": True}},
        "reward.model.path": {"reward": {"manager": "model", "model": {"path": frozen}}},
    }
    without, cfg = (RLConfig.model_validate_json(json.dumps(text | each)) for each in ({}, more[key]))
    before, before_without = snapshot(cfg), snapshot(without)
    folder = tmp_path / ("actor" if key == "model.path" else "frozen")
    (folder / "README.md").write_text("mine")
    assert check_resume(before, cfg, tmp_path) == []
    (folder / "model.safetensors").write_bytes(bytes(999) + b"\1")
    with pytest.raises(ConfigChanged, match=rf"{key}: .{folder}. -> .edited: model.safetensors"):
        check_resume(before, cfg, tmp_path)
    assert check_resume(before_without, without, tmp_path) == [], "the checkpoint has the actor"
    assert check_resume({"config": before["config"]}, cfg, tmp_path) == [], "an older one does not say"
    (tmp_path / "actor/tokenizer.json").write_text("{}")
    with pytest.raises(ConfigChanged, match="edited: .*tokenizer.json"):
        check_resume(before_without, without, tmp_path)


def test_every_file_that_a_run_is_made_of_anew_is_named() -> None:
    model = {"path": "m", "chat_template": "chat.jinja"}
    rl = RLConfig.model_validate(
        {
            "trainer": "rl",
            "run": {"name": "all"},
            "model": model,
            "data": {"train": "-"},
            "batch": {"prompts_per_step": 1},
            "agent": {"rollout": "a.py:Env", "parser": "hermes"},
            "reward": {
                "manager": "recipe",
                "function": "b.py:all",
                "functions": {"sums": "c.py:one", "words": "exact_match"},
                "recipe": {"*": {"d.py:two": 1.0, "math": 1.0, "batch": 1.0}},
            },
            "algorithm": {
                "advantage": {"function": "e.py:mine"},
                "policy_loss": {"function": "f.py:mine"},
                "filter_groups": {"function": "g.py:keep"},
            },
        }
    )
    tokenizer = {f"m/{name}" for name in TOKENIZER_FILES}
    of_rl = {path for _, path in rl.reread_files()}
    assert of_rl == {*(f"{name}.py" for name in "abcdefg"), "chat.jinja", *tokenizer}
    assert all(is_key(RLConfig, key) for key, _ in rl.reread_files()), "accept_changes takes them"
    rows = {"run": {"name": "all"}, "model": model, "data": {"train": "-"}, "batch": {"rows_per_step": 1}}
    for policy, of_reference in (("frozen", {"m"}), ("cached", {"m"}), ("refreshed", tokenizer)):
        dpo = DPOConfig.model_validate({"trainer": "dpo", "ref": {"policy": policy}, **rows})
        assert {path for _, path in dpo.reread_files()} == {"chat.jinja", *of_reference}
    ddpo = DDPOConfig.model_validate(
        {
            **{"trainer": "ddpo", "run": {"name": "all"}, "model": {"path": "m"}, "data": {"train": "-"}},
            "batch": {"prompts_per_step": 1},
            "reward": {"function": "a.py:score", "scorer": {"path": "clip"}},
        }
    )
    assert {*ddpo.reread_files()} == {("model.path", "m"), ("reward.function", "a.py"), ("reward.scorer.path", "clip")}


def test_a_long_file_is_looked_at_in_a_few_places(tmp_path: Path) -> None:
    """A long file is sampled in a few places, because reading 140 GiB of zeros would take minutes. In the other file
    one of fifty layers differs."""

    def made(name: str, size: int, trained: range = range(0)) -> dict[str, str]:
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as writer:
            writer.truncate(size)
            writer.seek(trained.start)
            writer.write(b"\1" * len(trained))
        return fingerprint(tmp_path / name)

    size = 100 << 20
    assert changed_files(made("long", 140 << 30), made("longer", (140 << 30) + 1)) == ["model.safetensors"]
    base, same, trained = made("base", size), made("same", size), made("trained", size, range(60 << 20, 62 << 20))
    assert not changed_files(base, same) and changed_files(base, trained) == ["model.safetensors"]


def test_what_was_written_down_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("step_1", "step_2", "step_3", "validation_step_0", "validation_step_2", "validation_step_4", "mine"):
        (tmp_path / f"rollouts/{name}.jsonl").write_text("")
    metrics, notes = tmp_path / "metrics.jsonl", tmp_path / "notes.jsonl"
    notes.write_text("somebody's own\n")
    metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(5)) + '{"step": 5, "torn')
    with metrics.open("a") as writer:
        assert rewind(tmp_path, 2) == "3 rows of metrics.jsonl, 2 files of rollouts/"
        writer.write('{"step": 3}\n')
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2, 3]
    left = {file.stem for file in (tmp_path / "rollouts").iterdir()}
    assert left == {"step_1", "step_2", "validation_step_0", "validation_step_2", "mine"}
    assert rewind(tmp_path, 3) == ""
    assert rewind(tmp_path, 0) == "4 rows of metrics.jsonl, 4 files of rollouts/"
    assert notes.read_text() == "somebody's own\n"
