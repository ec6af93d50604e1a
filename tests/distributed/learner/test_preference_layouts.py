"""Losses of preference learning are over the step's whole batch. Loss and gradient are the same under every layout, for
any number of micro-batches, in one pass and in two, and equal the papers' formulas with transformers in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mpmath import diff, mpf
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.options.preference import PREFERENCE_LOSSES
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world
from tests.unit.algo.test_algo_preference import PAPERS, Pair

MICRO_BATCHES = {"one/45": 5, **dict(slow_cases(("one/110", 2), ("one/51", 5)))}  # a pair exceeds 45 tokens
ONE = ("one", *MICRO_BATCHES)
TWO = ("cp2/60", *slow_cases("tp2", "pp2", "dp2"))
OTHERS = slow_cases(("deep", "pp2.vpp2"), ("moe", "ep2/60"))
STEEP = 2e-5  # tolerance for discopop, whose gradient changes 1 / tau = 20 times as fast
Results = dict[str, dict[str, tuple[float, float, str, int, float]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preference")


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    size = {"num_key_value_heads": 4, "vocab_size": 313}
    make_tiny(root / "dense", "qwen2", tied=True, weights=False, num_hidden_layers=2, **size)
    make_tiny(root / "deep", "qwen2", weights=False, num_hidden_layers=4, **size)
    make_tiny(root / "moe", "qwen3_moe", weights=False, **size)
    found = {}
    alone = {"dense": ONE} | {model: ("one",) for model, _ in OTHERS}
    cut = {"dense": TWO} | {model: (layout,) for model, layout in OTHERS}
    for processes, of_models in ((1, alone), (2, cut)):
        jobs: list[str | Path] = []
        for model, layouts in of_models.items():
            jobs += ["--", root / model, root / f"{model}.pt", root / f"{model}_{processes}.json", *layouts]
        run_world(processes, "preference.py", *jobs)
        for model in of_models:
            found |= json.loads((root / f"{model}_{processes}.json").read_text())
    return found


@pytest.mark.parametrize("layout", [*ONE, *TWO, *(layout for _, layout in OTHERS)])
def test_loss_and_gradients_equal_one_process(results: Results, layout: str) -> None:
    assert PREFERENCE_LOSSES.keys() | {"sigmoid twice", "mixed", "prompts"} <= results[layout].keys()
    for case, (loss_error, gradient_error, worst, _, of_tokens) in results[layout].items():
        bound = STEEP if case == "discopop" else 1e-5
        assert loss_error < 1e-5 and gradient_error < bound, (case, loss_error, gradient_error, worst)
        assert of_tokens < 1e-5, (case, of_tokens)


def test_the_micro_batches_were_several(results: Results) -> None:
    assert {layout: results[layout]["sigmoid"][3] for layout in MICRO_BATCHES} == MICRO_BATCHES


class Slow:
    """transformers' model in float64, one sequence at a time. All cases share the cached log-probs of a sequence."""

    def __init__(self, folder: Path, stored: dict[str, Any]) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.models = [AutoModelForCausalLM.from_config(config).double() for _ in range(2)]
        for model, weights in zip(self.models, stored["weights"], strict=True):
            model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
        self.samples, self.prompt_lens = stored["samples"], stored["prompt_lens"].tolist()
        self.known: dict[tuple[int, int], Tensor] = {}

    def log_probs(self, which: int, sample: int) -> Tensor:
        """Returns the log-probs of every token except the first."""
        if (which, sample) not in self.known:
            ids = self.samples[sample]
            logits = self.models[which](ids[None]).logits[0, :-1].log_softmax(-1)
            self.known[which, sample] = logits[torch.arange(len(ids) - 1), ids[1:]]
        return self.known[which, sample]

    def gradients(self, case: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
        """Returns (value, gradient) of the case's losses, each averaged over its pairs."""
        self.models[0].zero_grad()
        pairs = range(0, len(self.samples), 2)
        value, learnt = 0.0, torch.zeros((), dtype=torch.float64)
        texts, tokens = torch.zeros((), dtype=torch.float64), 0
        for i in pairs:
            each = [self.log_probs(0, i), self.log_probs(0, i + 1)]
            with torch.no_grad():
                reference = [self.log_probs(1, i), self.log_probs(1, i + 1)]
            starts = [self.prompt_lens[i] - 1, self.prompt_lens[i + 1] - 1]
            lens = [len(x) - start for x, start in zip(each, starts, strict=True)]
            ours, theirs = ([cut(x[start:], min(lens), case) for x, start in zip(sums, starts, strict=True)]
                            for sums in (each, reference))  # fmt: skip
            text = each[0] if case["loss"].get("sft", {}).get("with_prompt") else each[0][starts[0] :]
            texts, tokens = texts + text.sum(), tokens + len(text)
            at = tuple(mpf(float(x.detach())) for x in ours)
            for name in case["loss"].keys() - {"sft"}:
                options = PREFERENCE_LOSSES[name].filled(case["loss"][name])
                fixed = ([0.0, 0.0] if case.get("reference_free") else [float(x) for x in theirs], lens, options)
                weight = options["weight"] / len(pairs)
                paper = lambda c, r, name=name, fixed=fixed: PAPERS[name](Pair(c, r, *fixed[0], *fixed[1], fixed[2]))  # noqa: E731
                value += weight * float(paper(*at))
                for order, x in zip(((1, 0), (0, 1)), ours, strict=True):
                    learnt = learnt + weight * float(diff(paper, at, order)) * x
        if "sft" in case["loss"]:
            nll = -texts / tokens * case["loss"]["sft"].get("weight", 1.0)
            value, learnt = value + float(nll.detach()), learnt + nll
        learnt.backward(retain_graph=True)
        return value, {name: p.grad for name, p in self.models[0].named_parameters()}


def cut(log_probs: Tensor, shorter: int, case: dict[str, Any]) -> Tensor:
    """Returns the sum of the log-probs, in which ld_alpha weights the tokens after the shorter length."""
    return log_probs[:shorter].sum() + case.get("ld_alpha", 1.0) * log_probs[shorter:].sum()


def test_gradients_are_those_of_transformers_and_the_papers(results: Results, root: Path) -> None:
    stored = torch.load(root / "dense.pt")
    slow, cases = Slow(root / "dense", stored), stored["given"]
    known = {name for name, case in cases.items() if {*case["loss"]} <= PAPERS.keys() and "use_weighting" not in case}
    assert {"sft", "mixed", "ld", "prompts", "orpo with prompts", "free"} <= known and len(known) >= 20
    for name in sorted(known):
        value, gradients = slow.gradients(cases[name])
        got_value, got, _ = stored["cases"][name]
        assert got_value == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert got.keys() == gradients.keys()
        for key, want in gradients.items():
            assert float((got[key] - want).norm() / (want.norm() + 1e-9)) < 2e-5, (name, key)


def test_what_is_reported_of_tokens_is_what_transformers_says(results: Results, root: Path) -> None:
    stored = torch.load(root / "dense.pt")
    slow, said = Slow(root / "dense", stored), stored["cases"]["sigmoid"][2]
    logits, right = {0: [], 1: []}, {0: [], 1: []}
    for i, (ids, prompt) in enumerate(zip(slow.samples, slow.prompt_lens, strict=True)):
        with torch.no_grad():
            rows = slow.models[0](ids[None]).logits[0, prompt - 1 : -1]
        logits[i % 2].append(rows.mean(-1))
        right[i % 2].append(rows.argmax(-1) == ids[prompt:])
    assert said["dpo/mean_token_accuracy"] == pytest.approx(float(torch.cat(right[0]).double().mean()), rel=1e-5)
    for half, name in enumerate(("logits/chosen", "logits/rejected")):
        assert said[name] == pytest.approx(float(torch.cat(logits[half]).mean()), rel=1e-4, abs=1e-6)
