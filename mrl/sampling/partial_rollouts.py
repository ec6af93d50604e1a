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

import torch

from mrl.core import Request, Sample
from mrl.inference.samples import PartialResponse
from mrl.sampling.scheduler import GenerateGroup, StepSamples

Generate = Callable[[Request, int], Awaitable[Sample]]  # with so many new tokens at most


@dataclass(frozen=True)
class _Group:
    """The responses to the prompt of group `number` of the run, some of which may have ended."""

    number: int
    parts: tuple[PartialResponse, ...]

    @property
    def has_ended(self) -> bool:
        return all(part.finish for part in self.parts)


@dataclass(eq=False)
class PartialRollouts:
    """Policy by which groups continue over steps, which a checkpoint keeps."""

    tokens: int  # of a segment
    most: int  # of a response, a multiple of `tokens`
    wanted: int  # groups that a step trains on
    in_flight: int  # groups at the beginning of a step, at least `wanted`
    members: int  # of a group
    request: Callable[[int, int], Request]  # of member m of group g of the run
    generate: Generate
    _carried: tuple[_Group, ...] = ()
    is_sequential, keeps_groups = True, False

    async def draw(self, step: int, group: GenerateGroup | None = None) -> StepSamples:
        """Returns the groups that step `step` (from 0) trains on, in the order of their start."""
        first = step * self.wanted + len(self._carried)
        new = range(first, first + self.in_flight - len(self._carried))
        groups = [*self._carried, *(_Group(number, (PartialResponse.empty(),) * self.members) for number in new)]
        rounds = 0
        while rounds == 0 or sum(each.has_ended for each in groups) < self.wanted:
            groups = await self._longer(groups)
            rounds += 1
        taken = [each for each in groups if each.has_ended][: self.wanted]
        left = {each.number for each in groups} - {each.number for each in taken}
        self._carried = tuple(each for each in groups if each.number in left)
        tokens = sum(len(part.ids) for each in self._carried for part in each.parts)
        metrics = {"segments/rounds": float(rounds), "segments/carried_tokens": float(tokens)}
        found = {divmod(each.number, self.wanted): self._samples(each) for each in taken}
        return StepSamples(found, metrics)

    async def _longer(self, groups: Sequence[_Group]) -> list[_Group]:
        """Generates one more segment of all responses that have not ended."""
        running = [(group, m) for group in groups for m, part in enumerate(group.parts) if not part.finish]
        requests = [
            replace(group.parts[member].rest_of(self.request(group.number, member)), sample_id=place)
            for place, (group, member) in enumerate(running)
        ]
        drawn = await asyncio.gather(*(self.generate(request, self.tokens) for request in requests))
        parts = {group.number: list(group.parts) for group in groups}
        for (group, member), sample in zip(running, drawn, strict=True):
            parts[group.number][member] = group.parts[member].longer(sample, self.most)
        return [replace(group, parts=tuple(parts[group.number])) for group in groups]

    def _samples(self, group: _Group) -> list[Sample]:
        return [part.sample(self.request(group.number, member)) for member, part in enumerate(group.parts)]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        groups = [{"number": g.number, "parts": [_plain(part) for part in g.parts]} for g in self._carried]
        return {"segments": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run without partial rollouts has none in flight."""
        groups = state.get("segments") or []
        self._carried = tuple(_Group(each["number"], tuple(map(_restored, each["parts"]))) for each in groups)


def _plain(part: PartialResponse) -> dict[str, Any]:
    arrays = (part.ids, part.log_probs, part.versions, *(() if part.experts is None else (part.experts,)))
    return {"arrays": [torch.from_numpy(array) for array in arrays], "finish": part.finish}


def _restored(part: dict[str, Any]) -> PartialResponse:
    ids, log_probs, versions, *experts = (tensor.numpy() for tensor in part["arrays"])
    return PartialResponse(ids, log_probs, versions, part["finish"], *experts)
