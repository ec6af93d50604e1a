"""Section `adapters`: the configuration of each adapter, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.schema import RLConfig
from mrl.inference.launch import started_with
from tests.conftest import TinyModels
from tests.helpers.train_tools import write_config

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "merged": (("sync.lora=merge",), ("adapters", "sync.lora", "set sync.lora: adapter")),
    "no lora": (("actor.lora=null",), ("sync.lora", "actor.lora", "adapter needs LoRA adapters")),
    "offload": (("actor.offload=optimizer",), ("actor.offload", "set actor.offload: none")),
    "asynchronous": (("rollout.max_staleness=1",), ("rollout.max_staleness", "set rollout.max_staleness: 0")),
    "early passes": (("rollout.early_passes=2",), ("rollout.early_passes", "not supported with several adapters")),
    "average": (("ema={decay: 0.9}",), ("ema", "not supported with several adapters")),
    "name": (("adapters.Big={}",), ("adapters.Big", "use at most 63 of a-z, 0-9, _ and -")),
    "name of metrics": (("adapters.perf={}",), ("adapters.perf", "metrics of the whole run are named perf/...")),
    "reward model": (
        ("adapters.b.reward={function: model, model: {path: x}}",),
        ("adapters.b.reward.model", "adapters", "score by a server"),
    ),
    "a section that all replace": (
        ("adapters.a.optimizer={lr: 1e-3}", "actor.optimizer.lr=1e-2"),
        ("actor.optimizer", "adapters", "has no effect: each of the adapters has its own optimizer"),
    ),
    "sampling that all replace": (
        ("adapters.a.sampling={max_new_tokens: 4}", "adapters.b.sampling={max_new_tokens: 4}"),
        ("rollout.sampling", "has no effect: each of the adapters has its own sampling"),
    ),
    "unknown key": (("adapters.b.rollout={}",), ("adapters.b.rollout", "unknown key")),
    "a row that is missing": (
        ("adapters.b.data={train: nowhere.jsonl, max_prompt_tokens: 32}",),
        ("adapters.b.data.train", "nowhere.jsonl"),
    ),
    "a value": (("adapters.b.lora={rank: 0}",), ("adapters.b.lora.rank",)),
    "a rule of one adapter": (("adapters.b.lora={targets: [w]}",), ("adapters.b.lora.targets", "no linear layer w")),
    "a rule of its batch": (
        ("adapters.b.batch={prompts_per_step: 4, samples_per_prompt: 1}",),
        ("adapters.b.batch.samples_per_prompt",),
    ),
}


@pytest.fixture
def config(tiny_models: TinyModels, tmp_path: Path) -> Path:
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    sections: dict[str, dict[str, Any]] = {"actor": {"lora": lora, "optimizer": {"lr": 1e-4}}}
    sections |= {"sync": {"lora": "adapter"}, "adapters": {"a": {}, "b": {"optimizer": {"lr": 1e-5}}}}
    return write_config(tmp_path, tiny_models("llama"), **sections)


def loaded(config: Path, *overrides: str) -> RLConfig:
    cfg = load(config, overrides)
    assert isinstance(cfg, RLConfig)
    return cfg


def test_each_adapter_has_the_run_s_sections_but_for_its_own(config: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    data = f"{{train: {tmp_path / 'other.jsonl'}, max_prompt_tokens: 8}}"
    told = (f"adapters.b.data={data}", "adapters.b.sampling={max_new_tokens: 5}", "adapters.b.lora={rank: 16}")
    run = loaded(config, *told)
    a, b = run.adapter_configs().values()
    assert a == run.model_copy(update={"adapters": {}})
    assert (b.actor.optimizer.lr, b.actor.lora.rank, b.rollout.sampling.max_new_tokens) == (1e-5, 16, 5)  # type: ignore[union-attr]
    assert b.data.max_prompt_tokens == 8 and b.reward == run.reward and b.actor.parallel == run.actor.parallel
    assert run.engines()[0].max_context_tokens == 32 + 16, "of the longer samples"
    words = started_with(run).server_args
    assert words[words.index("--max-lora-rank") + 1] == "16" and words[words.index("--max-loras-per-batch") + 1] == "3"
    assert {"q_proj", "v_proj", "down_proj"} <= {*words}
    assert set(run.data_uses()) == {"data", "adapters.b.data"}


def test_a_validation_of_the_run_is_for_adapters_with_its_data(config: Path, tmp_path: Path) -> None:
    told = (f"data.validation={tmp_path / 'validation.jsonl'}", "validation.every_steps=2")
    data = f"{{train: {tmp_path / 'train.jsonl'}, max_prompt_tokens: 8}}"
    a, b = loaded(config, *told, f"adapters.b.data={data}").adapter_configs().values()
    assert a.validation.every_steps == 2 and b.data.validation is None
    assert b.validation.every_steps != 2


@pytest.mark.parametrize("case", REFUSED)
def test_what_several_adapters_cannot_share_is_refused_by_its_key(case: str, config: Path) -> None:
    overrides, said = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        loaded(config, *overrides)
    shown = " ".join(str(caught.value).split())
    assert all(part in shown for part in said), shown


def test_a_problem_of_one_adapter_has_its_line(config: Path) -> None:
    written = yaml.safe_load(config.read_text())
    written["adapters"]["b"]["reward"] = {"function": "nowhere.py:f"}
    config.write_text(yaml.safe_dump(written))
    line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "nowhere.py" in text)
    with pytest.raises(ConfigError) as caught:
        loaded(config)
    [problem] = caught.value.problems
    assert str(problem).startswith(f"{config}:{line}: adapters.b.reward.function: ")


def test_a_problem_of_all_adapters_is_told_once(config: Path) -> None:
    alone = config.with_name("alone.yaml")
    alone.write_text(yaml.safe_dump({k: v for k, v in yaml.safe_load(config.read_text()).items() if k != "adapters"}))
    told = []
    for file in (config, alone):
        with pytest.raises(ConfigError) as caught:
            loaded(file, "actor.parallel.tensor=3")
        told.append([(problem.keys, problem.message) for problem in caught.value.problems])
    assert told[0] == told[1]
