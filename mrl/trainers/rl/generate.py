"""Samples of a step: prompts -> engine -> rewards -> one Rollout on every rank. Engine and rewards live on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import prompts_per_round
from mrl.core import Prompt, Request, Rollout, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, collate, data_notes
from mrl.observe import save_samples, write_down
from mrl.resilience.sections import section
from mrl.reward import RewardManager
from mrl.rollout import Engine, sample_seed
from mrl.trainers.rl.groups import Group, GroupFilter, in_order, sample_groups, value_of
from mrl.trainers.shared.world import World

VALIDATION_STREAM = 1 << 40  # keeps validation seeds apart from every training step's
ROUND_STREAM = 1 << 41  # of the orders of the data in further rounds of dynamic sampling

OnSample = Callable[[Sample], None]
Sampled = tuple[Rollout, dict[str, float]]  # a step's samples, and metrics


def when_asked(work: Callable[[], Sampled]) -> Callable[[], Sampled]:
    """Nothing is begun before somebody waits for it."""
    return work


@dataclass(frozen=True)
class Sampler:
    """A step's samples for every rank. `start` returns at once on each; `Pending.result` is where they meet, and where
    what rank 0 does is watched (the pulse, the section) and its errors become everybody's.

    make: rank 0's own work, the samples of a step. It may ask all ranks for `together`.
    together: as in `World.from_main`
    control: on every rank, once a step, of what its samples have become: `ScoreControl`
    begin: takes the work on rank 0 in `start`, and gives what waits for its result in `result`. By default the work is
        done there, in the main thread: an interrupt ends it, and `make` may do all that it likes. One that begins it in
        a thread lets the ranks compute meanwhile; until `result`, `make` must then not ask for `together`, enter a
        section or write to the recorder, as the ranks are elsewhere.
    """

    world: World
    make: Callable[[int], Sampled]
    together: Callable[[Any], object]
    control: Callable[[Rollout], Sampled]
    begin: Callable[[Callable[[], Sampled]], Callable[[], Sampled]] = when_asked

    def start(self, step: int) -> Pending:
        """The samples of step `step` (from 0), drawn with the weights that the engines have. Not collective."""

        def work() -> Sampled:
            return self.make(step)

        return Pending(self, self.begin(work) if self.world.is_main else work)


class Pending:
    """Samples that have been asked for. wait: rank 0's, their making or what waits for it."""

    def __init__(self, sampler: Sampler, wait: Callable[[], Sampled]) -> None:
        self._sampler, self._wait = sampler, wait
        self._found: Sampled | None = None

    def result(self) -> Sampled:
        """The step's samples with their controlled scores, and metrics, the same on every rank. Collective the first
        time; raises RankZeroError on every rank if rank 0's work failed."""
        if self._found is None:
            sampler = self._sampler
            rollout, metrics = sampler.world.from_main("rollout", self._wait, sampler.together)
            rollout, controlled = sampler.control(rollout)
            self._found = rollout, metrics | controlled
        return self._found


@dataclass
class Generator:
    """Rank 0's side: draws prompts, samples, scores while the engine still works, and writes the samples down."""

    cfg: RLConfig
    run_dir: Path
    engine: Engine
    rewards: RewardManager
    note: Callable[[str], None]
    tokenizer: Tokenizer
    train: PromptDataset
    validation: PromptDataset | None

    def __post_init__(self) -> None:
        groups = self.cfg.algorithm.filter_groups
        self._filter = GroupFilter(groups) if groups.is_on else None

    def notes(self) -> list[str]:
        """What was corrected or left out of the data, for the user to see before the first step."""
        sets = {"data.train": self.train} | ({"data.validation": self.validation} if self.validation else {})
        return data_notes(self.tokenizer, sets)

    def rollout(self, step: int, on_sample: OnSample) -> Sampled:
        """The step's samples, as its rollout and as metrics. Raises SamplingError."""
        algorithm = self.cfg.algorithm
        groups, metrics = self._groups(step, on_sample)
        samples = in_order(groups)
        rollout = collate(step, samples)
        if algorithm.score_parts:
            rollout = replace(rollout, score_parts=_parts(samples, algorithm.score_parts))
        greedy = self._greedy(groups, step, on_sample) if algorithm.needs_greedy else []
        if greedy:
            by_group = torch.tensor([sample.score for sample in greedy], dtype=torch.float32)
            rollout = replace(rollout, greedy_scores=by_group[rollout.group])
            metrics["sampling/greedy_reward_mean"] = float(by_group.mean())
        self._write_down([*samples, *greedy], f"step_{step}")
        return rollout, sample_metrics(samples) | metrics

    def _groups(self, step: int, on_sample: OnSample) -> tuple[list[Group], dict[str, float]]:
        """The responses to each prompt of the step, and metrics of how they were found."""
        cfg, n = self.cfg, self.cfg.batch.samples_per_prompt

        def sample_round(number: int) -> list[Group]:
            """A further round takes the step's prompts of another order of the data."""
            seed = cfg.run.seed if number == 0 else sample_seed(cfg.run.seed, ROUND_STREAM, number)
            prompts = self.train.prompts_for_step(step, prompts_per_round(cfg), seed)
            before = number * len(prompts) * n
            samples = self._samples(prompts, n, step, self._params(), on_sample, before)
            return [samples[i : i + n] for i in range(0, len(samples), n)]

        if self._filter is None:
            return sample_round(0), {}
        return sample_groups(cfg.batch.prompts_per_step, cfg.algorithm.filter_groups, self._filter, sample_round)

    def _greedy(self, groups: list[Group], step: int, on_sample: OnSample) -> list[Sample]:
        """One greedy response to each group's prompt. In a call of its own: a greedy row among others makes SGLang draw
        those in another way, so that their tokens would depend on what is in the batch."""
        prompts, before = [group[0].request.prompt for group in groups], sum(map(len, groups))
        return self._samples(prompts, 1, step, self._unfiltered(0.0), on_sample, before)

    def validate(self, step: int, on_sample: OnSample, name: str) -> dict[str, float]:
        """Mean scores of the first `validation.prompts` held-out rows, one sample each; named NAME/..."""
        assert self.validation is not None
        cfg = self.cfg.validation
        prompts, params = self.validation.first(cfg.prompts), self._unfiltered(cfg.temperature)
        samples = self._samples(prompts, 1, step + VALIDATION_STREAM, params, on_sample)
        self._write_down(samples, f"{name}_step_{step}")
        metrics = sample_metrics(samples)
        return {f"{name}/{metric.removeprefix('reward/')}": value for metric, value in metrics.items()}

    def _params(self) -> SamplingParams:
        """Samples end at the tokenizer's EOS too: the model's own configuration may name another one."""
        cfg = self.cfg.rollout.sampling
        stop_ids = (*cfg.stop_token_ids, self.tokenizer.eos_id)
        return SamplingParams(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens, cfg.stop, stop_ids)

    def _unfiltered(self, temperature: float) -> SamplingParams:
        return replace(self._params(), temperature=temperature, top_p=1.0, top_k=-1)

    def _samples(
        self,
        prompts: list[Prompt],
        per_prompt: int,
        stream: int,
        params: SamplingParams,
        on_sample: OnSample,
        before: int = 0,
    ) -> list[Sample]:
        """before: how many samples of this stream there are already; numbers and seeds go on from there."""
        asked = [(before + i, prompts[i // per_prompt]) for i in range(len(prompts) * per_prompt)]
        seed = self.cfg.run.seed
        requests = [Request(i, i // per_prompt, prompt, sample_seed(seed, stream, i)) for i, prompt in asked]

        def finished(some: list[Sample]) -> None:
            for sample, text in zip(some, self.tokenizer.decode_all([sample.response_ids for sample in some])):
                sample.response_text = text
                self.rewards.submit(sample)
                on_sample(sample)

        samples = self.engine.generate(requests, params, finished)
        with section("reward"):
            self.rewards.collect(samples)
        return samples

    def _write_down(self, samples: list[Sample], name: str) -> None:
        file, on_error = f"rollouts/{name}.jsonl", self.cfg.checkpoint.on_error
        write_down(file, lambda: save_samples(self.run_dir, name, samples), on_error, self.note)
        failed = [sample.reward_error for sample in samples if sample.reward_error]
        if failed:
            head, *more = failed[0].splitlines()
            first = " ".join([head, *more[-1:]])  # of a traceback the last line
            where = (
                f"{len(failed)} of {len(samples)} samples score 0, the reward failed on them ({self.run_dir / file})"
            )
            self.note(f"{where}: {first}")


def _parts(samples: list[Sample], names: Sequence[str]) -> Tensor:
    rows = [[value_of(sample, name, "algorithm.gdpo_reward_keys") for name in names] for sample in samples]
    return torch.tensor(rows, dtype=torch.float32)


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    """Means over the samples: the score, length in tokens, share cut off by max_new_tokens, share that scored 0 because
    a reward failed on it; and of each part of the score over the samples that have it."""
    n = len(samples)
    metrics = {
        "reward/mean": sum(s.score for s in samples) / n,
        "response/mean_tokens": sum(len(s.response_ids) for s in samples) / n,
        "response/truncated": sum(s.finish_reason == "length" for s in samples) / n,
        "reward/failed": sum(bool(s.reward_error) for s in samples) / n,
    }
    for name in sorted({part for s in samples for part in s.score_parts} - {"score"}):
        values = [s.score_parts[name] for s in samples if name in s.score_parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics
