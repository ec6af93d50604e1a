"""Groups in flight over weight updates: none is too old, and each is trained on once, in order."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from mrl.core import Request, Sample
from mrl.rollout import RequestQueue, RolloutError, ServerLost
from mrl.rollout.samples import Expected, read_answer
from mrl.trainers.rl.groups import Group
from mrl.trainers.rl.under_way import UnderWay
from mrl.trainers.shared.heartbeat import Activity
from tests.system.trainers.test_in_flight_updates import MEMBERS, STEPS, WAIT_S, WANTED, request


class Engines:
    """Draws in a thread of its own, in any order; a sample has the version at its beginning and at its end."""

    def __init__(self, seed: int = 0) -> None:
        self.version, self.random, self.lost = 0, random.Random(seed), 0
        self.fails_at: list[int] = []
        self.begun: list[tuple[int, int]] = []

    def draw(self, queue: RequestQueue, on_samples: Callable[[list[Sample]], None]) -> None:
        under_way: list[tuple[Request, int]] = []
        while True:
            while queue._batches:
                for one in queue._batches.popleft():
                    under_way.append((one, self.version))
                    self.begun.append((one.group, self.version))
            if not under_way and queue._has_ended:
                return
            if self.fails_at and len(self.begun) >= self.fails_at[0]:
                del self.fails_at[0]
                raise ServerLost("http://one", 0, "it is gone")
            if under_way:
                one, born = under_way.pop(self.random.randrange(len(under_way)))
                versions = np.array([born, self.version], np.int32)
                on_samples(
                    [
                        Sample(
                            one,
                            np.array([one.seed % 99, 5]),
                            np.array([-1.0, -2.0]),
                            "stop",
                            str(self.version),
                            token_weight_versions=versions,
                        )
                    ]
                )
            time.sleep(0.0002)

    def replace(self, lost: ServerLost) -> list[str]:
        self.lost += 1
        return [lost.url]


def under_way(engines: Engines, ahead: int, steps: int = STEPS) -> UnderWay:
    return UnderWay(WANTED, ahead, steps * WANTED, MEMBERS, request, engines.draw, engines.replace, Activity(WAIT_S))


def run(made: UnderWay, engines: Engines, steps: range) -> list[list[Group]]:
    found = []
    for step in steps:
        while made.wait(step):
            pass
        groups, _ = made.take()
        found.append(groups)
        time.sleep(engines.random.random() * 0.003)  # learns
        engines.version = step + 1
    return found


def numbers(steps: list[list[Group]]) -> list[int]:
    return [group[0].request.group for groups in steps for group in groups]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_groups_are_learnt_once_in_order_and_no_token_is_older_than_the_bound(ahead: int) -> None:
    engines = Engines()
    with closing(under_way(engines, ahead)) as made:
        found = run(made, engines, range(STEPS))
    assert numbers(found) == list(range(STEPS * WANTED))
    ages = [
        step - int(sample.token_weight_versions[0])
        for step, groups in enumerate(found)
        for group in groups
        for sample in group
        if sample.token_weight_versions is not None
    ]
    assert max(ages) <= ahead and min(ages) >= 0
    assert all(age == 0 for age in ages) if ahead == 0 else max(ages) > 0
    assert len(engines.begun) == STEPS * WANTED * MEMBERS, "something was drawn for nothing, or twice"


def test_a_lost_engine_costs_what_was_under_way_and_nothing_else() -> None:
    engines = Engines()
    engines.fails_at = [20, 60, 100]
    with closing(under_way(engines, 2)) as made:
        found = run(made, engines, range(STEPS))
    assert numbers(found) == list(range(STEPS * WANTED)) and engines.lost == 3
    assert len(engines.begun) > STEPS * WANTED * MEMBERS


def test_three_lives_learn_each_group_once() -> None:
    found: list[list[Group]] = []
    state: dict[str, Any] = {}
    for life, (first, saved) in enumerate([(0, 7), (7, 19), (19, STEPS)]):
        engines = Engines(life)
        engines.version = first
        with closing(under_way(engines, 3)) as made:
            made.load_state_dict(state)
            found += run(made, engines, range(first, saved))
            state = json.loads(json.dumps(made.state_dict(), default=lambda tensor: tensor.tolist()))
            for group in state["under_way"]:
                for sample in group["samples"]:
                    sample["arrays"] = {name: torch.tensor(array) for name, array in sample["arrays"].items()}
    assert numbers(found) == list(range(STEPS * WANTED))
    assert [g.response_ids[0] for groups in found for [g, _] in groups] == [
        request(number, 0).seed % 99 for number in range(STEPS * WANTED)
    ]


def test_what_the_thread_raises_is_raised_where_groups_are_waited_for() -> None:
    def fails(queue: RequestQueue, on_samples: object) -> None:
        raise ZeroDivisionError

    made = UnderWay(WANTED, 1, 9, MEMBERS, request, fails, Engines().replace, Activity(WAIT_S))
    with pytest.raises(ZeroDivisionError):
        made.wait(0)


def test_groups_that_do_not_end_are_waited_for_in_vain_no_longer_than_they_may_take() -> None:
    def waits(queue: RequestQueue, on_samples: object) -> None:
        while queue.take(waits=True):
            pass

    with closing(UnderWay(WANTED, 1, 9, MEMBERS, request, waits, Engines().replace, Activity(0.1))) as made:
        with pytest.raises(RolloutError, match="3 of 3 groups have not ended, and no .* has come for 0.1 s"):
            made.wait(0)


def test_who_is_fed_ends_with_who_feeds() -> None:
    made: list[RequestQueue] = []
    owner = threading.Thread(target=lambda: made.append(RequestQueue()))
    owner.start()
    owner.join()
    made[0].put([request(0, 0)])
    assert made[0].take(waits=True) == [request(0, 0)] and made[0].take(waits=True) == []

    async def taken() -> list[Any]:
        return [each async for each in made[0].batches()]

    assert asyncio.run(taken()) == []


def test_a_rest_waits_for_what_is_admitted_and_begins_nothing() -> None:
    engines = Engines()
    with closing(under_way(engines, 2)) as made:
        assert made.wait(0) == []
        made.take()
        assert made.rest() == []
        assert len(made.state_dict()["under_way"]) == 2 * WANTED
    assert len(engines.begun) == 3 * WANTED * MEMBERS


def test_spans_of_an_answer_are_looked_at() -> None:
    def answer(*spans: tuple[str, int, int]) -> dict[str, Any]:
        named = [dict(zip(("version", "start", "end"), span)) for span in spans]
        meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 2, "completion_tokens": 3}
        pairs = [[-1.0, token, None] for token in (5, 6, 7)]
        meta |= {"weight_version": spans[-1][0], "weight_versions": named, "output_token_logprobs": pairs}
        return {"output_ids": [5, 6, 7], "meta_info": meta}

    def read(*spans: tuple[str, int, int]) -> list[int]:
        content = json.dumps(answer(*spans)).encode()
        sample = read_answer(request(0, 0), content, Expected(9, 3, versions={"3", "4"}))
        assert sample.token_weight_versions is not None
        return sample.token_weight_versions.tolist()

    assert read(("3", 0, 2), ("4", 2, 3)) == [3, 3, 4]
    for spans, message in [
        ([("3", 0, 2)], "of 2 tokens, output_ids has 3"),
        ([("3", 0, 2), ("4", 2, 10**15)], "of 1000000000000000 tokens, output_ids has 3"),
        ([("3", 0, 1), ("4", 2, 3)], "spans without a gap"),
        ([("3", 0, 2), ("9", 2, 3)], "'9', which the run gave to no engine"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(*spans)
