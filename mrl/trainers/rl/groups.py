"""Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled for them.

Every round is sampled to its end before a group is looked at, so that short responses are not preferred to long ones.
What is kept depends on the samples alone: the first groups that pass, in the order of their prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mrl.config.schema import FilterGroupsConfig
from mrl.core import Sample
from mrl.observe import sample_row
from mrl.reward.loading import load_file

Group = list[Sample]
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
        return "kept" if self._function is None or self._ask(group) else "refused"

    def _ask(self, group: Group) -> bool:
        assert self._function is not None
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
        return answer


def value_of(sample: Sample, name: str, key: str) -> float:
    """The score, or the component of the reward called `name`; 0 where the reward failed. key: who asks for it."""
    if name == "score" or sample.reward_error:
        return sample.score
    if name not in sample.score_parts:
        has = ", ".join(("score", *sorted(sample.score_parts)))
        number, row = sample.request.sample_id, sample.request.prompt.index
        raise ValueError(f"sample {number} (row {row}): its reward has no component {name!r} ({key}), only {has}")
    return sample.score_parts[name]


@dataclass
class _Tally:
    """What has become of the groups of a step, in the order in which they were sampled."""

    groups: dict[Verdict, list[Group]] = field(default_factory=lambda: {"kept": [], "equal": [], "refused": []})
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0

    def add(self, group: Group, verdict: Verdict) -> None:
        self.groups[verdict].append(group)
        if verdict != "kept":
            self.dropped.append(group)

    def metrics(self, wanted: int) -> dict[str, float]:
        kept, everything = len(self.groups["kept"]), [*self.groups["kept"], *self.dropped]
        scores = [sample.score for group in everything for sample in group]
        mean = {"sampling/reward_mean": sum(scores) / len(scores)} if scores else {}
        return mean | {
            "sampling/rounds": self.rounds,
            "sampling/prompts": len(everything),
            "sampling/dropped_equal": len(self.groups["equal"]),
            "sampling/dropped_refused": len(self.groups["refused"]),
            "sampling/surplus": max(0, kept - wanted),
            "sampling/filled": max(0, wanted - kept),
        }


def sample_groups(
    wanted: int, cfg: FilterGroupsConfig, judge: GroupFilter, sample_round: Callable[[int], list[Group]]
) -> tuple[list[Group], dict[str, float]]:
    """`wanted` groups that pass, and how they came about. sample_round(n) gives the groups of round n, from 0.

    After the last round dropped groups fill the step, the first ones first, where `on_shortage` says so; otherwise
    raises SamplingError.
    """
    tally = _Tally()
    while len(tally.groups["kept"]) < wanted and tally.rounds < cfg.max_num_gen_batches:
        for group in sample_round(tally.rounds):
            tally.add(group, judge(group))
        tally.rounds += 1
    kept, dropped = tally.groups["kept"], tally.dropped
    if len(kept) < wanted and cfg.on_shortage == "stop":
        equal, refused = len(tally.groups["equal"]), len(tally.groups["refused"])
        raise SamplingError(
            f"{tally.rounds} rounds ({KEY}.max_num_gen_batches) gave {len(kept)} of the {wanted} groups of a step: of "
            f"{len(kept) + len(dropped)}, {equal} had the same {cfg.metric} in all responses and {refused} were "
            f"refused by the filter function. Allow more rounds or prompts a round, take prompts of another "
            f"difficulty, or set {KEY}.on_shortage: fill"
        )
    return [*kept, *dropped][:wanted], tally.metrics(wanted)


def in_order(groups: list[Group]) -> list[Sample]:
    """The samples of these groups, numbered anew: groups from 0, samples from 0."""
    pairs = [(number, sample) for number, group in enumerate(groups) for sample in group]
    for place, (number, sample) in enumerate(pairs):
        sample.request = replace(sample.request, sample_id=place, group=number)
    return [sample for _, sample in pairs]
