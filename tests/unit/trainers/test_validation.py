"""Validation on held-out prompts: what its means cover, and that missing responses are always reported."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mrl.config.schema import RLConfig
from mrl.core import Request, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, load_tokenizer
from mrl.evaluation.answers import summary
from mrl.evaluation.show import lines
from mrl.observe import before_after_table
from mrl.observe.progress import headlines
from mrl.observe.report import write_report
from mrl.reward.errors import RewardError
from mrl.sampling.dynamic_sampling import SamplingError
from mrl.trainers.rl.generate import Generator
from tests.conftest import TinyModels
from tests.helpers.simulated import SimulatedEngine

ROWS = [("sums", "1 + 1 ="), ("sums", "1 + 2 ="), ("words", "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
        ("words", "b"), (None, "c")]  # fmt: skip
SCORES = {"1 + 1 =": 1.0, "1 + 2 =": 0.5, "b": 0.25, "c": 0.0}


@pytest.fixture(scope="module")
def tokenizer(tiny_models: TinyModels) -> Tokenizer:
    return load_tokenizer(tiny_models("llama", weights=False))


class Parts(SimulatedEngine):
    """Engine, environments and reward in one object. Some prompts are left out, or their reward fails."""

    def __init__(self, left_out: tuple[str, ...] = (), failed: tuple[str, ...] = ()) -> None:
        super().__init__(lambda request, params: pytest.fail("the agents generate"))
        self.left_out, self.failed = left_out, failed
        self.params: SamplingParams | None = None

    async def play(self, request: Request, params: SamplingParams, generate: object) -> Sample:
        self.asked.append((request, params))
        self.params = params
        sample = Sample(request, np.array([5]), np.array([-1.0]), "stop", "0", response_text="x")
        sample.left_out = "the tool is gone\nfor ever" if request.prompt.text in self.left_out else ""
        return sample

    def submit(self, sample: Sample) -> None:
        assert not sample.left_out

    def collect(self, samples: list[Sample]) -> None:
        for sample in samples:
            sample.score = SCORES[sample.request.prompt.text]
            if sample.request.prompt.text in self.failed:
                sample.score, sample.reward_error = 0.0, "the server is down"


def made(folder: Path, tokenizer: Tokenizer, parts: Any, **validation: Any) -> tuple[Generator, list[str]]:
    """Returns a run's generator and its notes. One row in five exceeds data.max_prompt_tokens."""
    rows = ({"prompt": text} | ({"data_source": source} if source else {}) for source, text in ROWS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rollouts").mkdir(exist_ok=True)
    cfg = RLConfig.model_validate(
        {
            **{"trainer": "rl", "run": {"name": "run"}, "model": {"path": "-"}, "batch": {"prompts_per_step": 1}},
            "data": {"train": "-", "validation": str(folder / "rows.jsonl"), "max_prompt_tokens": 24},
            "reward": {"function": "environment", "on_error": "zero"},
            "agent": {"rollout": "a.py:b", "on_error": "leave_out"},
            "algorithm": {"adv_estimator": "gae"},
            "validation": validation,
        }
    )
    held_out = PromptDataset(folder / "rows.jsonl", cfg.data, tokenizer)
    notes: list[str] = []
    return Generator(cfg, folder, parts, parts, notes.append, tokenizer, held_out, held_out, agents=parts), notes


def validated(generator: Generator, step: int = 0) -> dict[str, float]:
    return generator.validate(step, lambda sample: None, "validation")


def test_all_rows_are_validated_unless_fewer_are_wanted_and_the_number_is_said(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    parts = Parts()
    generator, _ = made(tmp_path, tokenizer, parts)
    said = generator.notes()
    assert any(note.startswith("data.validation: 1 prompts") and "longer than 24 tokens" in note for note in said)
    assert said[-1] == "validation: 4 of 5 prompts"
    heard: list[object] = []
    generator.is_active = heard.append
    metrics = validated(generator)
    assert heard, "who waits for rank 0 hears of its samples"
    assert metrics["validation/mean"] == pytest.approx(1.75 / 4) and len(parts.asked) == 4
    assert (metrics["validation/mean/sums"], metrics["validation/mean/words"]) == (0.75, 0.25)
    assert metrics["validation/scored"] == metrics["validation/of"] == 4 and metrics["validation/of/sums"] == 2
    assert dict(headlines(metrics))["validation"] == "0.438"
    fewer, _ = made(tmp_path, tokenizer, parts, prompts=2, samples_per_prompt=3, temperature=0.7, top_p=0.9, top_k=5)
    assert fewer.notes()[-1] == "validation: 2 of 5 prompts, 3 responses to each"
    assert validated(fewer)["validation/of"] == 6 and len({request.seed for request, _ in parts.asked[4:]}) == 6
    assert parts.params is not None
    assert (parts.params.temperature, parts.params.top_p, parts.params.top_k) == (0.7, 0.9, 5)


def test_what_has_no_score_is_counted_named_and_in_no_mean(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator, notes = made(tmp_path, tokenizer, Parts(("1 + 1 =", "b"), ("1 + 2 =",)))
    metrics = validated(generator)
    assert metrics["validation/mean"] == 0.0, "of c, and of a failed reward that counts as 0 (reward.on_error: zero)"
    assert (metrics["validation/scored"], metrics["validation/of"], metrics["validation/failed"]) == (1, 4, 0.5)
    assert "validation/mean/words" not in metrics and metrics["validation/scored/words"] == 0
    assert dict(headlines(metrics))["validation"] == "0.000 (1 of 4 scored)"
    assert any(
        "2 of 4 responses have no score (rollouts/validation_step_0.jsonl): the tool is gone" in n for n in notes
    )
    assert any("1 of 4 samples score 0, the reward failed on them" in note for note in notes)
    rows = [json.loads(line) for line in (tmp_path / "rollouts/validation_step_0.jsonl").open()]
    assert [row["score"] for row in rows] == [None, 0.0, None, 0.0] and "for ever" in rows[0]["left_out"]
    with pytest.raises(SamplingError, match=r"validation: none of 4 responses has a score \(rollouts/validation_step_"):
        validated(made(tmp_path, tokenizer, Parts((*SCORES,)))[0])


def test_before_and_after_are_means_over_the_same_responses(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The comparison before and after uses only responses with a score at both steps. Otherwise a prompt whose program
    fails at the end could improve the mean."""
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    validated(made(tmp_path, tokenizer, Parts(), samples_per_prompt=2, temperature=1.0)[0], 0)
    validated(made(tmp_path, tokenizer, Parts(("c",)), samples_per_prompt=2, temperature=1.0)[0], 3)
    console = Console(file=StringIO(), width=200)
    before_after_table(tmp_path, console=console)
    assert isinstance(console.file, StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "validation score 0.583 → 0.583 (6 of 8 responses have a score at both steps)" in text
    assert text.count("1 + 1") == 1 and "x (no score)" in text
    page = write_report(tmp_path).read_text()
    assert "(6 of 8 responses have a score at both steps)" in page and "no score</span>" in page


def test_eval_is_about_prompts_whose_answers_all_have_a_score() -> None:
    from mrl.core import Prompt

    scores = [[1.0, 0.0], [1.0, math.nan], [0.0, 0.0]]
    samples = [
        Sample(Request(2 * g + i, g, Prompt(g, (1,), {}, "q"), 0), [3], [0.0], "stop", "0", "x", s)
        for g, group in enumerate(scores)
        for i, s in enumerate(group)
    ]
    samples[3].left_out = "the reward failed"
    found = summary(samples, 2, right_from=1.0)
    assert found["estimates"]["mean_score"]["value"] == 0.25 and (found["scored"], found["of"]) == (2, 3)
    assert any("prompts scored" in line and "2 of 3" in line for line in lines(found))
    with pytest.raises(RewardError, match="no prompt has scores for all its samples"):
        summary(samples[2:4], 2, right_from=1.0)
