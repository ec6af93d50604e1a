"""Partial rollouts: the same tokens as in one request, every group trained on once, and none too old."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.schema import MismatchConfig
from mrl.core import Prompt, Request, Sample
from mrl.data import collate
from mrl.inference.seeds import sample_seed
from mrl.sampling.dynamic_sampling import in_order
from mrl.sampling.partial_rollouts import PartialRollouts
from mrl.sampling.scheduler import Group
from mrl.trainers.rl.mismatch import MismatchLimits

WANTED, MEMBERS, MOST = 3, 2, 24


def request(group: int, member: int) -> Request:
    return Request(0, 0, Prompt(group, (group % 7, 1), {}), sample_seed(1, group, member))


class Engine:
    """An engine whose token depends only on (seed, position, version). A response ends at token 0, early or late."""

    def __init__(self, version: int = 0, has_experts: bool = False) -> None:
        self.version, self.calls, self.has_experts = version, 0, has_experts

    async def generate(self, request: Request, tokens: int) -> Sample:
        self.calls += 1
        return self.draw(request, tokens)

    def draw(self, request: Request, tokens: int) -> Sample:
        ids: list[int] = []
        while len(ids) < tokens and (not ids or ids[-1]):
            at = len(request.prompt.token_ids) + len(ids)
            noise = random.Random(f"{request.seed} {at} {self.version}")
            ids.append(0 if noise.random() < 0.02 * (1 + request.seed % 10) else noise.randrange(1, 100))
        finish = "stop" if ids[-1] == 0 else "length"
        log_probs = -np.arange(1.0, len(ids) + 1) / 100
        experts = self.experts(request, len(ids)) if self.has_experts else None
        return Sample(request, np.array(ids), log_probs, finish, str(self.version), routed_experts=experts)

    def experts(self, request: Request, drawn: int) -> np.ndarray:
        """Returns [position, version] for each requested token except the last, which is never fed to the model."""
        places = np.arange(request.routed_experts_start, len(request.prompt.token_ids) + drawn)
        found = np.stack([places, np.full_like(places, self.version)], 1)[:, None].astype(np.uint8)
        found[-1] = 0
        return found


def segments(tokens: int = 4, oversample: float = 2.0) -> PartialRollouts:
    in_flight = math.ceil(WANTED * oversample)
    return PartialRollouts(tokens, MOST, WANTED, in_flight, MEMBERS, request, Engine().generate)


def draw(made: PartialRollouts, step: int, engine: Any) -> tuple[list[Group], dict[str, float]]:
    made.generate = engine.generate
    found = asyncio.run(made.draw(step))
    return [*found.groups.values()], found.metrics


def run(made: PartialRollouts, steps: range, moving: bool = True) -> list[list[Group]]:
    """Returns the groups of each step. The weights change in every step if `moving`."""
    return [draw(made, step, Engine(step if moving else 0))[0] for step in steps]


def numbers(steps: list[list[Group]]) -> list[int]:
    return [group[0].request.prompt.index for groups in steps for group in groups]


def texts(groups: list[Group]) -> dict[tuple[int, int], list[int]]:
    return {(g[0].request.prompt.index, m): g[m].response_ids.tolist() for g in groups for m in range(MEMBERS)}


@pytest.mark.parametrize("tokens", [1, 3, 4, 12, MOST])
def test_under_the_same_weights_segments_of_any_length_give_the_tokens_drawn_at_once(tokens: int) -> None:
    found = run(segments(tokens), range(8), moving=False)
    for (group, member), ids in texts([g for groups in found for g in groups]).items():
        assert ids == Engine().draw(request(group, member), MOST).response_ids.tolist()


def test_every_group_is_learnt_once_and_those_begun_first_go_first() -> None:
    found = numbers(run(segments(), range(30)))
    assert len(set(found)) == len(found) == 30 * WANTED
    assert set(range(30 * WANTED - WANTED)) - set(found) <= set(range(20 * WANTED, 31 * WANTED)), "one was passed over"
    assert found != sorted(found), "no group was carried over"


def test_no_token_is_older_than_a_response_takes() -> None:
    tokens = 4
    steps = run(segments(tokens), range(30))
    ages = {
        step - int(s.token_weight_versions[0])
        for step, groups in enumerate(steps)
        for g in groups
        for s in g
        if s.token_weight_versions is not None
    }
    assert 0 < max(ages) <= MOST // tokens
    mixed = [
        s
        for groups in steps
        for g in groups
        for s in g
        if s.token_weight_versions is not None and len({*s.token_weight_versions.tolist()}) > 1
    ]
    for sample in mixed:  # each span continues the tokens before it with its version's weights
        assert sample.token_weight_versions is not None
        for version in {*sample.token_weight_versions.tolist()}:
            span = np.flatnonzero(sample.token_weight_versions == version)
            prompt = (*sample.request.prompt.token_ids, *sample.response_ids[: span[0]].tolist())
            again = Request(0, 0, Prompt(0, prompt, {}), sample.request.seed)
            drawn = Engine(version).draw(again, len(span)).response_ids.tolist()
            assert drawn == sample.response_ids[span].tolist()
    assert mixed


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_run() -> None:
    whole = run(segments(), range(12))
    first, then = segments(), segments()
    begun = run(first, range(5))
    then.load_state_dict(first.state_dict())
    again = begun + run(then, range(5, 12))
    for a, b in zip(whole, again, strict=True):
        assert texts(a) == texts(b)
        assert [s.token_weight_versions.tolist() for g in a for s in g if s.token_weight_versions is not None] == [
            s.token_weight_versions.tolist() for g in b for s in g if s.token_weight_versions is not None
        ]
    other = segments()
    other.load_state_dict({"steps": []})
    assert other.state_dict() == {"segments": []}


def test_a_token_keeps_the_experts_that_it_first_went_to() -> None:
    """A token keeps the experts of its segment's weights, which generated what follows; also through a checkpoint."""
    made, mixed = segments(), 0
    for step in range(8):
        again = segments()
        again.load_state_dict(made.state_dict())
        made = again
        for group in draw(made, step, Engine(step, has_experts=True))[0]:
            for one in group:
                assert one.routed_experts is not None and one.token_weight_versions is not None
                prompt, drawn = len(one.request.prompt.token_ids), len(one.response_ids)
                places, versions = one.routed_experts[:-1, 0].T
                assert places.tolist() == list(range(prompt + drawn - 1)) and not one.routed_experts[-1].any()
                by = [one.token_weight_versions[0]] * (
                    prompt - 1
                ) + one.token_weight_versions.tolist()  # of the weights of the next token
                assert versions.tolist() == by
                mixed += len({*by}) > 1
    assert mixed, "no response was drawn by several weights"


def test_a_failure_leaves_what_is_under_way_as_it_was() -> None:
    class Fails(Engine):
        async def generate(self, request: Request, tokens: int) -> Sample:
            if self.calls == 20:
                raise RuntimeError("the engine is gone")
            return await super().generate(request, tokens)

    made = segments()
    [_] = run(made, range(1))
    with pytest.raises(RuntimeError, match="gone"):
        draw(made, 1, Fails(1))
    clean = segments()
    assert texts(draw(made, 1, Engine(1))[0]) == texts(run(clean, range(2))[1])


def test_a_step_draws_no_more_than_it_needs() -> None:
    engine, made = Engine(), segments(MOST)
    _, metrics = draw(made, 0, engine)
    assert engine.calls == 2 * WANTED * MEMBERS and metrics["segments/rounds"] == 1
    short = segments(4)
    found, metrics = draw(short, 0, Engine())
    assert metrics["segments/carried_tokens"] > 0 and len(found) == WANTED


def test_ages_are_of_tokens() -> None:
    found: list[Any] = [sample for groups in run(segments(), range(9))[-1:] for sample in in_order(groups)]
    rollout = collate(8, found)
    assert (
        rollout.token_weight_versions is not None
        and rollout.token_weight_versions.tolist() == np.concatenate([s.token_weight_versions for s in found]).tolist()
    )
    limits = MismatchLimits(MismatchConfig(), print)
    where = torch.ones(rollout.num_response_tokens, dtype=torch.bool)
    metrics = limits.check(rollout, rollout.rollout_log_probs + 0.25, where, version=8)
    ages = (8 - rollout.token_weight_versions).float()
    assert metrics["staleness/mean"] == pytest.approx(float(ages.mean())) and metrics["staleness/max"] == ages.max()
    assert {name for name in metrics if name.startswith("mismatch/age")} == {
        f"mismatch/age_{int(a)}" for a in ages.unique()
    }
