"""Steps that train on the groups that end first: long responses do not hold them up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from mrl.sampling.scheduler import GenerateGroup, Group, StepSamples


@dataclass(eq=False)
class FirstDone:
    """Policy by which groups overtake each other. Short responses are trained on earlier than long ones, so the first
    steps of a run see more of them: metrics response/* and staleness/* show how much.
    """

    wanted: int  # groups that a step trains on
    in_flight: int  # groups that run or are finished at the beginning of a step, at least `wanted`
    groups: int  # of the whole run
    max_age: int | None  # no group is taken more than so many steps after it began; None: groups may have any age
    _next: int | None = None  # number of the next group to begin; None: the first one of the step to come
    _began: dict[int, int] = field(default_factory=dict)  # groups that no step has taken: the step in which each began
    _tasks: dict[int, asyncio.Task[Group]] = field(default_factory=dict)
    is_sequential = keeps_groups = True

    async def draw(self, step: int, group: GenerateGroup) -> StepSamples:
        """Returns the first `wanted` groups that are finished, among them those that later steps could not take in
        time."""
        if self._next is None:
            self._next = step * self.wanted
        while len(self._began) < self.in_flight and self._next < self.groups:
            self._began[self._next] = step
            self._next += 1
        for number in self._began:
            if number not in self._tasks or self._tasks[number].cancelled():
                self._tasks[number] = asyncio.ensure_future(group(*divmod(number, self.wanted)))
        while (taken := self._taken(step, done := self._done())) is None:
            running = [task for task in self._tasks.values() if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for number in taken:
            del self._began[number], self._tasks[number]
        return StepSamples({divmod(number, self.wanted): done[number] for number in taken})

    def _taken(self, step: int, done: Collection[int]) -> list[int] | None:
        """Returns `wanted` of the groups `done`, or None while a group that must be among them is still running.

        A group may be left for a later step only if the steps until its `max_age` can take it and all older ones.
        """
        taken, max_age = list[int](), self.max_age or 0
        for left in range(max_age):  # steps after this one that may take them
            due = [number for number, began in self._began.items() if step - began >= max_age - left]
            missing = min(self.wanted, len(due) - left * self.wanted) - len(taken)
            ready = [number for number in due if number in done and number not in taken]
            if missing > len(ready):
                return None
            taken += ready[: max(0, missing)]
        others = [number for number in done if number not in taken][: self.wanted - len(taken)]
        return sorted([*taken, *others]) if len(taken) + len(others) == self.wanted else None

    def _done(self) -> dict[int, Group]:
        """Returns the finished groups. Raises what failed; its group begins again if the step is drawn again."""
        done = [number for number, task in self._tasks.items() if task.done()]
        for number in done:
            if self._tasks[number].exception() is not None:
                self._tasks.pop(number).result()
        return {number: self._tasks[number].result() for number in done}

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"groups_next": self._next, "groups_began": dict(self._began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint of a run with another policy has no groups in flight."""
        self._next, self._began = state.get("groups_next"), dict(state.get("groups_began") or {})
