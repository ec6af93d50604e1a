"""Samples of a step: prompts -> engine -> rewards -> one Rollout on every rank. Engine and rewards live on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema import RLConfig
from mrl.core import Prompt, Request, Rollout, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, collate, data_notes
from mrl.observe import save_samples
from mrl.resilience.sections import section
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
    note: Callable[[str], None]
    tokenizer: Tokenizer
    train: PromptDataset
    validation: PromptDataset | None

    def notes(self) -> list[str]:
        """What was corrected or left out of the data, for the user to see before the first step."""
        sets = {"data.train": self.train} | ({"data.validation": self.validation} if self.validation else {})
        return data_notes(self.tokenizer, sets)

    def rollout(self, step: int, on_sample: Callable[[Sample], None]) -> tuple[Rollout, dict[str, float]]:
        batch, sampling = self.cfg.batch, self.cfg.rollout.sampling
        prompts = self.train.prompts_for_step(step, batch.prompts_per_step, self.cfg.run.seed)
        params = SamplingParams(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_new_tokens,
            sampling.stop,
            self._stop_token_ids,
        )
        samples = self._samples(prompts, batch.samples_per_prompt, step, params, on_sample)
        self._write_down(samples, f"step_{step}")
        return collate(step, samples), sample_metrics(samples)

    def validate(self, step: int, on_sample: Callable[[Sample], None]) -> dict[str, float]:
        """Mean scores of the first `validation.prompts` held-out rows, one sample each."""
        assert self.validation is not None
        cfg, sampling = self.cfg.validation, self.cfg.rollout.sampling
        params = SamplingParams(
            temperature=cfg.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop=sampling.stop,
            stop_token_ids=self._stop_token_ids,
        )
        samples = self._samples(self.validation.first(cfg.prompts), 1, step + VALIDATION_STREAM, params, on_sample)
        self._write_down(samples, f"validation_step_{step}")
        metrics = sample_metrics(samples)
        return {f"validation/{name.removeprefix('reward/')}": value for name, value in metrics.items()}

    @property
    def _stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's EOS too: the model's own configuration may name another one."""
        return (*self.cfg.rollout.sampling.stop_token_ids, self.tokenizer.eos_id)

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
        with section("reward"):
            self.rewards.collect(samples)
        return samples

    def _write_down(self, samples: list[Sample], name: str) -> None:
        file = save_samples(self.run_dir, name, samples)
        failed = [sample.reward_error for sample in samples if sample.reward_error]
        if failed:
            head, *more = failed[0].splitlines()
            first = " ".join([head, *more[-1:]])  # of a traceback the last line
            self.note(f"{len(failed)} of {len(samples)} samples score 0, the reward failed on them ({file}): {first}")


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    """Means over the samples: the score, its parts, length in tokens, share cut off by max_new_tokens, share that
    scored 0 because the reward function failed."""
    n = len(samples)
    metrics = {
        "reward/mean": sum(s.score for s in samples) / n,
        "response/mean_tokens": sum(len(s.response_ids) for s in samples) / n,
        "response/truncated": sum(s.finish_reason == "length" for s in samples) / n,
        "reward/failed": sum(bool(s.reward_error) for s in samples) / n,
    }
    for name in sorted({part for s in samples for part in s.score_parts} - {"score"}):
        metrics[f"reward/{name}"] = sum(s.score_parts.get(name, 0.0) for s in samples) / n
    return metrics
