"""Partial rollouts: a long response does not hold up its step; it continues in the next one, with the next weights.

A response is generated in segments of a fixed number of tokens. Each continues as prompt + what it has, with the same
seed: an engine's noise follows from (seed, position), so that under the same weights the tokens are those of one
request. More groups are in flight than a step trains on. A step generates segment after segment until enough groups
have ended, takes those that were started first, and carries the others over. Nothing is dropped, and nothing depends on
the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mrl.core import Prompt, Request, Sample
from mrl.rollout.routed import joined, whole
from mrl.sampling.scheduler import GenerateGroup, StepSamples

Generate = Callable[[Request, int], Awaitable[Sample]]  # with so many new tokens at most


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


class PartialRollouts:
    """Policy by which groups continue over steps, which a checkpoint keeps.

    tokens: of a segment; most: of a response, a multiple of it
    wanted: groups that a step trains on; in_flight: at least as many, at the beginning of a step
    request: of member m of group g of the run
    """

    is_sequential = True

    def __init__(
        self,
        tokens: int,
        most: int,
        wanted: int,
        in_flight: int,
        members: int,
        request: Callable[[int, int], Request],
        generate: Generate,
    ) -> None:
        self._tokens, self._most, self._members, self._generate = tokens, most, members, generate
        self._wanted, self._in_flight, self._request = wanted, in_flight, request
        self._carried: tuple[_Group, ...] = ()

    async def draw(self, step: int, group: GenerateGroup | None = None) -> StepSamples:
        """Returns the groups that step `step` (from 0) trains on, in the order of their start."""
        first = step * self._wanted + len(self._carried)
        new = range(first, first + self._in_flight - len(self._carried))
        groups = [*self._carried, *(_Group(number, (Part.empty(),) * self._members) for number in new)]
        rounds = 0
        while rounds == 0 or sum(each.has_ended for each in groups) < self._wanted:
            groups = await self._longer(groups)
            rounds += 1
        taken = [each for each in groups if each.has_ended][: self._wanted]
        left = {each.number for each in groups} - {each.number for each in taken}
        self._carried = tuple(each for each in groups if each.number in left)
        tokens = sum(len(part.ids) for each in self._carried for part in each.parts)
        metrics = {"segments/rounds": float(rounds), "segments/carried_tokens": float(tokens)}
        found = {divmod(each.number, self._wanted): self._samples(each) for each in taken}
        return StepSamples(found, metrics)

    async def _longer(self, groups: Sequence[_Group]) -> list[_Group]:
        """Generates one more segment of all responses that have not ended."""
        running = [(group, m) for group in groups for m, part in enumerate(group.parts) if not part.finish]
        requests = [self._going_on(place, group, member) for place, (group, member) in enumerate(running)]
        drawn = await asyncio.gather(*(self._generate(request, self._tokens) for request in requests))
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

    def _samples(self, group: _Group) -> list[Sample]:
        return [self._sample(part, self._request(group.number, m)) for m, part in enumerate(group.parts)]

    @staticmethod
    def _sample(part: Part, request: Request) -> Sample:
        version, experts = str(part.versions[-1]), None if part.experts is None else whole(part.experts)
        drawn = request, part.ids, part.log_probs, part.finish, version
        return Sample(*drawn, token_weight_versions=part.versions, routed_experts=experts)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        groups = [{"number": g.number, "parts": [_plain(part) for part in g.parts]} for g in self._carried]
        return {"segments": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run without partial rollouts has none in flight."""
        groups = state.get("segments") or []
        self._carried = tuple(_Group(each["number"], tuple(map(_restored, each["parts"]))) for each in groups)


def _plain(part: Part) -> dict[str, Any]:
    arrays = (part.ids, part.log_probs, part.versions, *(() if part.experts is None else (part.experts,)))
    return {"arrays": [torch.from_numpy(array) for array in arrays], "finish": part.finish}


def _restored(part: dict[str, Any]) -> Part:
    ids, log_probs, versions, *experts = (tensor.numpy() for tensor in part["arrays"])
    return Part(ids, log_probs, versions, part["finish"], *experts)
