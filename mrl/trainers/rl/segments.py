"""Responses drawn in segments: a long one does not hold up its step, it goes on in the next, by the next weights.

A request draws so many tokens at a time and goes on as prompt + what it has, with the seed that it had: an engine's
noise is of (seed, position), so that under the same weights it draws what it would have drawn at once. More groups are
under way than a step learns from; a step draws segment after segment until enough groups have ended, takes those that
were begun first, and carries the others over. Nothing is dropped, and nothing depends on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mrl.core import Prompt, Request, Sample
from mrl.rollout.routed import joined, whole
from mrl.trainers.rl.groups import Group

Generate = Callable[[list[Request], int], list[Sample]]  # with so many new tokens at most


@dataclass(frozen=True)
class Part:
    """A response in the making: the ids and log-probs that are drawn, the version of the weights that drew each.
    experts: as in `Sample`, of its prompt and of all that is drawn but the last token; None: nobody asks"""

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish: str = ""  # empty: it goes on
    experts: np.ndarray | None = None

    @classmethod
    def empty(cls) -> Part:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))

    def longer(self, drawn: Sample, most: int) -> Part:
        """With what was drawn after it. most: tokens of a response"""
        ids = np.concatenate([self.ids, drawn.response_ids])
        versions = np.full(len(drawn.response_ids), int(drawn.weight_version), np.int32)
        has_ended = drawn.finish_reason == "stop" or len(ids) >= most
        return Part(
            ids,
            np.concatenate([self.log_probs, drawn.log_probs]),
            np.concatenate([self.versions, versions]),
            drawn.finish_reason if has_ended else "",
            joined(self.experts, drawn.routed_experts),
        )


@dataclass(frozen=True)
class _Group:
    """The responses to the prompt of group `number` of the run, some of which may have ended."""

    number: int
    parts: tuple[Part, ...]

    @property
    def has_ended(self) -> bool:
        return all(part.finish for part in self.parts)


class Segments:
    """Groups that are under way, which a checkpoint keeps.

    tokens: of a segment; most: of a response, a multiple of it
    wanted: groups that a step learns from; under_way: at least as many, at the beginning of a step
    request: of member m of group g of the run
    """

    def __init__(
        self, tokens: int, most: int, wanted: int, under_way: int, members: int, request: Callable[[int, int], Request]
    ) -> None:
        self._tokens, self._most, self._members = tokens, most, members
        self._wanted, self._under_way, self._request = wanted, under_way, request
        self._carried: tuple[_Group, ...] = ()

    def draw(self, step: int, generate: Generate) -> tuple[list[Group], dict[str, float]]:
        """The groups that step `step` (from 0) learns from, in the order in which they were begun, and metrics. What is
        under way does not change if `generate` raises."""
        first = step * self._wanted + len(self._carried)
        new = range(first, first + self._under_way - len(self._carried))
        groups = [*self._carried, *(_Group(number, (Part.empty(),) * self._members) for number in new)]
        rounds = 0
        while rounds == 0 or sum(group.has_ended for group in groups) < self._wanted:
            groups = self._longer(groups, generate)
            rounds += 1
        taken = [group for group in groups if group.has_ended][: self._wanted]
        left = {group.number for group in groups} - {group.number for group in taken}
        self._carried = tuple(group for group in groups if group.number in left)
        found = [[self._sample(group, member) for member in range(self._members)] for group in taken]
        mixed = [len({*part.versions.tolist()}) > 1 for group in taken for part in group.parts]
        carried = sum(len(part.ids) for group in self._carried for part in group.parts)
        metrics = {"segments/rounds": float(rounds), "segments/carried_tokens": float(carried)}
        return found, metrics | {"staleness/mixed": sum(mixed) / len(mixed)}

    def _longer(self, groups: Sequence[_Group], generate: Generate) -> list[_Group]:
        """One more segment of all that have not ended."""
        running = [(group, m) for group in groups for m, part in enumerate(group.parts) if not part.finish]
        if not running:
            return list(groups)
        requests = [self._going_on(place, group, member) for place, (group, member) in enumerate(running)]
        drawn = generate(requests, self._tokens)
        parts = {group.number: list(group.parts) for group in groups}
        for (group, member), sample in zip(running, drawn, strict=True):
            parts[group.number][member] = group.parts[member].longer(sample, self._most)
        return [replace(group, parts=tuple(parts[group.number])) for group in groups]

    def _going_on(self, place: int, group: _Group, member: int) -> Request:
        request = self._request(group.number, member)
        part = group.parts[member]
        prompt = Prompt(request.prompt.index, (*request.prompt.token_ids, *part.ids.tolist()), {})
        known = 0 if part.experts is None else len(part.experts)
        return replace(request, sample_id=place, prompt=prompt, routed_experts_start=known)

    def _sample(self, group: _Group, member: int) -> Sample:
        part, request = group.parts[member], self._request(group.number, member)
        version, experts = str(part.versions[-1]), None if part.experts is None else whole(part.experts)
        drawn = request, part.ids, part.log_probs, part.finish, version
        return Sample(*drawn, token_weight_versions=part.versions, routed_experts=experts)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        groups = [{"number": g.number, "parts": [_plain(part) for part in g.parts]} for g in self._carried]
        return {"segments": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run without segments has none under way."""
        groups = state.get("segments") or []
        self._carried = tuple(_Group(each["number"], tuple(map(_restored, each["parts"]))) for each in groups)


def _plain(part: Part) -> dict[str, Any]:
    arrays = (part.ids, part.log_probs, part.versions, *(() if part.experts is None else (part.experts,)))
    return {"arrays": [torch.from_numpy(array) for array in arrays], "finish": part.finish}


def _restored(part: dict[str, Any]) -> Part:
    ids, log_probs, versions, *experts = (tensor.numpy() for tensor in part["arrays"])
    return Part(ids, log_probs, versions, part["finish"], *experts)
