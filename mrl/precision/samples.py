"""Samples for comparing recipes: the run's last rollouts, or its demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.algo import aggregate
from mrl.config.schema import Config, SFTDataConfig
from mrl.core import Rollout
from mrl.data import PromptDataset, SFTDataset, Tokenizer, load_tokenizer
from mrl.families import load_arch
from mrl.observe.files import numbered_files, read_jsonl


class NoSamplesError(RuntimeError):
    """The run has no samples yet."""


@dataclass(frozen=True)
class ComparisonSamples:
    """source: the origin, in words; weights [R]: each token's factor in the loss; temperature: of the sampling."""

    source: str
    rollout: Rollout
    weights: Tensor
    temperature: float


def samples_of(cfg: Config, weights: str, most: int) -> ComparisonSamples:
    """Returns at most `most` samples. Raises NoSamplesError if there are none.

    For a run that samples, these are the last step's, tokenised again; each token's weight is its response's score
    minus the mean, over the standard deviation. Otherwise they are the data's answers, with equal weights.
    weights: the directory of the tokenizer
    """
    if load_arch(weights).vision is not None:
        raise NoSamplesError(f"{weights} is a vision model: --precision-report supports text models only")
    tokenizer = load_tokenizer(weights, cfg.model.eos_token, cfg.model.chat_template)
    if not cfg.is_sampling:
        use = cfg.data_uses()["data"]
        count = min(most, use.rows_per_step)
        if isinstance(use.cfg, SFTDataConfig):
            imitated = SFTDataset(use.cfg.train, use.cfg, tokenizer)
            rollout = imitated.batch(0, imitated.of_step(0, count, cfg.run.seed))
        else:
            data = PromptDataset(use.cfg.train, use.cfg, tokenizer, require_answer=True)
            rollout = data.sft_rollout(0, count, cfg.run.seed)
        return ComparisonSamples("responses of data.train", rollout, rollout.normalized_loss_weights, 1.0)
    file, rows = _last_step(Path(cfg.run.root) / cfg.run.name)
    rollout = _rollout(cfg, tokenizer, [row for row in rows if row["response"]][:most])
    scores = rollout.scores - rollout.scores.mean()
    if bool(scores.any()):
        scores = scores / scores.std()
    else:
        scores = torch.ones_like(scores)
    counts = rollout.flat(scores[:, None].expand(rollout.response_mask.shape))
    rollout_cfg, _ = cfg.engines() or (None, None)
    temperature = rollout_cfg.sampling.temperature if rollout_cfg is not None else 1.0
    return ComparisonSamples(str(file), rollout, counts * _shares(rollout), temperature)


def _last_step(run_dir: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the file and its rows that hold a response. Raises NoSamplesError."""
    found = numbered_files(run_dir / "rollouts", "step_*.jsonl")
    if not found:
        raise NoSamplesError(f"{run_dir}/rollouts has no training samples: train one step first (run.steps=1)")
    _, file = found[-1]
    rows = [row for row in read_jsonl(file) if isinstance(row.get("response"), str) and row["response"]]
    rows = [row for row in rows if row.get("score") is not None]
    if not rows or not all(isinstance(row.get("prompt"), str) for row in rows):
        raise NoSamplesError(f"{file} has no responses with prompts and scores, as a run writes them")
    return file, rows


def _rollout(cfg: Config, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> Rollout:
    encode = tokenizer.encode_plain if cfg.data.chat_template else tokenizer.encode_prompts
    answers = tokenizer.encode_plain([row["response"] for row in rows])
    ends = [[tokenizer.eos_id] if row.get("finish_reason") == "stop" else [] for row in rows]
    return Rollout.of(
        0,
        encode([row["prompt"] for row in rows]),
        [answer + end for answer, end in zip(answers, ends, strict=True)],
        scores=torch.tensor([float(row["score"]) for row in rows]),
    )


def _shares(rollout: Rollout) -> Tensor:
    return rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
