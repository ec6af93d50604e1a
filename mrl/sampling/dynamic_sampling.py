"""Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others generated for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrl.config.schema import FilterGroupsConfig
from mrl.core import Sample
from mrl.observe import sample_row
from mrl.reward.loading import load_file
from mrl.sampling.scheduler import GenerateGroup, Group, GroupNumber, StepSamples

Verdict = Literal["kept", "equal", "refused"]
KEY = "algorithm.filter_groups"


class SamplingError(RuntimeError):
    """A step did not get the groups that it needs, or the user's filter failed."""


class GroupFilter:
    """Passes a group unless all its responses have the same `metric`, or the user's function refuses it.

    The function gets the group as the list of dicts that RUN_DIR/rollouts holds (prompt, response, score, parts,
    tokens, finish_reason, row, ...) and returns whether to keep it. It runs in rank 0's own process.
    """

    def __init__(self, cfg: FilterGroupsConfig) -> None:
        self._cfg = cfg
        self._function: Callable[[list[dict[str, Any]]], object] | None = None
        if cfg.function is not None:
            self._function = load_file(cfg.function, f"{KEY}.function", ([],), "(group)")

    def __call__(self, group: Group) -> Verdict:
        if not group:  # all of it was left out
            return "equal"
        if self._cfg.enable and len({value_of(sample, self._cfg.metric, f"{KEY}.metric") for sample in group}) <= 1:
            return "equal"
        if self._function is None:
            return "kept"
        prompt = group[0].request.prompt
        where = (
            f"{KEY}.function {self._cfg.function!r} on the group of row {prompt.index} (prompt {prompt.text[:80]!r})"
        )
        try:
            answer = self._function([sample_row(sample) for sample in group])
        except Exception as error:
            raise SamplingError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise SamplingError(f"{where} must return True or False, got {answer!r}")
        return "kept" if answer else "refused"


def value_of(sample: Sample, name: str, key: str) -> float:
    """The score, or the component of the reward called `name`; 0 where the reward failed. key: who asks for it."""
    if name == "score" or sample.reward_error:
        return sample.score
    if name not in sample.score_parts:
        has = ", ".join(("score", *sorted(sample.score_parts)))
        number, row = sample.request.sample_id, sample.request.prompt.index
        raise ValueError(f"sample {number} (row {row}): its reward has no component {name!r} ({key}), only {has}")
    return sample.score_parts[name]


@dataclass(frozen=True)
class DynamicSampling:
    """Drops groups that teach nothing; each is replaced at once. The kept ones are the first that pass, by their index,
    so that short responses are not preferred to long ones.
    """

    wanted: int  # groups that a step trains on
    first: int  # groups that are generated at once, at least `wanted`
    cfg: FilterGroupsConfig
    judge: Callable[[Group], Verdict]  # of scored samples
    score: Callable[[Group], Awaitable[Group]]  # waits; returns the samples whose environment and reward did not fail
    is_sequential = keeps_groups = False

    async def draw(self, step: int, group: GenerateGroup) -> StepSamples:
        """Returns the step's groups. If `max_num_gen_batches` times `first` groups do not give enough, dropped groups
        fill the step, the first ones first, where `on_shortage` says so; otherwise raises SamplingError."""
        most = self.first * self.cfg.max_num_gen_batches
        tasks: list[asyncio.Task[tuple[Group, Verdict]]] = []
        found: dict[Verdict, dict[GroupNumber, Group]] = {"kept": {}, "equal": {}, "refused": {}}

        async def judged(index: int) -> tuple[Group, Verdict]:
            made = await group(step, index)
            verdict = await asyncio.to_thread(self.judge, await self.score(made))
            if verdict != "kept" and len(tasks) < most:
                start()
            return made, verdict

        def start() -> None:
            tasks.append(asyncio.create_task(judged(len(tasks))))

        for _ in range(min(self.first, most)):
            start()
        try:
            looked = 0
            while len(found["kept"]) < self.wanted and looked < len(tasks):
                made, verdict = await tasks[looked]
                found[verdict][step, looked] = made
                looked += 1
        finally:
            for task in tasks:
                task.cancel()
        kept, dropped = found["kept"], dict(sorted({**found["equal"], **found["refused"]}.items()))
        missing = self.wanted - len(kept)
        if missing > 0 and self.cfg.on_shortage == "stop":
            raise SamplingError(
                f"{looked} groups ({KEY}.max_num_gen_batches) gave {len(kept)} of the {self.wanted} groups of a step: "
                f"{len(found['equal'])} had the same {self.cfg.metric} in all responses and {len(found['refused'])} "
                f"were refused by the filter function. Allow more groups, take prompts of another difficulty, or set "
                f"{KEY}.on_shortage: fill"
            )
        filling = dict(list(dropped.items())[: max(0, missing)])
        others = {number: made for number, made in dropped.items() if number not in filling}
        return StepSamples(kept | filling, self._metrics(found, max(0, missing)), others, is_scored=True)

    def _metrics(self, found: dict[Verdict, dict[GroupNumber, Group]], filled: int) -> dict[str, float]:
        everything = [made for groups in found.values() for made in groups.values()]
        scores = [sample.score for made in everything for sample in made if not sample.left_out]
        mean = {"sampling/reward_mean": sum(scores) / len(scores)} if scores else {}
        return mean | {
            "sampling/prompts": len(everything),
            "sampling/dropped_equal": len(found["equal"]),
            "sampling/dropped_refused": len(found["refused"]),
            "sampling/filled": filled,
        }


def in_order(groups: list[Group]) -> list[Sample]:
    """The samples of these groups, numbered anew: groups from 0, samples from 0."""
    pairs = [(number, sample) for number, group in enumerate(groups) for sample in group]
    for place, (number, sample) in enumerate(pairs):
        sample.request = replace(sample.request, sample_id=place, group=number)
    return [sample for _, sample in pairs]
