"""Configurations of on-policy distillation: refusals, and the layouts of the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.resume import may_change
from mrl.config.schema import DataConfig, RLConfig
from mrl.config.trainers.base import DataUse
from mrl.data.rows import train_check
from mrl.trainers.rl.memory_order import ORDER, order_with
from tests.helpers.bad_configs import DENSE, PPO

TOKENS = {f"t{n}": n for n in range(16)}
WITHOUT_WARMUP = PPO.replace("  warmup_steps: 2", "  warmup_steps: 0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    models = {
        "dense": (DENSE, TOKENS),
        "wide": ({**DENSE, "hidden_size": 128, "vocab_size": 32}, TOKENS),
        "foreign": (DENSE, {**TOKENS, "t3": 4, "t4": 3}),
        "more": (DENSE, {**TOKENS, "t15": 15} | {"<tool>": 14, "t14": 14}),
        "bare": (DENSE, None),
    }
    for name, (config, tokens) in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
        if tokens is not None:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "21=", "answer": "12."}\n')
    return tmp_path


def loaded(*overrides: str, base: str = WITHOUT_WARMUP) -> RLConfig:
    Path("c.yaml").write_text(base)
    cfg = load("c.yaml", overrides, gpus=0)
    assert isinstance(cfg, RLConfig)
    return cfg


def teacher(keys: str) -> str:
    return f"teacher={{{keys}}}"


BAD = {
    "no teacher": (teacher("coef: 0.5"), (), "teacher.path", "required"),
    "two kinds of teachers": (
        teacher("path: wide, teachers: {a: {path: wide}}"), (), "teacher.teachers", "choose one"),
    "another tokenizer": (
        teacher("path: foreign"), (), "teacher.path", "token 3 is ['t4'], and the actor's is ['t3']"),
    "another tokenizer of a source": (
        teacher("teachers: {a: {path: wide}, b: {path: more}}"), (), "teacher.teachers.b.path",
        "token 14 is ['<tool>', 't14'], and"),
    "no tokenizer": (teacher("path: bare"), (), "teacher.path", "bare has no tokenizer.json"),
    "beta of another divergence": (
        teacher("path: wide, beta: 0.3"), (), "teacher.beta", "no effect: the divergence is reverse_kl"),
    "skew of another divergence": (
        teacher("path: wide, divergence: jsd, skew: 0.3"), (), "teacher.skew", "no effect: the divergence is jsd"),
    "a layout of several": (
        teacher("teachers: {a: {path: wide}}, offload: all"), (), "teacher.offload", "of the teachers has its own"),
    "another tensor size": (
        teacher("path: wide, parallel: {tensor: 1, pipeline: 2}"), (), "teacher.parallel.tensor",
        "1 differs from the actor's 2"),
    "another pipeline of a source": (
        teacher("teachers: {a: {path: wide, parallel: {tensor: 2, pipeline: 1}}}"), (),
        "teacher.teachers.a.parallel.pipeline", "1 differs from the actor's 2"),
    "a temperature of which no engine reports log-probs": (
        teacher("path: wide, url: 'http://t:1'"), ("rollout.sampling.temperature=0.7",),
        "rollout.sampling.temperature", "at temperature 1 only"),
    "another tokenizer behind an engine": (
        teacher("path: foreign, url: 'http://t:1'"), (), "teacher.path", "token 3 is ['t4'], and the actor's is"),
    "a layout of an engine": (
        teacher("teachers: {a: {path: wide, url: 'http://t:1', offload: all}}"), (), "teacher.teachers.a.offload",
        "the engine at http://t:1 computes this teacher"),
    "an engine of several": (
        teacher("teachers: {a: {path: wide}}, url: 'http://t:1'"), (), "teacher.url", "teachers has its own"),
    "a key without an engine": (
        teacher("path: wide, api_key_file: key"), (), "teacher.api_key_file", "the trainer computes this teacher"),
    "a key file that is not there": (
        teacher("path: wide, url: 'http://t:1', api_key_file: key"), (), "teacher.api_key_file", "cannot read key"),
    "a password in the address": (
        teacher("path: wide, url: 'http://me:secret@t:1'"), (), "teacher.url", "contains a password"),
    "top tokens of a teacher that the trainer computes": (
        teacher("path: wide, top_k: 8"), (), "teacher.top_k", "the trainer computes every teacher"),
    "top tokens of sampled": (
        teacher("path: wide, url: 'http://t:1', divergence: sampled, top_k: 8"), (), "teacher.top_k",
        "the divergence is sampled"),
    "critic-only steps": (teacher("path: wide"), ("critic.warmup_steps=2",), "critic.warmup_steps", "in every step"),
    "early passes": (teacher("path: wide"), ("rollout.early_passes=2",), "rollout.early_passes", "all samples"),
    "replay": (
        teacher("path: wide"), ("replay={buffer_prompts: 16, prompts_per_step: 16}",), "replay", "present policy"),
    "a critic of no policy loss": (
        teacher("path: wide, policy_coef: 0"), (), "critic", "the policy loss counts 0 times"),
    "a KL in a reward that nothing learns from": (
        teacher("path: wide, policy_coef: 0"), ("critic=null", "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.kl={use_in_reward: true, coef: 0.1}"), "algorithm.kl.use_in_reward", "policy loss counts 0 times"),
    "fp8": (
        teacher("path: wide"), ("actor.precision.fp8.recipe=current", "model.dtype=bfloat16"),
        "actor.precision.fp8.recipe", "not supported together"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_teacher_is_refused_with_its_key(name: str) -> None:
    section, others, key, says = BAD[name]
    with pytest.raises(ConfigError) as caught:
        loaded(section, *others)
    found = [problem for problem in caught.value.problems if problem.keys[0] == key]
    assert found, str(caught.value)
    assert says in str(caught.value)


def test_a_teacher_of_another_size_with_unused_ids_is_built_like_the_actor() -> None:
    cfg = loaded(teacher("path: wide, offload: all"))
    made = cfg.built()["teacher"]
    assert made.path == "wide" and not made.is_trained and not made.scores
    assert made.train.parallel == cfg.actor.parallel and made.train.offload == "all"
    assert "teacher" in cfg.step_size().passes
    assert ("teacher.path", "wide") in list(cfg.reread_files())


def test_a_teacher_behind_an_engine_is_not_built_and_needs_no_weights(folder: Path) -> None:
    (folder / "wide" / "model.safetensors").unlink()
    cfg = loaded(teacher("teachers: {a: {path: dense}, b: {path: wide, url: 'http://t:1'}}"))
    assert {"teacher.teachers.a"} == {name for name in cfg.built() if name.startswith("teacher")}
    assert "teacher.teachers.b" not in cfg.step_size().passes and cfg.models()["teacher.teachers.b"].parallel is None
    assert cfg.teacher_urls() == {"teacher.teachers.b.url": "http://t:1"}
    assert all(map(may_change, ("teacher.url", "teacher.timeout_s"))) and not may_change("teacher.top_k")


def test_a_teacher_of_each_data_source() -> None:
    cfg = loaded(teacher("divergence: sampled, teachers: {a: {path: wide}, b: {path: dense, parallel: {tensor: 1}}}"))
    assert set(cfg.teachers()) == {"teacher.teachers.a", "teacher.teachers.b"}
    assert cfg.models()["teacher.teachers.b"].parallel != cfg.actor.parallel, "log-probs alone may come from anywhere"
    assert set(cfg.data_uses()["data"].sources) == {"a", "b"}


def test_rows_without_a_teacher_are_refused() -> None:
    use = DataUse(DataConfig.model_validate({"train": "x"}), 1, is_sampled=True, sources=("a", "7"))
    check = train_check(use, lambda row: row.get("wrong"))
    assert check is not None
    assert check({"data_source": "a"}) is None and check({"data_source": 7}) is None
    assert check({"data_source": "a", "wrong": "reward"}) == "reward"
    for row in ({}, {"data_source": "c"}):
        assert "has no teacher in teacher.teachers" in str(check(row))


def test_a_resumed_run_may_move_its_teacher_but_not_change_the_loss() -> None:
    assert may_change("teacher.parallel.tensor") and may_change("teacher.offload")
    assert not any(map(may_change, ("teacher.path", "teacher.coef", "teacher.divergence", "teacher.teachers")))


def test_only_one_teacher_at_a_time_is_on_the_device() -> None:
    order = order_with(["teacher.teachers.a", "teacher.teachers.b"])
    for phase, needs in order.items():
        there = {name for name, level in needs.models.items() if level != "nothing"}
        if phase.startswith("teacher"):
            assert there == {phase}
        else:
            assert there == {name for name, level in ORDER[phase].models.items() if level != "nothing"}
            assert needs.models["teacher.teachers.a"] == "nothing" and needs.engine == ORDER[phase].engine
