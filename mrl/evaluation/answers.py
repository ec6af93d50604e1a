"""Correct answers of a model: prompts of data.validation, sampled by an engine, scored by the run's reward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mrl.config.derived import Machine
from mrl.config.model_dirs import is_converted
from mrl.config.schema import Config
from mrl.core import Request, Sample, SamplingParams
from mrl.data import PromptDataset, load_image_processor, load_tokenizer
from mrl.evaluation.estimates import Estimate, majority_at, pass_at
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from mrl.observe.progress import PlainDisplay, Progress
from mrl.platform import gpu_count
from mrl.reward.check import row_check
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager

STREAM = 1 << 42  # random stream apart from a run's own


def why_unanswerable(cfg: Config, weights: str) -> str | None:
    """Returns why a local engine cannot answer with these weights, or answers cannot be scored; None if they can."""
    reward, engines = cfg.rewards(), cfg.engines()
    assert reward is not None and engines is not None
    rollout, _ = engines
    if cfg.has_turns:
        return "agent: mrl eval generates single turns only: use the validation of a run for agents"
    if reward.model is not None:
        return "reward.model: it scores on the ranks of a run, and mrl eval has none: use the validation of a run"
    if rollout.urls:
        return (
            f"rollout.urls: those engines have their own weights, not {weights}: leave it out to start an engine here"
        )
    if rollout.quantization != "none":
        return "rollout.quantization: an fp8 engine has no weights before a run syncs them: set it to none"
    if is_converted(weights):
        return f"{weights} is a Megatron checkpoint, and engines read safetensors: run mrl convert megatron-to-hf"
    if not any(Path(weights).glob("*.safetensors")):
        return f"{weights} has no *.safetensors, the only format that engines read: convert its weights to safetensors"
    return None


def evaluate_answers(
    cfg: Config, weights: str, logs: Path, prompts: int, samples: int, temperature: float, right_from: float
) -> dict[str, Any]:
    """Returns estimates of the answers' quality by name with intervals, and the samples with their scores.

    Estimates are `mean_score`, `exact` (share of correct ones), and `pass@k` and `maj@k` for k = 1, 2, 4, ... and
    `samples`. `scored`: prompts whose answers all have a score, which the estimates are about; `of`: all prompts;
    `failed`: share of failed rewards, if any.

    weights: a Hugging Face directory; right_from: lowest score of a correct answer; temperature: 0 with one sample
    Raises DataError, TokenizerError, RewardError, RolloutError, EngineUnavailable or EngineStartError.
    """
    reward, engines = cfg.rewards(), cfg.engines()
    assert cfg.data.validation is not None and reward is not None and engines is not None
    rollout, _ = engines
    tokenizer = load_tokenizer(weights, cfg.model.eos_token, cfg.model.chat_template)
    image_processor = load_image_processor(weights, cfg.data)
    data = PromptDataset(
        cfg.data.validation, cfg.data, tokenizer, check=row_check(reward, cfg.data), image_processor=image_processor
    )
    asked = data.first(prompts)
    requests = [
        Request(i, i // samples, asked[i // samples], sample_seed(cfg.run.seed, STREAM, i))
        for i in range(len(asked) * samples)
    ]
    sampling = rollout.sampling
    stops = (*sampling.stop_token_ids, tokenizer.eos_id)
    params = SamplingParams(temperature, 1.0, -1, sampling.max_new_tokens, sampling.stop, stops)
    here = Machine(world_size=1, local_world_size=1, gpus=gpu_count())
    keys = {name: dict(cfg.data)[name] for name in ("prompt_key", "answer_key", "data_source_key")}
    with contextlib.ExitStack() as stack:
        rewards = RewardManager(reward, **keys, max_response_tokens=sampling.max_new_tokens)
        stack.enter_context(contextlib.closing(rewards))
        engine = stack.enter_context(start_engine(rollout, weights, cfg.model.dtype, logs, cfg.run.seed, machine=here))
        engine.wait_ready()
        progress = Progress(0)
        progress.enter("answers")
        progress.expected = len(requests)
        terminal = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        display = stack.enter_context(contextlib.closing(PlainDisplay(progress, terminal)))

        def finished(some: Sequence[Sample]) -> None:
            progress.finished += len(some)
            display.tick()

        found = engine.generate(requests, params, finished)
        for sample, text in zip(found, tokenizer.decode_all([s.response_ids for s in found]), strict=True):
            sample.response_text = text
        rewards.collect(found)
    return summary(found, samples, right_from)


def summary(found: Sequence[Sample], n: int, right_from: float) -> dict[str, Any]:
    """Returns estimates over the prompts whose samples, n consecutive ones each, all have a score. Raises RewardError
    if there is none."""
    asked = [found[first : first + n] for first in range(0, len(found), n)]
    groups = [group for group in asked if not any(sample.left_out for sample in group)]
    if not groups:
        raise RewardError(f"no prompt has scores for all its samples; reason for the first sample: {found[0].left_out}")
    right = [[sample.score >= right_from for sample in group] for group in groups]
    texts = [[sample.response_text.strip() for sample in group] for group in groups]
    estimates = {
        "mean_score": Estimate.of([sum(s.score for s in group) / n for group in groups]),
        "exact": Estimate.of([sum(good) / n for good in right]),
    }
    if any(s.reward_error for s in found):  # left out with their prompts, or scored 0, by reward.on_error
        estimates["failed"] = Estimate.of([sum(bool(s.reward_error) for s in group) / n for group in asked])
    for k in sorted({2**power for power in range(n.bit_length())} | {n}):
        estimates[f"pass@{k}"] = pass_at(k, [sum(good) for good in right], n)
        estimates[f"maj@{k}"] = majority_at(k, texts, right)
    rows = [
        {"prompt": group[0].request.prompt.text, "responses": t, "scores": [s.score for s in group]}
        for group, t in zip(groups, texts, strict=True)
    ]
    counts = {"scored": len(groups), "of": len(asked)}
    return {"estimates": {name: asdict(e) for name, e in estimates.items()}, **counts, "samples": rows}
