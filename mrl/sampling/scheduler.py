"""Scheduler of the samples of a run.

* A policy decides which groups a step trains on. While a step trains, groups of the next `max_staleness` steps may be
  generated: no token is older than `max_staleness` steps when it is trained on.
* A group has a number, (step, index), from which prompt and seeds follow: the samples of a step do not depend on which
  engine was faster.
* Nothing is dropped. In the order `fifo` a group that takes long is waited for, so that training is not biased towards
  short responses.
* Everything runs in the dispatcher's event loop. The main thread starts steps, waits for them, and gives restarted
  engines their weights meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from mrl.core import Request, Sample
from mrl.inference.engine import Engine
from mrl.inference.request_dispatcher import PromptGroup
from mrl.sampling.saved_samples import plain, restored

Interrupt = Literal["never", "at_sync", "at_step_end"]
Group = list[Sample]
GroupNumber = tuple[int, int]  # the step that it is numbered for, and its index there
GenerateGroup = Callable[[int, int], Awaitable[Group]]  # by its number


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step.

    groups: in order; others: those that were generated and are not trained on
    greedy: by the number of the group, a response of the likeliest tokens to its prompt, if the run needs them
    is_scored: the samples of all groups have their scores
    """

    groups: dict[GroupNumber, Group]
    metrics: dict[str, float] = field(default_factory=dict)
    others: dict[GroupNumber, Group] = field(default_factory=dict)
    greedy: dict[GroupNumber, Sample] = field(default_factory=dict)
    is_scored: bool = False

    @property
    def all(self) -> list[Group]:
        """All groups that were generated for the step."""
        return [*self.groups.values(), *self.others.values()]


class Policy(Protocol):
    """Decides which groups a step trains on.

    is_sequential: a step is drawn after the one before it
    keeps_groups: groups that a step does not train on are kept for later ones, and no step is drawn ahead
    """

    is_sequential: bool
    keeps_groups: bool

    async def draw(self, step: int, group: GenerateGroup) -> StepSamples: ...


@dataclass(frozen=True)
class WholeSteps:
    """Every step trains on the `wanted` groups that are numbered for it."""

    wanted: int
    is_sequential = keeps_groups = False

    async def draw(self, step: int, group: GenerateGroup) -> StepSamples:
        found = await asyncio.gather(*(group(step, index) for index in range(self.wanted)))
        return StepSamples({(step, index): made for index, made in enumerate(found)})


class Activity(Protocol):
    """Progress of anything that samples wait for; most_s: maximum seconds without any."""

    most_s: float

    def left_s(self, since: float) -> float: ...


@dataclass(eq=False)
class Scheduler:
    """Samples of the steps of a run."""

    engine: Engine  # has another dispatcher after a failure
    policy: Policy  # which groups a step trains on
    requests: Callable[[int, int], list[Request]]  # of group `index` of a step; for -1 - index, of its greedy response
    sample: Callable[[Request, PromptGroup, bool], Coroutine[Any, Any, Sample]]  # of a request; True: a greedy one
    discard: Callable[[Sequence[Sample]], None]  # forgets what is being done for samples that no step takes
    # Whether each group needs a greedy response, with nothing else in flight: beside a greedy request SGLang samples
    # others in another way, so that their tokens would depend on the batch.
    has_greedy: bool
    steps: int  # of the whole run; nothing is generated for later ones
    max_staleness: int  # how many steps ahead of training groups are generated
    interrupt: Interrupt  # when responses in flight end early, to continue with the next weights
    give_weights: Callable[[str], None]  # gives the engine at an address the others' weights, in the main thread
    activity: Activity  # whether anything still happens
    _draws: dict[int, Future[StepSamples]] = field(default_factory=dict, init=False)
    _finished: dict[GroupNumber, Group] = field(default_factory=dict, init=False)  # groups of steps that were not taken
    _restored: dict[int, StepSamples] = field(default_factory=dict, init=False)
    _running: int = field(default=0, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _in_order: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    # ---- the main thread

    def start(self, step: int) -> None:
        """Starts what may be generated in step `step` (from 0)."""
        self.resume()
        ahead = 0 if self.policy.keeps_groups else self.max_staleness
        for number in range(step, min(step + ahead + 1, self.steps)):
            if number not in self._draws:
                self._draws[number] = self.engine.dispatcher.submit(self._draw(number))

    def wait(self, step: int) -> None:
        """Starts what may be generated in step `step` (from 0), and waits until its samples are there. Raises what
        failed, and RolloutError if nothing makes progress for longer than any part takes."""
        self.start(step)
        is_synchronous = self.max_staleness == 0

        def is_there() -> bool:
            restarts = self.engine.dispatcher.is_restarting or bool(self.engine.dispatcher.awaiting_weights)
            return self._draws[step].done() and not (is_synchronous and restarts)

        began = time.monotonic()
        self._serve([step], is_there, self.give_weights)
        self._waited_s = time.monotonic() - began
        draw = self._draws[step]
        if not _is_good(draw):
            del self._draws[step]  # a later call tries again
        draw.result()
        if self.interrupt == "at_step_end":
            self.rest()

    def rest(self) -> None:
        """Waits until no engine generates for this run any more. Raises as `wait`.

        One step ahead in order and without interruptions, the next step is generated to its end: all its samples are of
        one version of the weights. Otherwise further requests are held back until `resume`, and those in flight end
        early or, with `interrupt: never`, are waited for. Engines that wait for a weight sync generate nothing.
        """
        draws, dispatcher = self._draws, self.engine.dispatcher
        is_whole = self.max_staleness <= 1 and self.interrupt == "never" and not self.policy.keeps_groups
        paused = None if is_whole else dispatcher.pause(interrupt=self.interrupt != "never")

        def is_at_rest() -> bool:
            if paused is not None:
                return paused.done() and not dispatcher.sent
            is_waiting = bool(dispatcher.awaiting_weights and not dispatcher.sent)
            return is_waiting or all(draw.done() for draw in draws.values())

        self._serve([*draws] if paused is None else [], is_at_rest, None)

    def resume(self) -> None:
        """Ends a `rest`: held back requests are sent."""
        self.engine.dispatcher.resume()

    def take(self, step: int) -> StepSamples:
        """Returns the samples of the step that was waited for, with metrics if others are generated meanwhile."""
        found = self._draws.pop(step).result()
        used = found.groups | found.others
        for number, group in self._finished.copy().items():
            is_left = number not in used and number[0] == step and not self.policy.keeps_groups
            if is_left and number[1] >= 0:
                self.discard(group)
            if is_left or number in used:
                del self._finished[number]
        self._restored.pop(step, None)
        if self.max_staleness == 0 and self.interrupt == "never":
            return found
        ready, running = len(self._finished), self._running
        more = {"perf/wait_s": self._waited_s, "queue/groups": float(ready), "queue/running": float(running)}
        return replace(found, metrics=found.metrics | more)

    def _serve(
        self, steps: Sequence[int], until: Callable[[], bool], give_weights: Callable[[str], None] | None
    ) -> None:
        began = time.monotonic()
        what = f"the samples of step {', '.join(str(step + 1) for step in steps)} are not there"
        late = (
            f"{what if steps else 'responses in flight do not end before the weight sync'}, and no response, score or "
            f"engine has come for {self.activity.most_s:g} s, which is more than any of them may take"
        )
        self.engine.dispatcher.serve(until, give_weights, lambda: self.activity.left_s(began), lambda: late)

    # ---- the event loop

    async def _draw(self, step: int) -> StepSamples:
        if step in self._restored:
            return self._restored[step]
        if not (self.policy.is_sequential or self.has_greedy):
            return await self.policy.draw(step, self._group)
        async with self._in_order:
            found = await self.policy.draw(step, self._group)
            if not self.has_greedy:
                return found
            greedy = await asyncio.gather(*(self._group(step, -1 - index) for _, index in found.groups))
            return replace(found, greedy=dict(zip(found.groups, (one for [one] in greedy), strict=True)))

    async def _group(self, step: int, index: int) -> Group:
        """Generates a group, unless a checkpoint has it."""
        number = step, index
        if number not in self._finished:
            requests = self.requests(step, index)
            together = PromptGroup(requests)
            tasks = [asyncio.create_task(self.sample(request, together, index < 0)) for request in requests]
            self._running += 1
            try:
                samples = await asyncio.gather(*tasks)
            except asyncio.CancelledError:
                self.discard([task.result() for task in tasks if task.done() and _is_good(task)])
                raise
            finally:
                self._running -= 1
            self._finished[number] = [*samples]
            return [*samples]
        return self._finished[number]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what was generated and not trained on, without scores: the samples of whole steps, and the finished
        groups of others. Unfinished groups are generated anew. Tensors and plain values."""
        whole = {step: draw.result() for step, draw in self._draws.items() if draw.done() and _is_good(draw)}
        finished = {number: group for number, group in self._finished.copy().items() if number[0] not in whole}
        steps = [
            {
                "step": step,
                "metrics": found.metrics,
                "groups": [_kept(number, group) for number, group in found.groups.items()],
                "others": [_kept(number, group) for number, group in found.others.items()],
                "greedy": [_kept((s, -1 - i), [sample]) for (s, i), sample in found.greedy.items()],
            }
            for step, found in sorted(whole.items())
        ]
        groups = [_kept(number, group) for number, group in sorted(finished.items())]
        return {"sampled_steps": steps, "sampled_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kept in state.get("sampled_groups") or []:
            self._finished |= self._loaded([kept])
        for kept in state.get("sampled_steps") or []:
            groups, others, greedy = (self._loaded(kept[name]) for name in ("groups", "others", "greedy"))
            likeliest = {(step, -1 - index): sample for (step, index), [sample] in greedy.items()}
            self._restored[kept["step"]] = StepSamples(groups, kept["metrics"], others, likeliest)

    def _loaded(self, groups: list[dict[str, Any]]) -> dict[GroupNumber, Group]:
        found: dict[GroupNumber, Group] = {}
        for kept in groups:
            step, index = kept["step"], kept["index"]
            requests = self.requests(step, index)
            found[step, index] = [restored(r, sample) for r, sample in zip(requests, kept["samples"], strict=True)]
        return found


def _is_good(done: Future[Any] | asyncio.Task[Any]) -> bool:
    return not done.cancelled() and done.exception() is None


def _kept(number: GroupNumber, group: Group) -> dict[str, Any]:
    return {"step": number[0], "index": number[1], "samples": [plain(sample) for sample in group]}
