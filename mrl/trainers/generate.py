"""Samples of a step: prompts -> engine -> rewards -> one Rollout on every rank. Engine and rewards live on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema import RLConfig
from mrl.core import Prompt, Request, Rollout, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, collate
from mrl.observe import save_samples
from mrl.reward import RewardPool
from mrl.rollout import Engine, sample_seed

VALIDATION_STREAM = 1 << 40  # keeps validation seeds apart from every training step's


@dataclass
class Generator:
    """Rank 0's side: draws prompts, samples, scores while the engine still works, and writes the samples down."""

    cfg: RLConfig
    run_dir: Path
    engine: Engine
    rewards: RewardPool
    tokenizer: Tokenizer
    train: PromptDataset
    validation: PromptDataset | None

    def notes(self) -> list[str]:
        """What was corrected or left out of the data, for the user to see before the first step."""
        limit = self.cfg.data.max_prompt_tokens
        sets = {"data.train": self.train} | ({"data.validation": self.validation} if self.validation else {})
        dropped = {name: data.dropped for name, data in sets.items() if data.dropped}
        left_out = [f"{name}: {n} prompts over {limit} tokens left out" for name, n in dropped.items()]
        return [*self.tokenizer.notes, *left_out]

    def rollout(self, step: int, on_sample: Callable[[Sample], None]) -> tuple[Rollout, dict[str, float]]:
        batch, sampling = self.cfg.batch, self.cfg.rollout.sampling
        prompts = self.train.prompts_for_step(step, batch.prompts_per_step, self.cfg.run.seed)
        params = SamplingParams(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_new_tokens,
            sampling.stop,
            sampling.stop_token_ids,
        )
        samples = self._samples(prompts, batch.samples_per_prompt, step, params, on_sample)
        save_samples(self.run_dir, f"step_{step}", samples)
        return collate(step, samples), sample_metrics(samples)

    def validate(self, step: int, on_sample: Callable[[Sample], None]) -> dict[str, float]:
        """Mean scores of the first `validation.prompts` held-out rows, one sample each."""
        assert self.validation is not None
        cfg, sampling = self.cfg.validation, self.cfg.rollout.sampling
        params = SamplingParams(
            temperature=cfg.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
        )
        samples = self._samples(self.validation.first(cfg.prompts), 1, step + VALIDATION_STREAM, params, on_sample)
        save_samples(self.run_dir, f"validation_step_{step}", samples)
        metrics = sample_metrics(samples)
        return {f"validation/{name.removeprefix('reward/')}": value for name, value in metrics.items()}

    def _samples(
        self,
        prompts: list[Prompt],
        per_prompt: int,
        stream: int,
        params: SamplingParams,
        on_sample: Callable[[Sample], None],
    ) -> list[Sample]:
        requests = [
            Request(g * per_prompt + k, g, prompt, sample_seed(self.cfg.run.seed, stream, g * per_prompt + k))
            for g, prompt in enumerate(prompts)
            for k in range(per_prompt)
        ]

        def finished(sample: Sample) -> None:
            sample.response_text = self.tokenizer.decode(sample.response_ids)
            self.rewards.submit(sample)
            on_sample(sample)

        samples = self.engine.generate(requests, params, finished)
        self.rewards.collect(samples)
        return samples


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    """Means over the samples: the score, its parts, length in tokens, share cut off by max_new_tokens."""
    n = len(samples)
    metrics = {
        "reward/mean": sum(s.score for s in samples) / n,
        "response/mean_tokens": sum(len(s.response_ids) for s in samples) / n,
        "response/truncated": sum(s.finish_reason == "length" for s in samples) / n,
    }
    for name in sorted({part for s in samples for part in s.score_parts} - {"score"}):
        metrics[f"reward/{name}"] = sum(s.score_parts.get(name, 0.0) for s in samples) / n
    return metrics
