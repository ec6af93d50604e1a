"""Configurations: what is read, what is refused, and the error messages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config.builtin_rewards import BUILTIN_REWARDS
from mrl.config.derived import Machine, smallest_world
from mrl.config.loader import dump_resolved, load
from mrl.config.problems import ConfigError
from mrl.config.schema import (
    CodeConfig,
    Config,
    ParallelConfig,
    PreferenceDataConfig,
    RLConfig,
    SFTConfig,
    SFTDataConfig,
    SourceConfig,
    ValidationConfig,
)
from mrl.config.trainers.rl import updates_per_step
from tests.helpers.bad_configs import BAD, DENSE, EXPERT_MODEL, GAE, KL_ON, PPO, SFT, Bad
from tests.helpers.bad_data_configs import BAD_DATA
from tests.helpers.bad_placement_configs import BAD_PLACEMENT
from tests.helpers.bad_reuse_configs import BAD_REUSE
from tests.helpers.bad_reward_configs import BAD_REWARDS
from tests.helpers.bad_rollout_configs import BAD_ROLLOUT
from tests.helpers.bad_sampling_configs import BAD_SAMPLING

EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


EVERY_BAD = [*BAD, *BAD_DATA, *BAD_REWARDS, *BAD_REUSE, *BAD_SAMPLING, *BAD_PLACEMENT, *BAD_ROLLOUT]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    other_vocabulary = {**DENSE, "vocab_size": 17}
    models = {"dense": DENSE, "experts": EXPERTS, "other": other_vocabulary, "gpt": {"architectures": ["GPT2LMHead"]}}
    models["judge"] = {**DENSE, "architectures": ["Qwen2ForSequenceClassification"]}
    for name, config in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    for name in ("train.jsonl", "more.jsonl"):
        (tmp_path / name).write_text('{"prompt": "21=", "answer": "12."}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "21="}], "answer": "12."}\n')
    (tmp_path / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "21="}]}\n')
    for name in ("plain.txt", "plain.jsonl"):
        (tmp_path / name).write_text("21=12.\n")
    score = "def score(prompt, response, row):\n    return 1.0\n\n\njudge = model = overlong = score\n\n\n"
    program = "async def play(ctx, prompt):\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(f"{score}{program}\n\nclass Env:\n    pass\n")
    return tmp_path


def loaded(text: str, *overrides: str, machine: Machine | None = None, gpus: int | None = 0) -> Config:
    Path("c.yaml").write_text(text)
    return load("c.yaml", overrides, joined=machine, gpus=gpus)


def refusal(text: str, *overrides: str, machine: Machine | None = None, gpus: int | None = 0) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(text, *overrides, machine=machine, gpus=gpus)
    return caught.value


@pytest.mark.parametrize("bad", EVERY_BAD, ids=lambda bad: bad.id)
def test_a_bad_configuration_is_refused_with_place_key_and_reason(bad: Bad) -> None:
    """The error names every key that disagrees, and no problem that follows from another one."""
    text = bad.base.replace(bad.old, bad.new)
    before = text[: text.index(bad.at)] if bad.at else text[: text.index(bad.new) + len(bad.new.rstrip("\n"))]
    line = before.count("\n") + 1
    error = refusal(text)
    found = [p for p in error.problems if p.keys[0] == bad.key]
    assert found, str(error)
    assert found[0].places[0] == f"c.yaml:{line}", str(error)
    for part in (*bad.says, *(found[0].keys if len(found[0].keys) > 1 else ())):
        assert part in str(found[0])
    assert str(found[0]) in str(error)
    assert len(error.problems) == 1 or bad.id == "unknown key", str(error)


@pytest.mark.parametrize(
    ("example", "page", "overrides"),
    [("README.md", "README.md", ()), ("docs/common_keys.md", "docs/commands.md", ("batch.samples_per_minibatch=5",))],
)
def test_the_errors_that_a_page_shows_are_those_of_its_example(
    example: str, page: str, overrides: tuple[str, ...]
) -> None:
    root = Path(__file__).parents[3]
    text = re.findall(r"```yaml\n(.*?)```", (root / example).read_text(), re.DOTALL)[0]
    for right, wrong in (("/models/my-qwen2.5", "long"), ("warmup_steps", "warm_up"), ("tensor: 2", "tensor: 4")):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    shutil.copytree("dense", "long")
    Path("long/config.json").write_text(json.dumps({**DENSE, "max_position_embeddings": 4096}))
    shutil.copy("train.jsonl", "held_out.jsonl")
    shutil.copy("mine.py", "rewards.py")
    Path("my.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("my.yaml", overrides, gpus=0)
    [shown] = re.findall(r"```\n(\d problems in my.yaml:\n.*?)\n```", (root / page).read_text(), re.DOTALL)
    assert str(caught.value) == shown


def test_the_translated_configurations_of_the_migration_page_are_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
    texts = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "trainer: rl" in text]
    shutil.copytree("dense", "long")
    Path("long/config.json").write_text(json.dumps({**DENSE, "max_position_embeddings": 4096}))
    row = {"prompt": [{"role": "user", "content": "21="}], "answer": "12.", "reward_model": {"ground_truth": "12."}}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    Path("rewards.py").write_text("def correct(prompt, response, row):\n    return 1.0\n")
    shutil.copy("mine.py", "my_rewards.py")
    for text in texts:
        own = ("model.path=long", "data.train=rows.jsonl", *["data.validation=rows.jsonl"] * ("validation" in text))
        cfg = loaded(text, *own, gpus=8)
        assert (cfg.run.nproc, cfg.actor.parallel.tensor) == (8, 2)  # type: ignore[attr-defined]
    assert len(texts) == 2


def test_the_models_with_experts_have_rules_of_their_own() -> None:
    text = PPO.replace("path: dense", "path: experts").replace("critic:\n  warmup_steps: 2", "critic: {}")
    assert isinstance(loaded(text, "actor.parallel.expert=2", "critic.parallel={expert: 4}"), RLConfig)
    assert "3 does not divide the model's 4 experts: use 1, 2 or 4" in str(
        refusal(text, "actor.parallel.expert=3", "run.nproc=12")
    )
    assert "= 16 ranks do not divide the world" in str(
        refusal(text, "actor.parallel.expert=4", "actor.parallel.expert_tensor=2")
    )
    assert "with expert 1, 1 must equal tensor (2)" in str(refusal(text, "actor.parallel.expert_tensor=1"))
    assert "sequence" in str(refusal(text, "actor.parallel.sequence=false"))
    assert "does not divide the experts' feed-forward width 6: use 1, 2, 3 or 6" in str(
        refusal(text, "actor.parallel.expert_tensor=4", "actor.parallel.expert=2", "run.nproc=16")
    )


def test_every_mistake_is_reported_at_once() -> None:
    text = (
        PPO.replace("steps: 20", "steps: twenty")
        .replace("lr: 1e-6", "lr: 1e-6\n    warm_up: 3")
        .replace("samples_per_minibatch: 8", "samples_per_minibatch: 5")
        .replace("function: exact_match", "function: nope")
        .replace("tensor: 2", "tensor: 4")
    )
    error = refusal(text, "algorithm.policy_loss.clip_ratio_c=0.5", "run", "data.train=gone.jsonl")
    assert [problem.keys[0] for problem in error.problems] == [
        "",
        "run.steps",
        "actor.optimizer.warm_up",
        "data.train",
        "reward.function",
        "actor.parallel.tensor",
        "batch.samples_per_minibatch",
        "algorithm.policy_loss.clip_ratio_c",
    ]
    assert str(error).startswith("8 problems in c.yaml:")


def test_a_mistake_does_not_echo_in_the_cross_checks() -> None:
    """A mistake causes no further errors. A misspelt samples_per_prompt leaves the default 1, which grpo refuses;
    reporting that would mislead."""
    text = PPO.replace("gae", "grpo").replace("critic:\n  warmup_steps: 2\n", "")
    error = refusal(text.replace("  samples_per_minibatch: 8", "  samples_per_promt: 4"))
    assert [problem.keys[0] for problem in error.problems] == ["batch.samples_per_promt"]


def test_numbers_and_lists_are_read_as_they_are_meant() -> None:
    cfg = loaded(
        PPO.replace("    max_new_tokens: 8", "    max_new_tokens: 8\n    temperature: 1\n    stop: ['yes', \"\\n\"]"),
        "actor.optimizer.lr=5E-4",
        "actor.max_tokens_per_microbatch=16_384",
        "actor.optimizer.eps=1.e-8",
        "run.name=2024-01-01",
    )
    assert isinstance(cfg, RLConfig)
    assert cfg.actor.optimizer.lr == 5e-4
    assert cfg.actor.optimizer.eps == 1e-8
    assert cfg.actor.max_tokens_per_microbatch == 16384
    assert cfg.rollout.sampling.temperature == 1.0
    assert cfg.rollout.sampling.stop == ("yes", "\n")
    assert cfg.run.name == "2024-01-01"


def test_inheritance_merges_sections_and_replaces_lists() -> None:
    Path("sub").mkdir()
    Path("sub/base.yaml").write_text(PPO.replace("    max_new_tokens: 8", "    max_new_tokens: 8\n    stop: [a, b]"))
    Path("middle.yaml").write_text(
        "base: sub/base.yaml\nrun: {steps: 7}\ncritic: null\nalgorithm: {adv_estimator: grpo}"
    )
    cfg = loaded("base: middle.yaml\nbatch: {samples_per_prompt: 2}\nrollout: {sampling: {stop: [c]}}\n")
    assert isinstance(cfg, RLConfig)
    assert (cfg.run.name, cfg.run.steps, cfg.critic) == ("test", 7, None)
    assert cfg.batch.prompts_per_step == 16 and cfg.batch.samples_per_prompt == 2
    assert cfg.rollout.sampling.stop == ("c",) and cfg.rollout.sampling.max_new_tokens == 8


def test_null_drops_what_a_base_file_says_of_a_section() -> None:
    Path("base.yaml").write_text(PPO + "validation: {every_steps: 3}\n")
    without = "base: base.yaml\ndata: {validation: null}\n"
    assert "validation: null drops an inherited section" in str(refusal(without))
    cfg = loaded(without + "validation: null\n")
    assert isinstance(cfg, RLConfig) and cfg.validation == ValidationConfig()


def test_null_drops_a_base_file_s_key_of_another_algorithm() -> None:
    grpo = PPO.replace("critic:\n  warmup_steps: 2\n", "").replace(
        GAE, "  adv_estimator: grpo\n  norm_adv_by_std_in_grpo: false\n"
    )
    Path("base.yaml").write_text(grpo)
    rloo = "base: base.yaml\nbatch: {samples_per_prompt: 2}\nalgorithm: {adv_estimator: rloo%s}\n"
    assert "norm_adv_by_std_in_grpo: has no effect: the estimator is rloo" in (text := str(refusal(rloo % "")))
    assert "override it with null" in text
    cfg = loaded(rloo % ", norm_adv_by_std_in_grpo: null")
    assert isinstance(cfg, RLConfig) and cfg.algorithm.adv_estimator == "rloo"
    cfg = loaded(rloo % "", "algorithm.norm_adv_by_std_in_grpo=null")
    assert isinstance(cfg, RLConfig) and cfg.algorithm.adv_estimator == "rloo"
    sapo = GAE + "  policy_loss: {loss_mode: sapo, tau_neg: 2.0}\n"
    Path("base.yaml").write_text(PPO.replace(GAE, sapo))
    vanilla = "base: base.yaml\nalgorithm: {policy_loss: {loss_mode: vanilla%s}}\n"
    assert "policy_loss.tau_neg: has no effect: the loss is vanilla" in str(refusal(vanilla % ""))
    assert loaded(vanilla % ", tau_neg: null")


@pytest.mark.parametrize(("given", "prompt"), [({}, 1024), ({"max_tokens": 128}, 64), ({"max_tokens": 4096}, 1024)])
def test_the_room_for_prompts_follows_the_room_of_a_row(given: dict[str, int], prompt: int) -> None:
    source = SourceConfig(path="a.jsonl")
    for kind in (PreferenceDataConfig, SFTDataConfig):
        assert kind(train=(source,), **given).max_prompt_tokens == prompt
    assert PreferenceDataConfig(train=(source,), max_prompt_tokens=100, **given).max_prompt_tokens == 100


def test_home_is_where_a_shell_has_it(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(files))
    (files / "base.yaml").write_text(PPO)
    paths = "run: {root: ~/runs}\nmodel: {path: ~/dense}\ndata: {train: [~/train.jsonl, {path: ~/more.jsonl}]}\n"
    more = "critic: {path: ~/dense}\nrollout: {urls: ['http://one:1'], api_key_file: ~/key}\n"
    (files / "key").touch(0o600)
    (files / "key").write_text("word")
    cfg = loaded(f"base: ~/base.yaml\n{paths}{more}reward: {{function: ~/mine.py:score}}\n")
    assert isinstance(cfg, RLConfig) and cfg.critic is not None
    found = [cfg.run.root, cfg.model.path, cfg.critic.path, cfg.rollout.api_key_file, cfg.reward.function]
    found += [source.path for source in cfg.data.train]
    names = ("runs", "dense", "dense", "key", "mine.py:score", "train.jsonl", "more.jsonl")
    assert found == [str(files / name) for name in names]


def test_a_mistake_in_a_base_file_is_reported_there() -> None:
    Path("base.yaml").write_text(PPO.replace("lr: 1e-6", "lr: -1"))
    error = refusal("base: base.yaml\nrun:\n  stepps: 3\n")
    assert {(p.keys[0], p.places[0]) for p in error.problems} == {
        ("actor.optimizer.lr", "base.yaml:13"),
        ("run.stepps", "c.yaml:3"),
    }


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("base: c.yaml\n", "c.yaml:1", "bases form a circle"),
        ("run: {}\nbase: loop.yaml\n", "loop.yaml:1", "bases form a circle"),
        ("\nbase: gone.yaml\n", "c.yaml:2", "cannot read gone.yaml: No such file"),
        ("base: [a]\n", "c.yaml:1", "must be a file name, got a list"),
        ("base: list.yaml\n", "list.yaml:1", "expected a mapping of keys, got a list"),
        ("", "c.yaml", "expected a mapping of keys, got null"),
    ],
)
def test_a_base_that_cannot_be_used(text: str, place: str, says: str) -> None:
    Path("loop.yaml").write_text("base: c.yaml\n")
    Path("list.yaml").write_text("- a\n")
    (problem,) = refusal(text).problems
    assert problem.places[0] == place and says in str(problem)


def test_a_missing_file_is_one_clear_problem() -> None:
    with pytest.raises(ConfigError, match="cannot read gone.yaml: No such file"):
        load("gone.yaml")


def test_overrides_are_typed_and_reported_as_overrides() -> None:
    cfg = loaded(PPO, "run.name=x=y", "critic.warmup_steps=0", "rollout.sampling.stop=[a, b]", "ref={}", "run.steps=3")
    assert isinstance(cfg, RLConfig)
    assert (cfg.run.name, cfg.run.steps, cfg.rollout.sampling.stop) == ("x=y", 3, ("a", "b"))
    error = refusal(PPO, "actor.optimizer.lrr=1e-3", "nonsense", "run.steps=[", "batch.samples_per_minibatch=5")
    texts = [str(problem) for problem in error.problems]
    assert texts[0].startswith("override nonsense: expected KEY=VALUE")
    assert texts[1].startswith("override run.steps=[: not valid YAML")
    assert texts[2].startswith("override actor.optimizer.lrr=1e-3: actor.optimizer.lrr: unknown key; did you mean lr?")
    assert texts[3].startswith("override batch.samples_per_minibatch=5: batch.samples_per_minibatch: 5 does not divide")
    assert len(texts) == 4


def test_the_later_override_wins() -> None:
    assert loaded(PPO, "run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize("text", [PPO, SFT, PPO.replace(GAE, KL_ON)], ids=["ppo", "sft", "kl"])
def test_a_dumped_configuration_loads_back(text: str) -> None:
    """A dumped configuration loads to the same values: written defaults do not contradict each other, and strings that
    look like numbers stay strings."""
    cfg = loaded(text, "run.name='1e-6'", "actor.optimizer.eps=1e-08", "run.root='yes'", "data.answer_key=answer")
    dumped = dump_resolved(cfg)
    assert "max_tokens_per_microbatch: 16384" in dumped
    assert loaded(dumped) == cfg
    assert dump_resolved(loaded(dumped)) == dumped


def test_the_command_prints_a_configuration_as_it_is_loaded(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with its base and overrides, and a run directory; `run.root` is where that directory is."""
    (files / "base.yaml").write_text(PPO)
    (files / "own.yaml").write_text("base: base.yaml\nrun: {seed: 2}\n")
    assert main(["config", "own.yaml", "run.steps=7"]) == 0
    printed = capsys.readouterr().out
    assert printed == dump_resolved(loaded(PPO, "run.seed=2", "run.steps=7"))
    (files / "some_run").mkdir()
    (files / "some_run" / "config.yaml").write_text(printed)
    assert main(["config", "some_run"]) == 0
    own = (f"run.root={json.dumps(str(files))}", "run.name=some_run")
    assert capsys.readouterr().out == dump_resolved(loaded(printed, *own))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["own.yaml", "run.sed=3"], "run.sed: unknown key; did you mean seed?"),
        (["nothere.yaml"], "cannot read nothere.yaml"),
        (["rollout", "run.seed=3"], "KEY=VALUE goes with a YAML file or run directory"),
        (["rollout", "--markdown"], "--markdown stands alone"),
    ],
)
def test_the_command_refuses(arguments: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "own.yaml").write_text(PPO)
    assert main(["config", *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err and not found.out


def test_a_dumped_list_loads_back() -> None:
    cfg = loaded(PPO, 'rollout.sampling.stop=["\\n", "null", "é"]', "rollout.sampling.stop_token_ids=[1, 2]")
    assert loaded(dump_resolved(cfg)) == cfg


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        loaded(PPO).run.steps = 3  # type: ignore[misc]


def test_the_smallest_world_holds_every_layout() -> None:
    text = PPO.replace("  nproc: 4\n", "").replace("critic:\n", "critic:\n  parallel: {context: 3}\n")
    cfg = loaded(text)
    assert isinstance(cfg, RLConfig)
    assert smallest_world(cfg) == 12
    assert updates_per_step(cfg) == 2
    assert isinstance(loaded(SFT), SFTConfig)
    assert smallest_world(loaded(SFT)) == 1


def test_a_joined_world_is_checked_against_the_layout() -> None:
    text = PPO.replace("  nproc: 4\n", "")
    assert loaded(text, machine=Machine(8, 4, 0, joined=True))
    assert "the world of 6 ranks" in str(refusal(text, machine=Machine(6, 6, 0, joined=True)))
    assert "8 are started" in str(refusal(PPO, machine=Machine(8, 8, 0, joined=True)))
    two = PPO.replace("  nproc: 4\n", "  nproc: 4\n  nodes: 2\n")
    assert loaded(two, machine=Machine(8, 4, 0, joined=True))
    said = str(refusal(two, "sync.transport=disk", machine=Machine(8, 4, 0, joined=True)))
    assert "sync.transport" in said and "disk uses a directory of one machine" in said
    assert "2 machines with 4 processes each" in str(refusal(two, machine=Machine(4, 4, 0, joined=True)))


def test_gpus_bound_the_world_and_the_engines() -> None:
    assert loaded(PPO, gpus=4)
    assert "4 processes, but this machine has 2 GPUs" in str(refusal(PPO, gpus=2))
    assert "8 GPUs, but this machine has 4" in str(refusal(PPO, "rollout.servers=4", "rollout.tensor=2", gpus=4))
    assert loaded(PPO, "rollout.gpus=[7]", gpus=8) and loaded(PPO, "rollout.gpus=[7]")
    found = str(refusal(PPO, "rollout.servers=3", "rollout.gpus=[8, 2, 9]", gpus=8))
    assert "8, 9: this machine has 8 GPUs, number 0 to 7" in found


def test_layouts_that_megatron_accepts_are_accepted() -> None:
    for layout, world in [
        (ParallelConfig(pipeline=2, first_stage_layers=3), 2),
        (ParallelConfig(pipeline=4, first_stage_layers=1, last_stage_layers=1), 4),
        (ParallelConfig(pipeline=2, first_stage_layers=2, last_stage_layers=6), 2),
        (ParallelConfig(pipeline=2, virtual_pipeline=4), 4),
        (ParallelConfig(pipeline=4, virtual_pipeline=2, first_stage_layers=2, last_stage_layers=2), 4),
        (ParallelConfig(tensor=2, pipeline=2, context=2), 8),
    ]:
        value = json.dumps(layout.model_dump(exclude_defaults=True))
        text = PPO.replace(EXPERT_MODEL, "actor:\n")
        assert loaded(text, f"actor.parallel={value}", f"run.nproc={world}").actor.parallel == layout


@pytest.mark.parametrize(
    "setting",
    [
        *(
            f"algorithm.policy_loss={{loss_mode: {mode}, clip_ratio_low: 1.5}}"
            for mode in ("cispo", "geo_mean", "dppo_kl")
        ),
        *(f"algorithm.value_loss.loss_agg_mode={mode}" for mode in ("token-sum", "seq-mean-token-sum-norm")),
        "algorithm.policy_loss={loss_mode: gspo, loss_agg_mode: token-mean}",
        "algorithm.policy_loss={loss_mode: gpg, clip_ratio_low: 0.2, tau_pos: 1, kl_cov_ratio: 0.0002}",
        "algorithm={adv_estimator: gae, gpg_f_norm: 1.0, zero_tail: null, gdpo_reward_keys: []}",
        "algorithm={adv_estimator: gae, policy_loss: {loss_mode: geo_mean}, rollout_correction: {rollout_is: token}}",
    ],
)
def test_settings_that_are_unusual_and_right_are_accepted(setting: str) -> None:
    assert loaded(PPO, setting)


@pytest.mark.parametrize(
    ("reward", "metrics"),
    [
        ("function: exact_match", ["null", "score"]),
        ("function: rewards.py:mine", ["null", "anything"]),  # only the function knows its metrics
        ("function: sorted_digits", ["right_positions"]),
        ("manager: remote\n  servers: {judge: {url: 'http://judge:1'}}", ["judged"]),
        ("manager: dapo\n  overlong: {buffer_tokens: 4}\n  function: math", ["math", "overlong", "score"]),
        ("manager: dapo\n  overlong: {buffer_tokens: 4}\n  function: rewards.py:mine", ["mine", "mine/right"]),
        ("function: length\n  length: {full_tokens: 2, zero_tokens: 8}", ["null"]),  # its score is the length
    ],
)
def test_groups_may_be_compared_by_what_the_reward_has(files: Path, reward: str, metrics: list[str]) -> None:
    (files / "rewards.py").write_text("def mine(prompt, response, row): return 0.0\n")
    text = PPO.replace("critic:\n  warmup_steps: 2\n", "").replace("function: exact_match", reward)
    settings = ("algorithm.adv_estimator=grpo", "batch.samples_per_prompt=2", "algorithm.filter_groups.enable=true")
    for metric in metrics:
        assert loaded(text, *settings, *([] if metric == "null" else [f"algorithm.filter_groups.metric={metric}"]))


@pytest.mark.parametrize("estimator", ["grpo", "gdpo\n  gdpo_reward_keys: [score]"])
@pytest.mark.parametrize("method", ["pow", "max_min"])
def test_centred_scores_have_an_effect_where_samples_are_drawn_by_their_size(estimator: str, method: str) -> None:
    text = PPO.replace("critic:\n  warmup_steps: 2\n", "").replace(GAE, f"  adv_estimator: {estimator}\n")
    settings = (f"algorithm.pf_ppo.reweight_method={method}", "batch.samples_per_prompt=2")
    scaled = ("algorithm.use_score_scaling=true", "algorithm.use_score_norm=true")
    if method == "pow":
        assert loaded(text, *settings, *scaled)
    else:
        assert "has no effect" in str(refusal(text, *settings, *scaled))
    assert loaded(text, *settings, *scaled, "algorithm.score_clip=1.0")


WITHOUT_CRITIC = ("critic=null", "algorithm.adv_estimator=reinforce_plus_plus")
ONE_UPDATE, BOUND = "batch.samples_per_minibatch=16", "algorithm.policy_loss.clip_ratio_high=0.28"
SCALED, CENTRED = "algorithm.use_score_scaling=true", "algorithm.use_score_norm=true"


@pytest.mark.parametrize(
    "settings",
    [
        (ONE_UPDATE, BOUND),  # a recipe's bound stays when a run makes one update a step
        (ONE_UPDATE, "algorithm.policy_loss={loss_mode: clip_cov, clip_cov_ratio: 0.1}"),
        (ONE_UPDATE, "algorithm.value_loss.cliprange_value=0.2"),
        (*WITHOUT_CRITIC, SCALED, "algorithm.whiten_advantages=false"),
        (*WITHOUT_CRITIC, SCALED, CENTRED, "algorithm.score_clip=1.0"),
        (*WITHOUT_CRITIC, SCALED, "algorithm.kl={use_in_reward: true, coef: 0.1}"),
        ("rollout.max_staleness=1", "rollout.interrupt=at_sync", "algorithm.rollout_correction.rollout_is=token"),
        ("rollout.mismatch={exact: 1e-4}", "model.dtype=float32"),
        ("rollout.mismatch={exact: null, exact_sample: null}",),
        ("checkpoint.push_to_hub=me/mine", "checkpoint.export_hf=true", "checkpoint.timeout_s=60.0"),
        ("checkpoint.every_steps=50", "checkpoint.weights_every_steps=20"),
    ],
    ids=" ".join,
)
def test_settings_with_an_effect_are_not_refused(settings: tuple[str, ...]) -> None:
    assert loaded(PPO, *settings)


def test_a_column_that_a_form_does_not_read_may_hold_anything(files: Path) -> None:
    row = {"text": "abc", "prompt": [{"role": "user", "content": "21="}]}
    (files / "texts.jsonl").write_text(json.dumps(row) + "\n")
    assert loaded(SFT.replace("  max_prompt_tokens: 16\n", ""), "data.train=texts.jsonl", "data.form=text")
    (files / "pairs.jsonl").write_text(json.dumps(row | {"chosen": "a", "rejected": "b"}) + "\n")
    dpo = SFT.replace("trainer: sft", "trainer: dpo").replace("samples_per_step", "rows_per_step")
    error = refusal(dpo, "data.train=pairs.jsonl", "data.max_tokens=64")
    assert "data.chat_template" in {key for problem in error.problems for key in problem.keys}, str(error)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
        ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
        ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.2}),
        ("dppo_tv", {"divergence_low": 0.15, "divergence_high": 0.15, "dppo_ratio_cap": 20.0}),
        ("dppo_kl", {"divergence_low": 0.05, "divergence_high": 0.05, "dppo_ratio_cap": 20.0}),
    ],
)
def test_a_loss_has_its_own_keys_with_its_own_defaults(loss: str, options: dict[str, float]) -> None:
    cfg = loaded(PPO, f"algorithm.policy_loss.loss_mode={loss}")
    assert isinstance(cfg, RLConfig)
    assert cfg.algorithm.policy_loss.own_options == options
    assert cfg.algorithm.own_options == {
        "gamma": 1.0, "lam": 1.0, "whiten_advantages": True, "whiten_shift_mean": True,
    }  # fmt: skip
    low = next(iter(options))
    written = loaded(PPO, f"algorithm.policy_loss={{loss_mode: {loss}, clip_ratio_low: 0.07}}")
    assert isinstance(written, RLConfig)
    assert written.algorithm.policy_loss.own_options == options | {low: 0.07}, "by its former name too"


@pytest.mark.parametrize("name", BUILTIN_REWARDS)
def test_the_named_rewards_are_the_built_in_ones(name: str) -> None:
    from mrl.reward.loading import load

    assert callable(load(name, settings={"code": CodeConfig(isolation="none").model_dump()}))


THEIRS = (
    *("model.path", "model.chat_template", "data.train", "data.validation", "reward.scorer.path", "run.nodes"),
    *("agent.rollout", "reward.function", "teacher.path", "adapters.code.data.train"),
)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "yaml_configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_shipped_configurations_are_valid_but_for_files_that_runs_write(path: Path) -> None:
    """Shipped configurations are valid except for files that runs write, and for sizes of other machines."""
    try:
        load(path)
    except ConfigError as error:
        other = [p for p in error.problems if p.keys[0] not in THEIRS]
        assert not other, str(error)
