"""Samples of a step: prompts -> engine -> rewards -> one Rollout. Engine and rewards live on rank 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.agents.runner import AgentRunner
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import prompts_per_round
from mrl.core import Prompt, Request, Rollout, Sample, SamplingParams
from mrl.data import PromptDataset, Tokenizer, collate, data_notes
from mrl.inference.engine import Engine
from mrl.inference.request_dispatcher import PromptGroup, by_prompt
from mrl.inference.seeds import sample_seed
from mrl.observe import ENGINES, LEFT_OUT, append_jsonl, sample_row, save_pictures, save_samples, write_guarded
from mrl.resilience.sections import section
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.sampling.dynamic_sampling import DynamicSampling, GroupFilter, SamplingError, in_order, value_of
from mrl.sampling.first_done import FirstDone
from mrl.sampling.partial_rollouts import PartialRollouts
from mrl.sampling.scheduler import Activity, Group, GroupNumber, Policy, Scheduler, StepSamples, WholeSteps
from mrl.trainers.rl.sample_metrics import load_metrics, sample_metrics, validation_metrics
from mrl.trainers.shared.checkpoints import Stateful

VALIDATION_STREAM = 1 << 40  # keeps validation seeds apart from every training step's
ROUND_STREAM = 1 << 41  # of the orders of the data in further rounds of dynamic sampling
MOST_TRUNCATED = 0.5  # of a step's responses; beyond it the run warns, once

OnSample = Callable[[Sample], None]


@dataclass
class Generator:
    """Rank 0's side: generates, scores while engines still work, and writes the samples down.

    scheduler: of the samples that steps train on, after `open_scheduler`
    on_sample: called in the main thread with each of them, as soon as that waits; is_active: with each, in any thread
    adapter: name of the adapter to sample with, where the run trains several, which share the engines
    """

    cfg: RLConfig
    run_dir: Path
    engine: Engine
    rewards: RewardManager
    note: Callable[[str], None]
    tokenizer: Tokenizer
    train: PromptDataset
    validation: PromptDataset | None
    agents: AgentRunner | None = None
    on_sample: OnSample = lambda sample: None
    is_active: Callable[[object], None] = lambda what: None
    adapter: str = ""
    _is_truncation_told: bool = field(default=False, init=False)

    def open_scheduler(self, activity: Activity) -> None:
        cfg, rollout = self.cfg, self.cfg.rollout
        self._policy = self._make_policy()
        self.scheduler = Scheduler(
            self.engine,
            self._policy,
            self._requests,
            self._sample,
            self.rewards.discard,
            has_greedy=cfg.algorithm.needs_greedy,
            steps=cfg.run.last_step,
            max_staleness=rollout.max_staleness,
            interrupt="never" if rollout.segment_tokens is not None else rollout.interrupt,
            give_weights=self.engine.pool.restarts.give_weights,
            activity=activity,
        )

    @property
    def kept(self) -> list[Stateful]:
        """State of the samples in flight, for checkpoints."""
        return [self.scheduler, *([self._policy] if isinstance(self._policy, PartialRollouts | FirstDone) else [])]

    def _make_policy(self) -> Policy:
        cfg, groups, rollout = self.cfg, self.cfg.algorithm.filter_groups, self.cfg.rollout
        wanted, members = cfg.batch.prompts_per_step, cfg.batch.samples_per_prompt
        in_flight = math.ceil(wanted * rollout.oversample)
        if rollout.segment_tokens is not None:
            own = rollout.segment_tokens, rollout.sampling.max_new_tokens, wanted, in_flight, members
            return PartialRollouts(*own, lambda group, member: self._requests(0, group)[member], self._segment)
        if rollout.interrupt == "at_step_end":
            return FirstDone(wanted, in_flight, wanted * cfg.run.last_step, max_age=None)
        if rollout.order == "first_done":  # with more in flight a step would have to wait for its oldest groups
            in_flight = math.ceil(wanted * (1 + rollout.max_staleness / 2))
            return FirstDone(wanted, in_flight, wanted * cfg.run.last_step, rollout.max_staleness)
        if groups.is_on:
            return DynamicSampling(wanted, prompts_per_round(cfg), groups, GroupFilter(groups), self._scored)
        return WholeSteps(wanted)

    def notes(self) -> list[str]:
        """Returns remarks on corrected or excluded data, for the user before the first step."""
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

    def step(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Waits for the step's samples, scores them and writes them down. Raises SamplingError."""
        algorithm, is_async = self.cfg.algorithm, self.cfg.rollout.max_staleness > 0
        if not (is_async or self.adapter):
            self.engine.take_loads()  # a validation's
        self.scheduler.wait(step)
        taken = self.scheduler.take(step)
        self._collect(taken)
        groups, metrics = self._present(taken, step)
        samples = in_order([*groups.values()])
        rollout = collate(step, samples)
        if algorithm.score_parts:
            rollout = replace(rollout, score_parts=_parts(samples, algorithm.score_parts))
        if self.cfg.teacher is not None:
            rollout = _with_sources(rollout, samples, self.cfg.data.data_source_key)
        greedy = [taken.greedy[number] for number in groups] if taken.greedy else []
        if missing := next((sample.left_out for sample in greedy if sample.left_out), ""):
            raise RewardError(f"algorithm.adv_estimator: remax needs the score of every greedy response: {missing}")
        if greedy:
            by_group = torch.tensor([sample.score for sample in greedy], dtype=torch.float32)
            rollout = replace(rollout, greedy_scores=by_group[rollout.group])
            metrics["sampling/greedy_reward_mean"] = float(by_group.mean())
        metrics = sample_metrics(samples) | metrics | ({} if self.adapter else self.load_metrics(step, self.run_dir))
        mixed = [{*versions.tolist()} for each in samples if (versions := each.token_weight_versions) is not None]
        if mixed:
            metrics["staleness/mixed"] = sum(len(each) > 1 for each in mixed) / len(mixed)
        unscored = [sample for group in taken.all for sample in group if sample.reward_error and sample.left_out]
        why = {"sample_id": None, "left_out": "the other samples of its group are left out, and an advantage needs two"}
        dropped = [group for number, group in taken.groups.items() if number not in groups]
        alone = [sample_row(sample) | why for group in dropped for sample in group if not sample.left_out]
        rows = [*map(sample_row, (*samples, *greedy, *unscored)), *alone]
        self._write_down(rows, f"step_{step + 1}")
        self._warn_of_truncation(step, metrics["response/truncated"])
        return rollout, metrics

    def load_metrics(self, step: int, run_dir: Path) -> dict[str, float]:
        """Writes the engines' loads since the last call to RUN_DIR/engines.jsonl, and returns their metrics."""
        loads, waiting = self.engine.take_loads()
        row = {
            "step": step + 1,
            "waiting": asdict(waiting),
            "engines": {url: asdict(each) for url, each in loads.items()},
        }
        file, on_error = run_dir / ENGINES, self.cfg.checkpoint.on_error
        write_guarded("the engines' loads", lambda: append_jsonl(file, row), on_error, self.note)
        metrics = load_metrics(list(loads.values()), waiting)
        if self.cfg.rollout.max_staleness and loads:  # since the step before took its samples
            metrics["perf/generate_s"] = max(load.seconds for load in loads.values())
        return metrics

    def _collect(self, taken: StepSamples) -> None:
        """Waits for the scores, unless the policy has."""
        sampled = [] if taken.is_scored else [sample for group in taken.all for sample in group]
        if self.cfg.rollout.segment_tokens is not None:
            for sample, text in zip(sampled, self.tokenizer.decode_all([sample.response_ids for sample in sampled])):
                sample.response_text = text
        with section("reward"):
            self.rewards.collect([sample for sample in (*sampled, *taken.greedy.values()) if not sample.left_out])

    def _warn_of_truncation(self, step: int, share: float) -> None:
        if share > MOST_TRUNCATED and not self._is_truncation_told:
            self._is_truncation_told = True
            self.note(
                f"step {step + 1}: {share:.0%} of the responses were cut at rollout.sampling."
                f"max_new_tokens = {self.cfg.rollout.sampling.max_new_tokens}. Raise it, or teach the model to end by "
                "reward.truncated_score"
            )

    def _present(self, taken: StepSamples, step: int) -> tuple[dict[GroupNumber, Group], dict[str, float]]:
        """Returns the groups that can be trained on, without samples whose environment or reward failed, and metrics.
        The only sample left of a group has nothing to be compared with. Raises SamplingError if no group is left."""
        cfg, every = self.cfg, [sample for group in taken.all for sample in group]
        found = [sample for sample in every if sample.left_out]
        present = {
            number: [sample for sample in group if not sample.left_out] for number, group in taken.groups.items()
        }
        unscored = [sample for sample in found if sample.reward_error]
        lost = [sample for sample in found if not sample.reward_error]
        metrics = dict(taken.metrics)
        if self.agents is not None:
            metrics["agent/left_out"] = float(len(lost))
        if cfg.reward.on_error == "leave_out" or unscored:
            metrics["reward/left_out"] = float(len(unscored))
            metrics["reward/failed"] = len(unscored) / max(1, len(every) - len(lost))
        if not (self.agents is not None or cfg.reward.on_error == "leave_out" or found):
            return present, metrics
        least = 2 if cfg.algorithm.compares_group and cfg.batch.samples_per_prompt > 1 else 1
        kept = {number: group for number, group in present.items() if len(group) >= least}
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
        return kept, metrics

    # ---- the dispatcher's event loop

    def _requests(self, step: int, index: int) -> list[Request]:
        """Returns the requests of group `index` of a step; for -1 - index, the one of its greedy response. Dynamic
        sampling continues with the prompts that the step has in another order of the data."""
        cfg, n, first = self.cfg, self.cfg.batch.samples_per_prompt, prompts_per_round(self.cfg)
        if index < 0:
            [sampled, *_] = self._requests(step, -1 - index)
            number = cfg.batch.prompts_per_step * n - 1 - index
            return [replace(sampled, sample_id=number, seed=sample_seed(cfg.run.seed, step, number))]
        if not cfg.algorithm.filter_groups.is_on:  # groups are numbered over the whole run
            more, index = divmod(index, first)
            step += more
        number, place = divmod(index, first)
        seed = cfg.run.seed if number == 0 else sample_seed(cfg.run.seed, ROUND_STREAM, number)
        [prompt] = self.train.prompts_for_step(step * first + place, 1, seed)
        return [
            Request(i, index, prompt, sample_seed(cfg.run.seed, step, i)) for i in range(index * n, (index + 1) * n)
        ]

    async def _sample(self, request: Request, group: PromptGroup, is_greedy: bool) -> Sample:
        params = self._unfiltered(0.0) if is_greedy else self.sampling_params()
        sample = await self._generated(request, group, params, is_background=self.cfg.rollout.is_behind)
        if not is_greedy:
            self.engine.dispatcher.post(lambda: self.on_sample(sample))
        return sample

    async def _generated(
        self, request: Request, group: PromptGroup, params: SamplingParams, *, is_background: bool = False
    ) -> Sample:
        """Returns a sample whose scoring has begun."""
        is_interruptible = is_background and self.cfg.rollout.interrupt != "never"

        async def generate(request: Request, params: SamplingParams) -> Sample:
            how = self.engine.generation(
                params, is_background=is_background, is_interruptible=is_interruptible, adapter=self.adapter
            )
            sample = await self.engine.dispatcher.generate(request, how, None if self.agents else group)
            self.is_active(sample)
            return sample

        if self.agents is not None:
            sample = await self.agents.play(request, params, generate)
            self.is_active(sample)
        else:
            sample = await generate(request, params)
            [sample.response_text] = self.tokenizer.decode_all([sample.response_ids])
        if not sample.left_out:
            self.rewards.submit(sample)
        return sample

    async def _segment(self, request: Request, tokens: int) -> Sample:
        params = replace(self.sampling_params(), max_new_tokens=tokens)
        how = self.engine.generation(params, is_background=True)
        sample = await self.engine.dispatcher.generate(request, how)
        self.is_active(sample)
        return sample

    async def _scored(self, group: Group) -> Group:
        """Waits for the scores of a group of dynamic sampling. A reward model is run by all ranks, from the main
        thread."""
        samples = [sample for sample in group if not sample.left_out]
        if self.cfg.reward.model is not None:
            await self.engine.dispatcher.in_main(lambda: self.rewards.collect(samples))
        else:
            await asyncio.to_thread(self.rewards.collect, samples)
        return [sample for sample in samples if not sample.left_out]

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
        lost = [sample.left_out for sample in samples if sample.left_out and not sample.reward_error]
        if lost:  # `_write_down` notes failures of the reward
            said = f"{name}: {len(lost)} of {len(samples)} responses have no score (rollouts/{file}.jsonl): "
            self.note(said + lost[0].splitlines()[0])
        if "mean" not in metrics:
            raise SamplingError(f"{name}: none of {len(samples)} responses has a score (rollouts/{file}.jsonl)")
        return {f"{name}/{metric}": value for metric, value in metrics.items()}

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of training samples. They end at the tokenizer's EOS too: the model's own configuration
        may name another one."""
        cfg = self.cfg.rollout.sampling
        stop_ids = (*cfg.stop_token_ids, self.tokenizer.eos_id)
        experts = self.cfg.actor.routing_replay == "engine"
        return SamplingParams(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens, cfg.stop, stop_ids, experts)

    def _unfiltered(self, temperature: float) -> SamplingParams:
        return replace(
            self.sampling_params(), temperature=temperature, top_p=1.0, top_k=-1, return_routed_experts=False
        )

    def _samples(
        self, prompts: list[Prompt], per_prompt: int, stream: int, params: SamplingParams, on_sample: OnSample
    ) -> list[Sample]:
        """Returns scored samples with nothing else in flight. stream: of their seeds"""
        seed = self.cfg.run.seed
        asked = [(i, prompts[i // per_prompt]) for i in range(len(prompts) * per_prompt)]
        requests = [Request(i, i // per_prompt, prompt, sample_seed(seed, stream, i)) for i, prompt in asked]

        async def one(request: Request, group: PromptGroup) -> Sample:
            sample = await self._generated(request, group, params)
            self.engine.dispatcher.post(lambda: on_sample(sample))
            return sample

        async def every() -> list[Sample]:
            groups = [(request, group) for group in by_prompt(requests) for request in group.requests]
            return await asyncio.gather(*(one(request, group) for request, group in groups))

        samples = self.engine.run(every())
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


def _with_sources(rollout: Rollout, samples: list[Sample], key: str) -> Rollout:
    """The rollout with the data source of each sample, "" for rows without one."""
    found = ["" if (source := sample.request.prompt.row.get(key)) is None else str(source) for sample in samples]
    names = sorted(set(found))
    return replace(rollout, sources=torch.tensor([names.index(name) for name in found]), source_names=tuple(names))


def _parts(samples: list[Sample], names: Sequence[str]) -> Tensor:
    rows = [[value_of(sample, name, "algorithm.gdpo_reward_keys") for name in names] for sample in samples]
    return torch.tensor(rows, dtype=torch.float32)
