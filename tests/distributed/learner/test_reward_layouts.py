"""Losses of reward models are over the step's whole batch. Loss and gradients equal those of transformers in float64,
one text at a time, under every layout, for any number of micro-batches, in one pass and in two."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

MICRO_BATCHES = {"one": 1, "one/50": 5, **dict(slow_cases(("one/120", 2), ("one/54", 4)))}  # a pair exceeds 50 tokens
TWO = ("cp2/70", "pp2.vpp2", *slow_cases("tp2", "tp2.sequence0", "pp2", "cp2", "dp2"))
EXPERTS = slow_cases("ep2")
CASES = ("bradley_terry", "plackett_luce", "pairwise", "regression", "process")
Results = dict[str, dict[str, tuple[float, float, str, int]]]


def make_model(folder: Path, family: str, layers: int) -> Path:
    """Makes a reward model with two score heads."""
    size = {"num_hidden_layers": layers, "num_key_value_heads": 4, "vocab_size": 313}
    make_tiny(folder / "policy", family, weights=False, **size)
    config = AutoConfig.from_pretrained(folder / "policy", num_labels=2, problem_type="regression")
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward_layouts")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    found: Results = {}
    models = {"qwen2": make_model(folder / "qwen2", "qwen2", 4)}
    if EXPERTS:
        models["qwen3_moe"] = make_model(folder / "qwen3_moe", "qwen3_moe", 2)
    plans: dict[int, dict[str, tuple[str, ...]]] = {
        1: {"qwen2": tuple(MICRO_BATCHES), "qwen3_moe": ("one",)},
        2: {"qwen2": TWO, "qwen3_moe": EXPERTS},
    }
    for processes, layouts in plans.items():
        jobs: list[str | Path] = []
        for family, model in models.items():
            result = folder / f"{family}_{processes}.json"
            jobs += ["--", model, folder / f"{family}.pt", result, *layouts[family]]
        run_world(processes, "reward_losses.py", *jobs)
        for family in models:
            found |= json.loads((folder / f"{family}_{processes}.json").read_text())
    return found


@pytest.mark.parametrize("layout", [*list(MICRO_BATCHES)[1:], *TWO, *EXPERTS])
def test_loss_and_gradients_equal_one_process(results: Results, layout: str) -> None:
    assert {*CASES, "bradley_terry twice", "process twice"} == results[layout].keys()
    for case, (loss_error, gradient_error, worst, _) in results[layout].items():
        assert loss_error < 1e-5 and gradient_error < 1e-5, (case, loss_error, gradient_error, worst)


def test_the_micro_batches_were_several(results: Results, folder: Path) -> None:
    again = json.loads((folder / "qwen2_1.json").read_text())
    assert {layout: again[layout]["bradley_terry"][3] for layout in again} == MICRO_BATCHES


@pytest.fixture(scope="module")
def world() -> Any:
    """Imports the world's script, for its texts and targets."""
    folder = Path(__file__).parents[2] / "worlds"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("reward_losses_world", folder / "reward_losses.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.mark.parametrize("case", CASES)
def test_one_process_is_transformers_in_float64(results: Results, folder: Path, world: Any, case: str) -> None:
    texts, _, t, steps = world.make(case, 313)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "qwen2/model", dtype=torch.float64).eval()
    scores: list[Tensor] = []
    for i, ids in enumerate(texts.tokens.split(texts.seq_lens.tolist())):
        values = theirs.score(theirs.model(ids[None]).last_hidden_state)[0]  # [tokens, 2]
        ends = steps[i] if steps else [int(texts.response_lens[i])]
        scores += [values[int(texts.prompt_lens[i]) + end - 1] for end in ends]
    loss = t.value(torch.stack(scores, 1))
    loss.backward()
    got_loss, gradients = torch.load(folder / "qwen2.pt")[case]
    assert got_loss == pytest.approx(float(loss), rel=1e-5)
    parameters = dict(theirs.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        want = parameters[name].grad
        assert want is not None
        assert float((gradient - want).norm() / want.norm().clamp(min=1e-6)) < 1e-4, name
