"""The scheduler on a simulated clock: no group is lost, trained on twice or too old, in any order of completion."""

from __future__ import annotations

import asyncio
import json
import math
import random
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.core import Prompt, Request, Sample
from mrl.inference.request_dispatcher import PromptGroup
from mrl.inference.seeds import sample_seed
from mrl.sampling.dynamic_sampling import DynamicSampling, SamplingError
from mrl.sampling.first_done import FirstDone
from mrl.sampling.scheduler import Group, Policy, Scheduler, WholeSteps
from tests.helpers.simulated import SimulatedDispatcher

WANTED, MEMBERS, STEPS = 3, 2, 25
ACTIVITY: Any = SimpleNamespace(most_s=0.1, left_s=lambda since: 1.0)


def requests(step: int, index: int) -> list[Request]:
    number = index if index >= 0 else -1 - index
    prompt = Prompt(step * 1000 + number, (step, number), {})
    seeds = [sample_seed(1, step * 1000 + index + 500, member) for member in range(MEMBERS if index >= 0 else 1)]
    return [Request(number * MEMBERS + m, number, prompt, seed) for m, seed in enumerate(seeds)]


class Run:
    """A run whose requests take random times and whose samples name the weights of their first and last token.

    begun: (step, index) of each sample whose generation began; hangs: the step whose samples never end
    """

    def __init__(
        self,
        ahead: int,
        seed: int = 0,
        policy: Policy | None = None,
        has_greedy: bool = False,
        steps: int = STEPS,
        dispatcher: SimulatedDispatcher | None = None,
        interrupt: str = "never",
    ) -> None:
        self.ahead, self.interrupt = ahead, interrupt
        self.random, self.version, self.begun = random.Random(seed), 0, list[tuple[int, int]]()
        self.dispatcher = dispatcher or SimulatedDispatcher()
        self.fails, self.hangs, self.made = False, -1, list[Sample]()
        policy = policy or WholeSteps(WANTED)
        weights = {"give_weights": lambda url: None, "activity": ACTIVITY}
        own = {"has_greedy": has_greedy, "steps": steps, "max_staleness": ahead, "interrupt": interrupt, **weights}
        self.discarded: list[Sample] = []
        self.scheduler = Scheduler(self, policy, requests, self.sample, self.discarded.extend, **own)  # type: ignore[arg-type]

    async def sample(self, request: Request, group: PromptGroup, is_greedy: bool) -> Sample:
        assert request in group.requests
        if self.fails:
            raise ZeroDivisionError
        self.begun.append(request.prompt.token_ids)
        if request.prompt.token_ids[0] == self.hangs:
            await self.dispatcher.loop.create_future()
        started: list[int] = []
        seconds = self.random.lognormvariate(1, 1)
        await self.dispatcher.run_for(seconds, lambda: started.append(self.version))
        versions = np.array([started[0], started[-1]], np.int32)
        ids, score = np.array([request.seed % 99, 5]), float(request.seed % 2)
        own = request, ids, np.array([-1.0, -2.0]), "stop", str(started[-1]), "", score
        self.made.append(Sample(*own, token_weight_versions=versions))
        return self.made[-1]

    def train(self, steps: range) -> list[list[Group]]:
        """Runs the steps and returns the groups of each."""
        found = []
        for step in steps:
            self.scheduler.wait(step)
            found.append([*self.scheduler.take(step).groups.values()])
            self.dispatcher.pass_s(self.random.random() * 4)
            if self.ahead:
                self.scheduler.rest()
                assert not self.dispatcher.sent, "a response is in flight during a weight sync"
            self.version = step + 1
            if self.ahead:
                self.scheduler.resume()
        return found

    def close(self) -> None:
        self.dispatcher.close()


def numbers(steps: list[list[Group]]) -> list[tuple[int, ...]]:
    return [group[0].request.prompt.token_ids for groups in steps for group in groups]


EVERY = [(step, index) for step in range(STEPS) for index in range(WANTED)]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([0, 1, 2, 4]), st.sampled_from(["never", "at_sync"]), st.integers(0, 1 << 20))
def test_groups_are_trained_on_once_in_order_and_no_token_is_older_than_the_bound(
    ahead: int, interrupt: str, seed: int
) -> None:
    with closing(Run(ahead, seed, interrupt=interrupt)) as run:
        found = run.train(range(STEPS))
    assert numbers(found) == EVERY
    assert sorted(run.begun) == sorted(EVERY * MEMBERS), "a sample was generated twice, or for nothing"
    samples = [(step, sample) for step, groups in enumerate(found) for group in groups for sample in group]
    ages = [step - int(s.token_weight_versions[0]) for step, s in samples if s.token_weight_versions is not None]
    assert 0 <= min(ages) and max(ages) <= ahead
    assert (max(ages) > 0) == (ahead > 0)
    spans = {len({*s.token_weight_versions}) for _, s in samples if s.token_weight_versions is not None}
    assert spans == ({1, 2} if interrupt == "at_sync" and ahead else {1})
    if (ahead, interrupt) == (1, "never"):
        assert {*ages[WANTED * MEMBERS :]} == {1}, "a repeated run would have samples of other weights"
    assert [s.response_ids[0] for _, s in samples] == [r.seed % 99 for number in EVERY for r in requests(*number)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(1, 12), st.integers(13, 24))
def test_a_run_of_three_lives_trains_on_each_group_once(seed: int, first: int, second: int) -> None:
    found: list[list[Group]] = []
    state: dict[str, Any] = {}
    for begin, end in [(0, first), (first, second), (second, STEPS)]:
        with closing(Run(3, seed + begin)) as run:
            run.version = begin
            run.scheduler.load_state_dict(state)
            found += run.train(range(begin, end))
            state = saved(run.scheduler)
    assert numbers(found) == EVERY
    assert [s.response_ids[0] for groups in found for g in groups for s in g] == [
        request.seed % 99 for number in EVERY for request in requests(*number)
    ]


def saved(scheduler: Scheduler) -> dict[str, Any]:
    """Returns the state as a checkpoint restores it."""

    def loaded(value: dict[str, Any]) -> dict[str, Any]:
        if "arrays" in value:
            value["arrays"] = {name: torch.tensor(array) for name, array in value["arrays"].items()}
        return value

    text = json.dumps(scheduler.state_dict(), default=lambda tensor: tensor.tolist())
    return json.loads(text, object_hook=loaded)


def test_a_step_that_is_at_rest_is_whole_in_its_checkpoint() -> None:
    with closing(Run(1, has_greedy=True)) as run:
        run.scheduler.wait(0)
        run.scheduler.take(0)
        run.scheduler.rest()
        begun, state = len(run.begun), saved(run.scheduler)
    assert begun == 2 * WANTED * (MEMBERS + 1) and [kept["step"] for kept in state["sampled_steps"]] == [1]
    with closing(Run(0, has_greedy=True)) as again:
        again.scheduler.load_state_dict(state)
        again.scheduler.wait(1)
        taken = again.scheduler.take(1)
    assert again.begun == [] and numbers([[*taken.groups.values()]]) == [(1, index) for index in range(WANTED)]
    assert [sample.request for sample in taken.greedy.values()] == [requests(1, -1 - i)[0] for i in range(WANTED)]


def test_greedy_responses_run_alone() -> None:
    with closing(Run(2, has_greedy=True)) as run:
        run.scheduler.wait(0)
        assert len(run.begun) == WANTED * (2 * MEMBERS + 1), "the next step began, or a greedy response is missing"
        assert list(run.scheduler.take(0).greedy) == [(0, index) for index in range(WANTED)]


def test_what_fails_is_raised_where_it_is_waited_for() -> None:
    with closing(Run(1)) as run:
        run.fails = True
        with pytest.raises(ZeroDivisionError):
            run.scheduler.wait(0)


def test_samples_that_do_not_come_end_the_run() -> None:
    with closing(Run(1)) as run:
        run.hangs = 0
        with pytest.raises(RuntimeError, match="the samples of step 1 are not there, and no .* has come for 0.1 s"):
            run.scheduler.wait(0)


def test_a_rest_ends_where_an_engine_waits_for_the_next_weights() -> None:
    with closing(Run(1)) as run:
        run.hangs = 1
        run.scheduler.wait(0)
        run.dispatcher.awaiting_weights = ("http://one",)
        run.scheduler.rest()


# ---- groups that end first


def first_done(ahead: int, interrupt: str = "never") -> FirstDone:
    in_flight = 2 * WANTED if interrupt == "at_step_end" else math.ceil(WANTED * (1 + ahead / 2))
    return FirstDone(WANTED, in_flight, WANTED * STEPS, None if interrupt == "at_step_end" else ahead)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([(1, "never"), (2, "never"), (3, "at_sync"), (6, "never"), (0, "at_step_end")]),
    st.integers(0, 1 << 20),
    st.integers(1, STEPS - 1),
)
def test_groups_that_overtake_each_other_are_trained_on_once_and_none_is_too_old(
    kind: tuple[int, Any], seed: int, end: int
) -> None:
    """Groups that overtake each other are trained on once and none is too old, also across a kill after step `end`."""
    ahead, interrupt = kind
    found: list[list[Group]] = []
    states: list[dict[str, Any]] = [{}, {}]
    for begin, until in [(0, end), (end, STEPS)]:
        policy = first_done(ahead, interrupt)
        with closing(Run(ahead, seed + begin, policy, interrupt=interrupt)) as run:
            run.version = begin
            run.scheduler.load_state_dict(states[0])
            policy.load_state_dict(states[1])
            found += run.train(range(begin, until))
            states = [saved(run.scheduler), policy.state_dict()]
            assert not run.discarded
    assert sorted(numbers(found)) == EVERY and all(len(groups) == WANTED for groups in found)
    samples = [(step, sample) for step, groups in enumerate(found) for group in groups for sample in group]
    ages = [step - int(s.token_weight_versions[0]) for step, s in samples if s.token_weight_versions is not None]
    assert min(ages) >= 0 and (interrupt == "at_step_end" or max(ages) <= ahead)


@pytest.mark.parametrize("ahead", [3, 4, 7])
def test_groups_that_reach_the_bound_together_are_spread_over_the_steps_before_it(ahead: int) -> None:
    """All but the first groups of step 1 end late: a step of them all would be larger than any other."""
    policy, late = first_done(ahead), asyncio.Event()
    slow = range(WANTED, math.ceil(WANTED * (1 + ahead / 2)))

    async def group(step: int, index: int) -> Any:
        if step * WANTED + index in slow:
            await late.wait()
        return [step * WANTED + index]

    async def train() -> list[list[int]]:
        found = []
        for step in range(STEPS):
            drawn = asyncio.ensure_future(policy.draw(step, group))
            done, _ = await asyncio.wait([drawn], timeout=0.05 if not late.is_set() else 5)
            if not done:
                late.set()
            found.append([number for [number] in (await drawn).groups.values()])
        return found

    found = asyncio.run(train())
    assert [len(numbers) for numbers in found] == [WANTED] * STEPS
    assert sorted(sum(found, [])) == [*range(WANTED * STEPS)]
    assert all(step <= ahead for step, numbers in enumerate(found) if {*numbers} & {*slow})


def test_a_long_response_does_not_hold_up_a_step_of_those_that_end_first() -> None:
    with closing(Run(4, 0, first_done(4))) as run:
        run.hangs = 1  # all requests of step 1, but never those of other steps
        run.scheduler.wait(0)
        run.scheduler.wait(1)
        assert len(groups := run.scheduler.take(1).groups) == WANTED and 1 not in {step for step, _ in groups}
    with closing(Run(1, 0)) as run:
        run.hangs = 1
        run.scheduler.wait(0)
        with pytest.raises(RuntimeError, match="the samples of step 2 are not there"):
            run.scheduler.wait(1)


def test_a_checkpoint_of_another_policy_continues_with_the_groups_of_its_step() -> None:
    policy = first_done(2)
    policy.load_state_dict({})
    with closing(Run(2, 0, policy)) as run:
        assert min(numbers(run.train(range(5, 7)))) == (5, 0)


@pytest.mark.parametrize("interrupt", ["at_sync", "at_step_end"])
def test_responses_in_flight_end_early_once_a_step(interrupt: Any) -> None:
    ahead = 2 if interrupt == "at_sync" else 0
    policy = first_done(0, interrupt) if ahead == 0 else None
    with closing(Run(ahead, 0, policy, interrupt=interrupt)) as run:
        run.train(range(5))
        assert len(run.dispatcher.interruptions) == 5


# ---- dynamic sampling


def dynamic(scores: dict[int, tuple[float, ...]], run: list[Run], first: int = WANTED, rounds: int = 4) -> Any:
    """Returns the policy. scores: by group index; (0, 1) for groups without an entry"""
    cfg = SimpleNamespace(max_num_gen_batches=rounds, metric="score", on_shortage="stop")

    async def score(group: Group) -> Group:
        await run[0].dispatcher.run_for(run[0].random.random())
        index = group[0].request.prompt.token_ids[1]
        for sample, value in zip(group, scores.get(index, (0.0, 1.0)), strict=True):
            sample.score = value
        return group

    def judge(group: Group) -> str:
        return "equal" if len({sample.score for sample in group}) == 1 else "kept"

    return DynamicSampling(WANTED, first, cfg, judge, score)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 1 << 20), st.sampled_from([WANTED, 5]))
def test_the_first_groups_that_pass_are_kept_whoever_is_faster(passes: list[bool], seed: int, first: int) -> None:
    scores = {index: (1.0, 1.0) for index, good in enumerate(passes) if not good}
    made: list[Run] = []
    made.append(Run(0, seed, dynamic(scores, made, first)))
    with closing(made[0]) as run:
        run.scheduler.wait(0)
        taken = run.scheduler.take(0)
    good = [index for index in range(20) if index not in scores][:WANTED]
    assert [index for _, index in taken.groups] == good
    assert [index for _, index in sorted(taken.others)] == [index for index in scores if index < good[-1]]
    assert taken.metrics["sampling/prompts"] == good[-1] + 1
    assert len(run.begun) <= MEMBERS * (first + len(scores)), "more groups began than were replaced"
    used = {id(sample) for group in taken.all for sample in group}
    assert not used & {*map(id, run.discarded)}
    assert len(used) + len(run.discarded) == len(run.made), "the scores of a sample are kept for ever"


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(0, 6)), st.integers(0, 1 << 20))
def test_dynamic_sampling_works_over_weight_syncs(dropped: set[int], seed: int) -> None:
    made: list[Run] = []
    made.append(Run(2, seed, dynamic(dict.fromkeys(dropped, (1.0, 1.0)), made)))
    with closing(made[0]) as run:
        found = run.train(range(8))
    good = [index for index in range(20) if index not in dropped][:WANTED]
    assert numbers(found) == [(step, index) for step in range(8) for index in good]


def test_too_few_groups_end_the_run_with_the_numbers() -> None:
    made: list[Run] = []
    made.append(Run(0, 0, dynamic(dict.fromkeys(range(1, 6), (1.0, 1.0)), made, rounds=2)))
    with closing(made[0]) as run:
        with pytest.raises(SamplingError, match=r"6 groups .*gave 1 of the 3 .*: 5 had the same score .*on_shortage"):
            run.scheduler.wait(0)


# ---- utilisation


@pytest.mark.parametrize(("ahead", "interrupt"), [(0, "never"), (1, "never"), (1, "at_sync")])
def test_capacity_is_used_if_responses_continue_over_weight_syncs(ahead: int, interrupt: str) -> None:
    """Engine capacity is used if responses continue across weight syncs: the time for responses of 1 to 60 s with 100
    in flight, against the same work at full capacity."""
    dispatcher = SimulatedDispatcher(100)
    policy = WholeSteps(800)
    with closing(Run(ahead, 0, policy, steps=6, dispatcher=dispatcher, interrupt=interrupt)) as run:
        draw = run.random.lognormvariate
        run.random.lognormvariate = lambda *_: min(60.0, max(1.0, draw(2, 0.7)))  # type: ignore[method-assign]
        for step in range(6):
            run.scheduler.wait(step)
            run.scheduler.take(step)
            if ahead:
                run.scheduler.rest()
                run.scheduler.resume()
        share = dispatcher.busy_s / 100 / dispatcher.now
    assert (share > 0.95) == (interrupt == "at_sync"), f"{share:.3f}"
