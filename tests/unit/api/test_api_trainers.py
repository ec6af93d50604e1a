"""Trainers as classes: forms of a configuration, data sets and rewards as Python objects, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

import mrl
from mrl import GRPOTrainer, PPOTrainer, RLTrainer, SFTTrainer, TrainerCallback, TrainerState
from mrl.api import Session
from mrl.config.loader import ConfigError
from mrl.config.schema import RLConfig
from mrl.observe.lock import Owner
from mrl.trainers.shared.callbacks import CallbackError, Callbacks
from mrl.user_functions import find
from tests.conftest import TinyModels
from tests.helpers.sft_config import write


def test_every_public_name_is_there() -> None:
    assert all(hasattr(mrl, name) for name in mrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        getattr(mrl, "Trainer")  # noqa: B009


@pytest.fixture
def sft(tmp_path: Path, tiny_models: TinyModels) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(write(tmp_path, tiny_models("llama")).read_text())
    return config


@pytest.fixture
def rl(sft: dict[str, Any]) -> dict[str, Any]:
    common = {key: sft[key] for key in ("run", "model")}
    return common | {
        "actor": {"optimizer": {"lr": 1e-3}},
        "data": {"train": sft["data"]["train"], "max_prompt_tokens": 16},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"sampling": {"max_new_tokens": 8}},
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"function": "exact_match"},
    }


def test_a_configuration_may_be_a_file_a_dict_or_an_object(sft: dict[str, Any], tmp_path: Path) -> None:
    of_file = SFTTrainer(tmp_path / "config.yaml").cfg
    without = {key: value for key, value in sft.items() if key != "trainer"}
    assert (
        of_file == SFTTrainer(without).cfg == SFTTrainer(of_file).cfg == SFTTrainer(str(tmp_path / "config.yaml")).cfg
    )
    assert SFTTrainer(sft | {"model": sft["model"] | {"path": Path(sft["model"]["path"])}}).cfg == of_file


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("batch", {"samples_per_stepp": 4}, "config: batch.samples_per_stepp: unknown key; did you mean"),
        ("model", {"path": 3}, "config: model.path: must be a string, got 3"),
        ("run", {"steps": 0}, "config: run.steps: "),
    ],
)
def test_what_is_wrong_in_a_dict_is_said_as_of_a_file(
    sft: dict[str, Any], section: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        SFTTrainer(sft | {section: sft[section] | change})
    assert said in str(error.value)


def test_a_step_of_several_adapters_is_one_call(rl: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no `generate` of its own."""
    actor = rl["actor"] | {"lora": {"rank": 4, "alpha": 8}}
    trainer = GRPOTrainer(rl | {"actor": actor, "sync": {"lora": "adapter"}, "adapters": {"a": {}, "b": {}}})
    monkeypatch.setattr(trainer, "_loop", SimpleNamespace(train_step=lambda: {"a/reward/mean": 1.0}))
    assert trainer.train_step() == {"a/reward/mean": 1.0}


def test_a_class_refuses_the_configuration_of_another(sft: dict[str, Any], rl: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="algorithm.adv_estimator: PPOTrainer needs gae, got grpo"):
        PPOTrainer(rl)
    with pytest.raises(ConfigError, match="trainer: GRPOTrainer needs rl, got sft"):
        GRPOTrainer(sft)
    assert GRPOTrainer(rl).cfg == RLTrainer(rl).cfg


def test_a_session_refuses_teachers_of_data_sources(rl: dict[str, Any]) -> None:
    teachers = {"teachers": {"a": {"path": rl["model"]["path"]}}}
    with pytest.raises(ConfigError, match="teacher.teachers: a session's samples have no data source"):
        Session(rl | {"trainer": "rl", "teacher": teachers})
    Session(rl | {"trainer": "rl", "teacher": teachers["teachers"]["a"]})


def test_a_session_trains_one_policy(rl: dict[str, Any]) -> None:
    actor = rl["actor"] | {"lora": {"rank": 2, "targets": ["q_proj"]}}
    with pytest.raises(ConfigError, match="adapters: a session trains one policy: remove the section"):
        Session(rl | {"trainer": "rl", "actor": actor, "sync": {"lora": "adapter"}, "adapters": {"a": {}}})


@pytest.mark.parametrize(
    ("section", "keys", "named"),
    [
        ("agent", {"rollout": "agent.py:play", "max_tokens": 512}, "agent"),
        ("ema", {"in_validation": True}, "ema"),
        ("replay", {"buffer_prompts": 8, "prompts_per_step": 4}, "replay"),
        ("rollout", {"max_staleness": 1}, "rollout.max_staleness"),
        ("rollout", {"early_passes": 2}, "rollout.early_passes"),
    ],
)
def test_a_session_refuses_what_its_own_loop_would_not_do(
    rl: dict[str, Any], tmp_path: Path, section: str, keys: dict[str, Any], named: str
) -> None:
    (tmp_path / "agent.py").write_text("async def play(ctx, prompt):\n    return 1.0\n")
    keys = {key: str(tmp_path / value) if key == "rollout" else value for key, value in keys.items()}
    algorithm = rl["algorithm"] | {"rollout_correction": {"rollout_is": "token"}}
    config = rl | {"trainer": "rl", "algorithm": algorithm, section: rl.get(section, {}) | keys}
    config["data"] = config["data"] | {"validation": config["data"]["train"]}
    RLTrainer(config)
    with pytest.raises(ConfigError, match=f"{named}: has no effect in a session"):
        Session(config)


def test_further_keys_of_a_session_leave_its_arguments(rl: dict[str, Any], tmp_path: Path) -> None:
    sections = {"rollout": {"sampling": {"temperature": 0.5}}, "actor": {"optimizer": {"beta2": 0.9}}}
    how: dict[str, Any] = {"engine": "transformers", "dtype": "float32", "root": tmp_path, "sections": sections}
    cfg = Session.from_model(rl["model"]["path"], lr=3e-4, max_new_tokens=7, **how)._trainer.cfg
    assert isinstance(cfg, RLConfig)
    assert (cfg.rollout.sampling.max_new_tokens, cfg.rollout.sampling.temperature) == (7, 0.5)
    assert (cfg.actor.optimizer.lr, cfg.actor.optimizer.beta2) == (3e-4, 0.9)


def some_rows() -> Iterator[dict[str, Any]]:
    for n in range(6):
        yield {"prompt": f"{n} =", "answer": str(n), "weight": np.float64(n)}


@pytest.mark.parametrize("kind", [list, iter, lambda rows: datasets.Dataset.from_list(rows)])
def test_rows_become_a_file_of_the_run(sft: dict[str, Any], kind: Any) -> None:
    trainer = SFTTrainer(sft, train_dataset=kind([*some_rows()]), val_dataset=sft["data"]["validation"])
    file = trainer.run_dir / "inputs/train.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [*some_rows()]
    assert trainer.cfg.sources()["data.train"][0].path == str(file)
    assert trainer.run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "answer": "b"}, "c"], "data.train: row 1 must be a dict, got str"),
        ([{"prompt": object()}], "data.train: row 0 cannot be written as JSON: a object is neither"),
        ([{"prompt": float("nan")}], "data.train: row 0 cannot be written as JSON"),
        ([{"question": "a"}] * 9, "has no 'prompt'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(sft: dict[str, Any], rows: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SFTTrainer(sft, train_dataset=rows)


def test_nothing_is_written_into_a_run_that_goes_on(sft: dict[str, Any]) -> None:
    run_dir = Path(sft["run"]["root"], sft["run"]["name"])
    run_dir.mkdir(parents=True)
    Owner.of(os.getpid()).write(run_dir / "lock")
    with pytest.raises(ConfigError, match="in use by another run"):
        SFTTrainer(sft, train_dataset=some_rows())
    assert not (run_dir / "inputs").exists()


def test_a_reward_may_be_any_function(rl: dict[str, Any]) -> None:
    offset = 2.0
    trainer = GRPOTrainer(rl, reward_fn=lambda prompt, response, row: len(response) + offset)
    spec = trainer.cfg.rewards().function  # type: ignore[union-attr]
    assert spec == f"{trainer.run_dir / 'inputs/reward_fn.py'}:reward_fn"
    assert find(spec, "reward.function")("", "abc", {}) == 5.0
    spec = GRPOTrainer(rl, reward_fn="exact_match").cfg.rewards().function  # type: ignore[union-attr]
    assert spec == "exact_match"


def test_several_rewards_and_callbacks_of_another_form_are_named(rl: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.function: reward_fn must be one function, .* got list; reward.recipe"
    ):
        GRPOTrainer(rl, reward_fn=[len, len])  # type: ignore[arg-type]
    for callbacks in (TrainerCallback(), [TrainerCallback]):
        with pytest.raises(TypeError, match="callbacks must be a list of objects of TrainerCallback classes, got "):
            GRPOTrainer(rl, callbacks=callbacks)  # type: ignore[arg-type]


def test_a_function_of_a_module_of_its_own_stays_in_its_file(
    rl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def score(prompt, response, row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_rewards

    spec = GRPOTrainer(rl, reward_fn=own_rewards.score).cfg.rewards().function  # type: ignore[union-attr]
    assert spec == f"{tmp_path / 'own_rewards.py'}:score"


def test_steps_in_one_process_need_a_layout_of_one(sft: dict[str, Any]) -> None:
    sft["actor"]["parallel"] = {"tensor": 2}
    with pytest.raises(mrl.TrainingFailed, match="needs 2 ranks.* call fit.* torchrun --nproc-per-node 2"):
        SFTTrainer(sft).train_step()


class Broken(TrainerCallback):
    def on_step_end(self, state: TrainerState, metrics: Any) -> None:
        raise KeyError("reward")


def test_an_exception_in_a_callback_names_it() -> None:
    callbacks = Callbacks([TrainerCallback(), Broken()])
    callbacks("on_train_begin")
    with pytest.raises(CallbackError, match=r"^Broken.on_step_end failed at step 7: KeyError: 'reward'$"):
        callbacks("on_step_end", {}, step=7)


class Seen(TrainerCallback):
    """A callback that records its calls and stops the run after step `last`."""

    def __init__(self, last: int) -> None:
        self.calls: list[Any] = []
        self.last = last

    def on_train_begin(self, state: TrainerState) -> None:
        self.calls.append(("begin", state.step, state.total_steps))

    def on_step_end(self, state: TrainerState, metrics: Any) -> None:
        self.calls.append(("step", state.step, metrics["actor/loss"]))
        state.should_stop = state.step == self.last

    def on_evaluate(self, state: TrainerState, metrics: Any) -> None:
        self.calls.append(("evaluate", state.step, metrics["validation/loss"]))

    def on_save(self, state: TrainerState, path: Path) -> None:
        self.calls.append(("save", state.step, path.name))

    def on_train_end(self, state: TrainerState) -> None:
        self.calls.append(("end", state.step, state.run_dir.name))


def test_steps_in_this_process_are_those_of_fit(sft: dict[str, Any]) -> None:
    sft |= {"validation": {"every_steps": 2}, "checkpoint": {"every_steps": 2, "asynchronous": False}}
    whole, steps = Seen(last=3), Seen(last=3)
    with SFTTrainer(sft, callbacks=[whole]) as trainer:
        result = trainer.init_workers().fit()
    assert (result.steps, result.metrics["step"]) == (3, 3)
    named = ("begin", "save", "end")
    kinds = [(kind, step, what) if kind in named else (kind, step) for kind, step, what in whole.calls]
    assert kinds == [
        ("begin", 0, 50),
        ("evaluate", 0),
        ("step", 1),
        ("evaluate", 2),
        ("step", 2),
        ("save", 2, "step_2"),
        ("step", 3),
        ("save", 3, "step_3"),
        ("end", 3, "run"),
    ]

    sft["run"] |= {"name": "steps"}
    with SFTTrainer(sft, callbacks=[steps]) as trainer:
        assert trainer.train_step_num == 0
        losses = [trainer.train_step()["actor/loss"] for _ in range(2)]
        assert trainer.validate()["validation/loss"] == steps.calls[-1][2]
        assert trainer.save_checkpoint(save_as_hf=True) == trainer.run_dir / "checkpoints/step_2"
        assert (trainer.run_dir / "hf_step_2/config.json").exists() and trainer.train_step_num == 2
    with SFTTrainer(sft, callbacks=[steps]) as trainer:
        assert trainer.train_step_num == 2, "resumed"
        losses.append(trainer.train_step()["actor/loss"])
    assert losses == [value for kind, _, value in whole.calls if kind == "step"]
