"""Samples of a step: prompts -> engine -> rewards -> one Rollout. Engine and rewards live on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.agents.runner import AgentRunner
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import prompts_per_round
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, collate, data_notes
from mrl.observe import ENGINES, LEFT_OUT, append_jsonl, sample_row, save_pictures, save_samples, write_guarded
from mrl.resilience.sections import section
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.rollout import Engine, RequestQueue, sample_seed
from mrl.trainers.rl.groups import Group, GroupFilter, SamplingError, in_order, sample_groups, value_of
from mrl.trainers.rl.sample_metrics import load_metrics, sample_metrics, validation_metrics
from mrl.trainers.rl.sampler import Drawn, Sampled
from mrl.trainers.rl.segments import Segments
from mrl.trainers.rl.under_way import OnSamples, UnderWay

VALIDATION_STREAM = 1 << 40  # keeps validation seeds apart from every training step's
ROUND_STREAM = 1 << 41  # of the orders of the data in further rounds of dynamic sampling
MOST_TRUNCATED = 0.5  # of a step's responses; beyond it the run warns, once

OnSample = Callable[[Sample], None]


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
    agents: AgentRunner | None = None
    segments: Segments | None = None
    under_way: UnderWay | None = None
    is_active: Callable[[object], None] = lambda what: None  # called when something has come, in any thread
    _is_truncation_told: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        groups = self.cfg.algorithm.filter_groups
        self._filter = GroupFilter(groups) if groups.is_on else None
        self._left_out: list[Sample] = []  # of the step
        self._looked_at = 0  # samples of the step, those that are left out included

    def notes(self) -> list[str]:
        """What was corrected or left out of the data, for the user to see before the first step."""
        sets = {"data.train": self.train} | ({"data.validation": self.validation} if self.validation else {})
        notes = data_notes(self.tokenizer, sets)
        if self.validation is not None:
            rows, each = (
                sum(len(source.rows) for source in self.validation.sources),
                self.cfg.validation.samples_per_prompt,
            )
            responses = f", {each} responses to each" if each > 1 else ""
            notes.append(f"validation: {len(self.validated)} of {rows} prompts{responses}")
        return notes

    @property
    def validated(self) -> list[Prompt]:
        """The prompts of a validation."""
        return self.validation.first(self.cfg.validation.prompts) if self.validation is not None else []

    def draw(self, step: int, on_sample: OnSample) -> Drawn:
        """The step's samples, with their scores. Raises SamplingError."""
        algorithm = self.cfg.algorithm
        if self.under_way is None:
            self.engine.take_loads()  # a validation's
        self._looked_at = 0
        groups, metrics = self._groups(step, on_sample)
        left_out = self._left_out
        if self.agents is not None or self.cfg.reward.on_error == "leave_out" or left_out:
            groups, counts = self._without(groups, step)
            metrics |= counts
        unscored = [sample for sample in left_out if sample.reward_error]
        samples = in_order(groups)
        rollout = collate(step, samples)
        if algorithm.score_parts:
            rollout = replace(rollout, score_parts=_parts(samples, algorithm.score_parts))
        greedy = self._greedy(groups, step, on_sample) if algorithm.needs_greedy else []
        if missing := next((sample.left_out for sample in greedy if sample.left_out), ""):
            raise RewardError(f"algorithm.adv_estimator: remax needs the score of every greedy response: {missing}")
        if greedy:
            by_group = torch.tensor([sample.score for sample in greedy], dtype=torch.float32)
            rollout = replace(rollout, greedy_scores=by_group[rollout.group])
            metrics["sampling/greedy_reward_mean"] = float(by_group.mean())
        loads, waiting = self.engine.take_loads()
        of_each = {url: asdict(each) for url, each in loads.items()}
        metrics |= load_metrics(list(loads.values()), waiting)
        if self.under_way is not None and loads:  # since the step before took its samples
            metrics["perf/generate_s"] = max(load.seconds for load in loads.values())
        return Drawn(
            rollout,
            sample_metrics(samples) | metrics,
            [sample_row(sample) for sample in (*samples, *greedy, *unscored)],
            {"step": step + 1, "waiting": asdict(waiting), "engines": of_each},
        )

    def write(self, drawn: Drawn) -> Sampled:
        """Writes the samples of a step down, and what the engines had to do for them; gives its rollout and metrics."""
        self._write_down(drawn.rows, f"step_{drawn.rollout.step + 1}")
        cut = drawn.metrics["response/truncated"]
        if cut > MOST_TRUNCATED and not self._is_truncation_told:
            self._is_truncation_told = True
            self.note(
                f"step {drawn.rollout.step + 1}: {cut:.0%} of the responses were cut at rollout.sampling."
                f"max_new_tokens = {self.cfg.rollout.sampling.max_new_tokens}. Raise it, or teach the model to end by "
                "reward.truncated_score"
            )
        file, on_error = self.run_dir / ENGINES, self.cfg.checkpoint.on_error
        write_guarded("the engines' loads", lambda: append_jsonl(file, drawn.loads), on_error, self.note)
        return drawn.rollout, drawn.metrics

    def _groups(self, step: int, on_sample: OnSample) -> tuple[list[Group], dict[str, float]]:
        """The responses to each prompt of the step, and metrics of how they were found."""
        cfg, n = self.cfg, self.cfg.batch.samples_per_prompt

        def sample_round(number: int) -> list[Group]:
            """A further round takes the step's prompts of another order of the data."""
            seed = cfg.run.seed if number == 0 else sample_seed(cfg.run.seed, ROUND_STREAM, number)
            prompts = self.train.prompts_for_step(step, prompts_per_round(cfg), seed)
            before = number * len(prompts) * n
            samples = self._samples(prompts, n, step, self.sampling_params(), on_sample, before)
            return [self._present(samples[i : i + n]) for i in range(0, len(samples), n)]

        if self.segments is not None:
            return self._segmented(step, self.segments, on_sample)
        if self.under_way is not None:
            return self._taken(self.under_way, on_sample)
        if self._filter is None:
            return sample_round(0), {}
        return sample_groups(cfg.batch.prompts_per_step, cfg.algorithm.filter_groups, self._filter, sample_round)

    def _present(self, samples: list[Sample]) -> list[Sample]:
        """Those whose environment and reward have not failed."""
        self._left_out += [sample for sample in samples if sample.left_out]
        self._looked_at += len(samples)
        return [sample for sample in samples if not sample.left_out]

    def _without(self, groups: list[Group], step: int) -> tuple[list[Group], dict[str, float]]:
        """The groups that can be learnt from, and metrics: of what is left of a group, one alone compares with nothing.
        Raises SamplingError if there is none."""
        cfg, found = self.cfg, self._left_out
        self._left_out = []
        least = 2 if cfg.algorithm.compares_group and cfg.batch.samples_per_prompt > 1 else 1
        kept = [group for group in groups if len(group) >= least]
        unscored = [sample for sample in found if sample.reward_error]
        lost = [sample for sample in found if not sample.reward_error]
        if lost:
            file, on_error = self.run_dir / LEFT_OUT, cfg.checkpoint.on_error
            row = {"step": step + 1, "left_out": [sample.left_out for sample in lost]}
            write_guarded(LEFT_OUT, lambda: append_jsonl(file, row), on_error, self.note)
            first = lost[0].left_out.partition("\n")[0]
            self.note(f"{len(lost)} samples are left out (agent.on_error; all of each in {file}): {first}")
        if not kept:
            keys = [key for key, some in (("agent", lost), ("reward", unscored)) if some]
            why = f"{' and '.join(f'{key}.on_error' for key in keys)}: leave_out); the first: {found[0].left_out}"
            raise SamplingError(f"no group of the step is left to learn from ({why}")
        metrics = {} if self.agents is None else {"agent/left_out": float(len(lost))}
        if cfg.reward.on_error == "leave_out" or unscored:
            metrics["reward/left_out"] = float(len(unscored))
            metrics["reward/failed"] = len(unscored) / (self._looked_at - len(lost))
        return kept, metrics

    def request(self, group: int, member: int) -> Request:
        """Of a group of the run, whatever step it is learnt in."""
        cfg = self.cfg
        [prompt] = self.train.prompts_for_step(group, 1, cfg.run.seed)
        step, place = divmod(group, cfg.batch.prompts_per_step)
        number = place * cfg.batch.samples_per_prompt + member
        return Request(number, place, prompt, sample_seed(cfg.run.seed, step, number))

    def _segmented(self, step: int, segments: Segments, on_sample: OnSample) -> tuple[list[Group], dict[str, float]]:
        params = self.sampling_params()

        def generate(requests: list[Request], tokens: int) -> list[Sample]:
            return self.engine.generate(requests, replace(params, max_new_tokens=tokens), self.is_active)

        groups, metrics = segments.draw(step, generate)
        self._score(in_order(groups), on_sample)
        return [self._present(group) for group in groups], metrics

    def draw_under_way(self, queue: RequestQueue, on_samples: OnSamples) -> None:
        """Samples the requests of the queue, as they finish, each sample's scoring begun; in a thread."""

        def scored(some: list[Sample]) -> None:
            self.is_active(some)
            for sample in some:
                if not sample.left_out:
                    self.rewards.submit(sample)
            on_samples(some)

        def finished(some: list[Sample]) -> None:
            self._decode(some)
            scored(some)

        if self.agents is not None:
            generate = partial(self.engine.generate, on_samples=self.is_active, over_pushes=True)
            return self.agents.play(queue.take, self.sampling_params(), generate, scored)
        self.engine.follow(queue, self.sampling_params(), finished)

    def numbered(self, group: int, member: int) -> Request:
        """As `request`, by its numbers in the run."""
        return replace(
            self.request(group, member), sample_id=group * self.cfg.batch.samples_per_prompt + member, group=group
        )

    def _taken(self, under_way: UnderWay, on_sample: OnSample) -> tuple[list[Group], dict[str, float]]:
        taken, metrics = under_way.take()
        samples = [sample for group in taken for sample in group if not sample.left_out]
        for sample in samples:
            on_sample(sample)
        with section("reward"):
            self.rewards.collect(samples)
        return [self._present(group) for group in taken], metrics

    def _decode(self, samples: list[Sample]) -> None:
        for sample, text in zip(samples, self.tokenizer.decode_all([sample.response_ids for sample in samples])):
            sample.response_text = text

    def _score(self, samples: list[Sample], on_sample: OnSample) -> None:
        self._decode(samples)
        for sample in samples:
            self.rewards.submit(sample)
            on_sample(sample)
        with section("reward"):
            self.rewards.collect(samples)

    def _greedy(self, groups: list[Group], step: int, on_sample: OnSample) -> list[Sample]:
        """One greedy response to each group's prompt. In a call of its own: a greedy row among others makes SGLang draw
        those in another way, so that their tokens would depend on what is in the batch."""
        prompts, before = [group[0].request.prompt for group in groups], sum(map(len, groups))
        return self._samples(prompts, 1, step, self._unfiltered(0.0), on_sample, before)

    def validate(self, step: int, on_sample: OnSample, name: str) -> dict[str, float]:
        """Mean scores of held-out prompts, named NAME/..., and of how many responses they are. Raises SamplingError if
        none has a score."""
        cfg, reward = self.cfg.validation, self.cfg.reward
        params = replace(self._unfiltered(cfg.temperature), top_p=cfg.top_p, top_k=cfg.top_k)
        samples = self._samples(self.validated, cfg.samples_per_prompt, step + VALIDATION_STREAM, params, on_sample)
        file = f"{name}_step_{step}"
        self._write_down([sample_row(sample) for sample in samples], file)
        on_error = self.cfg.checkpoint.on_error
        write_guarded("rollouts/pictures", lambda: save_pictures(self.run_dir, samples), on_error, self.note)
        metrics = validation_metrics(samples, reward.on_error == "zero", self.cfg.data.data_source_key)
        without = [sample for sample in samples if sample.left_out]
        if without:
            first = without[0].left_out.splitlines()
            said = f"{name}: {len(without)} of {len(samples)} responses have no score (rollouts/{file}.jsonl): "
            self.note(said + first[0])
        if "mean" not in metrics:
            raise SamplingError(f"{name}: none of {len(samples)} responses has a score (rollouts/{file}.jsonl)")
        return {f"{name}/{metric}": value for metric, value in metrics.items()}

    def sampling_params(self) -> SamplingParams:
        """Of samples that are learnt from. They end at the tokenizer's EOS too: the model's own configuration may name
        another one."""
        cfg = self.cfg.rollout.sampling
        stop_ids = (*cfg.stop_token_ids, self.tokenizer.eos_id)
        experts = self.cfg.actor.routing_replay == "engine"
        return SamplingParams(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens, cfg.stop, stop_ids, experts)

    def _unfiltered(self, temperature: float) -> SamplingParams:
        return replace(
            self.sampling_params(), temperature=temperature, top_p=1.0, top_k=-1, return_routed_experts=False
        )

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

        def scored(some: list[Sample]) -> None:
            self.is_active(some)
            for sample in some:
                if not sample.left_out:
                    self.rewards.submit(sample)
                on_sample(sample)

        def finished(some: list[Sample]) -> None:
            self._decode(some)
            scored(some)

        if self.agents is not None:
            generate = partial(self.engine.generate, on_samples=self.is_active)
            samples = self.agents.sample(requests, params, generate, scored)
        else:
            samples = self.engine.generate(requests, params, finished)
        with section("reward"):
            self.rewards.collect([sample for sample in samples if not sample.left_out])
        return samples

    def _write_down(self, rows: list[dict[str, Any]], name: str) -> None:
        file, on_error = f"rollouts/{name}.jsonl", self.cfg.checkpoint.on_error
        write_guarded(file, lambda: save_samples(self.run_dir, name, rows), on_error, self.note)
        failed = [row["reward_error"] for row in rows if "reward_error" in row]
        if failed:
            head, *more = failed[0].splitlines()
            first = " ".join([head, *more[-1:]])  # of a traceback the last line
            what = "score 0" if self.cfg.reward.on_error == "zero" else "are left out"
            where = f"{len(failed)} of {len(rows)} samples {what}, the reward failed on them ({self.run_dir / file})"
            self.note(f"{where}: {first}")


def _parts(samples: list[Sample], names: Sequence[str]) -> Tensor:
    rows = [[value_of(sample, name, "algorithm.gdpo_reward_keys") for name in names] for sample in samples]
    return torch.tensor(rows, dtype=torch.float32)
