"""A run that is killed and started again is the run that was never killed: weights, metrics and samples."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from mrl.config.file_fingerprint import changed_files, fingerprint
from mrl.config.resume import ConfigChanged, check_resume, is_key, may_change, snapshot, unknown
from mrl.config.schema import RLConfig
from mrl.config.tokenizer_files import TOKENIZER_FILES
from mrl.config.trainers.diffusion import DDPOConfig
from mrl.config.trainers.dpo import DPOConfig
from mrl.observe import rewind
from mrl.rollout import Engine
from tests import zygote
from tests.conftest import TinyModels
from tests.train_tools import MEASURED, Train, given, write_config

RUN_S = 300.0
LAST, ATTEMPTS = 4, 5  # the step that runs end with, which a run that is killed must not have passed
VOCAB = 320
PPO: dict[str, Any] = {
    "actor": {
        "parallel": {"tensor": 2},
        "optimizer": {
            **{"lr": 5e-3, "warmup_steps": 4, "weight_decay": 0.1},
            **{"decay": "cosine", "decay_steps": 40, "min_lr": 0.0},
        },
        "max_tokens_per_microbatch": 200,
    },
    "critic": {"parallel": {"pipeline": 2}, "optimizer": {"lr": 5e-3, "warmup_steps": 20}},
    "batch": {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "samples_per_minibatch": 4,
        "epochs_per_step": 2,
        "shuffle_minibatches": True,
    },  # fmt: skip
    "algorithm": {
        "adv_estimator": "gae",
        "lam": 0.95,
        "use_score_scaling": True,
        "use_score_norm": True,
        "score_clip": 2.0,
        "filter_groups": {"enable": True, "max_num_gen_batches": 2, "on_shortage": "fill"},
        "kl": {"use_in_reward": True, "controller": "adaptive", "coef": 0.05, "target": 0.5, "horizon_samples": 50},
        "policy_loss": {"entropy_coef": 0.3, "entropy_coef_end": 0.0, "entropy_coef_steps": 3},
    },
    "rollout": {"engine": "transformers"},
    "ref": {"policy": "refreshed", "refresh_every_steps": 3, "refresh_share": 0.5},
    "ema": {"decay": 0.9, "in_validation": True},
    "replay": {"buffer_prompts": 6, "prompts_per_step": 2},
    "validation": {"every_steps": 2, "prompts": 4},
    "checkpoint": {"every_steps": 2, "export_hf": True},
}
OTHER_LAYOUT = ("actor.parallel.tensor=1", "actor.parallel.pipeline=2", "critic.parallel.pipeline=1")


def results(run_dir: Path) -> dict[int, dict[str, float]]:
    """The rows of metrics.jsonl as they are, by step, without what says how fast the step was and what was moved."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step is there twice"
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows}


def samples(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        file.name: [json.loads(line) for line in file.open()]  # splitlines would cut at a response's U+2028 too
        for file in sorted((run_dir / "rollouts").iterdir())
    }


def train(folder: Path, *arguments: str | Path) -> Train:
    with Train(folder, *arguments) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    return run


def train_and_kill(folder: Path, run_dir: Path, *arguments: str | Path) -> None:
    """SIGKILL to the launcher and every rank, in the step that follows the first one after the checkpoint of step 2.
    On a busy machine quick steps are done before it is sent: then once more, from the beginning."""
    for _ in range(ATTEMPTS):
        _train_and_kill(folder, *arguments)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be half there
        if max(row["step"] for row in rows) <= LAST:
            return
        shutil.rmtree(run_dir)
    raise AssertionError(f"{run_dir} went beyond step {LAST}, {ATTEMPTS} times")


def _train_and_kill(folder: Path, *arguments: str | Path) -> None:
    with Train(folder, *arguments) as run:
        run.wait_for("step 3/50", RUN_S)
        run.wait_for("step_2 is complete", RUN_S)
        for pid, command in run.processes().items():
            if " train " in command:
                os.kill(pid, signal.SIGKILL)
        run.wait(30)
        assert run.left_running() == {}


def difference(a: Path, b: Path) -> dict[str, float]:
    """By part and kind of tensor; see tests/worlds/compare_checkpoints.py."""
    steps = [folder / "checkpoints/step_4" for folder in (a, b)]
    done = zygote.run("tests.worlds.compare_checkpoints", *steps, str(VOCAB))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Runs:
    """One run that is not disturbed, one that is killed after step 3 and started again, and that one's first half.

    before, after: settings of the second one before and after its death, which change nothing that is computed
    """

    def __init__(self, folder: Path, config: Path, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
        self.folder, self.config = folder, config
        self.whole, self.killed, self.moved = (folder / "runs" / name for name in ("whole", "killed", "moved"))
        train(folder, config, "run.name=whole", "run.steps=4")
        train_and_kill(folder, self.killed, config, "run.name=killed", "run.steps=50", *before)
        self.rows_when_killed = results(self.killed)
        shutil.copytree(self.killed, self.moved)
        self.terminal = train(folder, config, "run.name=killed", "run.steps=4", *after).terminal


@pytest.fixture(scope="module")
def ppo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Actor TP2, critic PP2, in two processes; four updates a step (six with re-used samples), each with demonstrations
    too; an adaptive KL coefficient, a reference that moves, an average of the weights. What dies gives
    memory up between its phases, the engine too."""
    folder = tmp_path_factory.mktemp("resume_ppo")
    data = {"validation": str(folder / "validation.jsonl")}
    demonstrations = {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32}
    ptx = {"data": demonstrations, "coef": 0.1, "samples_per_update": 2}
    config = write_config(folder, tiny_models("qwen2", tied=True), data=data, ptx=ptx, **PPO)
    return Runs(folder, config, before=("actor.offload=all", "critic.offload=optimizer", "rollout.release=all"))


def assert_the_same(runs: Runs) -> None:
    assert max(runs.rows_when_killed) >= 3, "nothing had to be made again"
    assert results(runs.killed) == results(runs.whole)
    assert samples(runs.killed) == samples(runs.whole)
    assert set(difference(runs.whole, runs.killed).values()) == {0.0}


def test_ppo_killed_and_started_again_is_the_same_run(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert len({row["kl/coef"] for step, row in rows.items() if step}) == 4, "the KL coefficient did not change"
    assert len({row["critic/lr"] for step, row in rows.items() if step}) == 4, "the schedule did not move"
    coefs = [row["actor/entropy_coef"] for step, row in sorted(rows.items()) if step]
    assert coefs == pytest.approx([0.3, 0.2, 0.1, 0.0])
    assert len({row["score/running_std"] for step, row in rows.items() if step}) == 4, "scores were not scaled"
    assert any(row["sampling/dropped_equal"] for step, row in rows.items() if step), "no group was dropped"
    assert_the_same(ppo)


def test_ppo_learns_from_older_samples_and_demonstrations_too(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert [rows[step]["replay/samples"] for step in range(1, 5)] == [0, 4, 4, 4]
    assert [rows[step]["mismatch/max_abs"] < 1e-4 for step in range(1, 5)] == [True] * 4, "of new samples alone"
    assert all(rows[step]["ptx/loss"] > 0 for step in range(1, 5))
    assert [step for step, row in rows.items() if "validation_ema/mean" in row] == [2, 4]


def test_ppo_the_engine_has_the_average_for_its_validation_alone(ppo: Runs) -> None:
    versions = {
        name: {sample["weight_version"] for sample in found}
        for name, found in samples(ppo.whole).items()
        if name in ("validation_step_2.jsonl", "validation_ema_step_2.jsonl", "step_3.jsonl")
    }
    assert versions == {
        "validation_step_2.jsonl": {"2"},
        "validation_ema_step_2.jsonl": {"2-ema"},
        "step_3.jsonl": {"2"},
    }


def test_ppo_exports_its_average_beside_the_actor(ppo: Runs) -> None:
    models = [AutoModelForCausalLM.from_pretrained(ppo.whole / name).state_dict() for name in ("hf", "hf_ema")]
    assert models[0].keys() == models[1].keys()
    assert not any(torch.equal(a, models[1][name]) for name, a in models[0].items())


def test_the_terminal_says_from_where_and_what_is_dropped(ppo: Runs) -> None:
    path = ppo.killed / "checkpoints/step_2"
    assert f"resuming from {path} (step 2), 2 steps left; dropped what was written after it" in ppo.terminal
    assert "of metrics.jsonl" in ppo.terminal and "of rollouts/" in ppo.terminal
    assert "changed since the checkpoint: run.steps: 50 -> 4" in ppo.terminal


def test_ppo_goes_on_under_another_layout_up_to_round_off(ppo: Runs) -> None:
    run = train(ppo.folder, ppo.config, "run.name=moved", "run.steps=4", *OTHER_LAYOUT)
    assert "changed since the checkpoint: actor.parallel.tensor: 2 -> 1" in run.terminal
    moved, whole = results(ppo.moved), results(ppo.whole)
    assert moved.keys() == whole.keys()
    for step, row in whole.items():
        assert moved[step] == pytest.approx(row, rel=1e-4, abs=1e-5), step
    assert max(difference(ppo.whole, ppo.moved).values()) <= 1e-4  # relative; Adam's steps magnify the sums' round-off


def test_a_changed_configuration_is_refused_before_anything_is_loaded(ppo: Runs) -> None:
    before = {file: file.read_bytes() for file in ppo.killed.glob("*") if file.is_file()}
    changes = ("actor.optimizer.lr=1e-3", "batch.epochs_per_step=1")
    with Train(ppo.folder, ppo.config, "run.name=killed", "run.steps=6", *changes) as run:
        assert run.wait(RUN_S) == 1
    error = run.terminal.split("mrl: error: ")[1]
    assert "step_4 was written with another configuration" in error
    assert "  actor.optimizer.lr: 0.005 -> 0.001\n" in error and "  batch.epochs_per_step: 2 -> 1\n" in error
    assert "'checkpoint.accept_changes=[actor.optimizer.lr, batch.epochs_per_step]'" in error
    assert "Traceback" not in error and "waiting for the engine" not in run.terminal
    assert {file: file.read_bytes() for file in ppo.killed.glob("*") if file.is_file()} == before


SFT = """
trainer: sft
run: {{name: run, root: {folder}/runs, steps: 2, trackers: []}}
model: {{path: {model}, dtype: float32}}
actor: {{optimizer: {{lr: 1.0e-3}}}}
data: {{train: {folder}/train.jsonl, max_prompt_tokens: 32}}
batch: {{samples_per_step: 4}}
checkpoint: {{every_steps: 1, keep_last: 1, weights_every_steps: 2}}
"""


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Processes that are started meanwhile cannot write more than 100 kB into a file, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_gets_full(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Training goes on without checkpoints or stops, as configured; the last good one stays whole."""
    write_config(tmp_path, tiny_models("llama"))
    config, run_dir = tmp_path / "sft.yaml", tmp_path / "runs/run"
    config.write_text(SFT.format(folder=tmp_path, model=tiny_models("llama")))
    train(tmp_path, config)
    AutoModelForCausalLM.from_pretrained(run_dir / "hf_step_2")
    good = run_dir / "checkpoints/step_2"
    sizes = {file: file.stat().st_size for file in good.rglob("*")}

    with small_files(), Train(tmp_path, config, "run.steps=5", "checkpoint.on_error=warn", copied=False) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    assert run.terminal.count("not saved, training continues (checkpoint.on_error: warn)") >= 4, run.terminal
    assert "File too large" in run.terminal and "step_5.tmp" in run.terminal
    rows = results(run_dir)
    assert list(rows) == [1, 2, 3, 4, 5] and rows[5]["checkpoint/failed"] >= 1

    with small_files(), Train(tmp_path, config, "run.steps=5", copied=False) as run:
        assert run.wait(RUN_S) == 1, run.terminal
    assert f"resuming from {good} (step 2)" in run.terminal
    assert "step_3.tmp" in run.terminal.split("mrl: error: ")[1], run.terminal
    assert [path.name for path in good.parent.iterdir()] == ["step_2"]
    assert {file: file.stat().st_size for file in good.rglob("*")} == sizes


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
def test_grpo_killed_and_started_again_is_the_same_run(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """Two data-parallel ranks and a real SGLang server, which stays and is given the resumed weights. What goes on
    gives its memory up between its phases."""
    model, url = tiny_models("llama"), sglang_engine.urls[0]
    config = write_config(
        tmp_path,
        model,
        run={"nproc": 2, "seed": 3},
        batch={"samples_per_minibatch": 4},
        algorithm={"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.01}},
        rollout=given(sglang_engine, tmp_path),
        sync={"transport": "http", "verify": "checksum"},
        checkpoint={"every_steps": 2},
    )
    try:
        runs = Runs(tmp_path, config, after=("actor.offload=all", "ref.offload=all"))
    finally:
        sglang_engine.client(url).update_weights_from_disk(str(model), weight_version="default")
    assert_the_same(runs)


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
    del stored["config"]["checkpoint"]["on_error"]  # a key of a later version
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
    """With what they import of their folder, and nothing else of it."""

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
    """Of equal shapes, under the same path."""
    file, frozen = write_config(tmp_path, tmp_path / "actor"), str(tmp_path / "frozen")
    for name in ("actor", "frozen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1000))
    text, kl = yaml.safe_load(file.read_text()), {"kl": {"use_in_loss": True, "coef": 0.1}}
    more: dict[str, Any] = {
        "model.path": {"algorithm": text["algorithm"] | kl},  # the actor's first weights are the reference
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
    """To read 140 GiB of zeros would take minutes. In the other file one of fifty layers was trained."""

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
