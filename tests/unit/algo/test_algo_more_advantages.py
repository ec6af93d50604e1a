"""remax, gdpo and the optimal token baselines against references in float64, written one response and token at a time,
and invariances of all estimators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from mrl.algo import advantages
from tests.unit.algo.test_algo_advantages import grpo_reference, random_mask, whiten_reference

WHITENED = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def inputs(rows: int, length: int, holes: bool, seed: int = 0) -> dict[str, Any]:
    """Returns all estimators' inputs, with an empty and a full response, a group of one, and a group of equal
    scores."""
    gen = torch.Generator().manual_seed(1000 * rows + length + seed)
    logits = 3 * torch.randn(rows, length, 7, generator=gen, dtype=torch.float64)
    p = logits.softmax(-1)
    scores = torch.randn(rows, length, generator=gen, dtype=torch.float64)
    scores[1] = scores[3] = 0
    group = torch.arange(rows) // 3 * 10
    group[1] = group[3] = 5
    group[-1] = 99
    return {
        "token_rewards": scores,
        "response_mask": random_mask(gen, rows, length, holes),
        "group": group,
        "values": torch.randn(rows, length, generator=gen, dtype=torch.float64),
        "greedy_scores": torch.randn(rows, generator=gen, dtype=torch.float64),
        "score_parts": torch.randn(rows, 3, generator=gen, dtype=torch.float64) * torch.tensor([1.0, 100.0, 0.0]),
        "part_weights": (1.0, 0.5, 2.0),
        "log_probs": p[..., 0].log(),
        "sum_pi_squared": p.square().sum(-1),
    }


def to_go(rewards: Tensor, mask: Tensor, i: int) -> dict[int, float]:
    """Returns position -> sum of the rewards from there on, inside the mask."""
    out, running, row = {}, 0.0, rewards[i].tolist()
    for t in reversed(mask[i].nonzero().flatten().tolist()):
        running += row[t]
        out[t] = running
    return dict(sorted(out.items()))


def remax_reference(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    adv, ret = torch.zeros_like(x["token_rewards"]), torch.zeros_like(x["token_rewards"])
    for i in range(len(adv)):
        for t, value in to_go(x["token_rewards"], x["response_mask"], i).items():
            ret[i, t], adv[i, t] = value, value - float(x["greedy_scores"][i])
    return adv, ret


def token_baseline_reference(x: dict[str, Any], tir: bool) -> tuple[Tensor, Tensor]:
    """Computes the baseline B_t over the responses with a token at t. With `tir`, t counts tokens inside the mask."""
    mask, group = x["response_mask"], x["group"].tolist()
    adv, ret = torch.zeros_like(x["token_rewards"]), torch.zeros_like(x["token_rewards"])
    at: dict[tuple[int, int], list[tuple[int, int, float, float]]] = {}  # (group, t) -> (row, column, G, W)
    for i in range(len(adv)):
        energy, log_probs, squares = 0.0, x["log_probs"][i].tolist(), x["sum_pi_squared"][i].tolist()
        for place, (t, value) in enumerate(to_go(x["token_rewards"], mask, i).items()):
            energy += 1 - 2 * math.exp(log_probs[t]) + squares[t]
            at.setdefault((group[i], place if tir else t), []).append((i, t, value, energy))
    for (number, _), entries in at.items():
        baseline = sum(g * w for _, _, g, w in entries) / (sum(w for *_, w in entries) + 1e-8)
        if group.count(number) == 1 or (tir and len(entries) == 1):
            baseline = 0.0
        for i, t, value, _ in entries:
            adv[i, t], ret[i, t] = value - baseline, value
    return adv, ret


def gdpo_reference(x: dict[str, Any], norm: bool) -> Tensor:
    mask, total = x["response_mask"], torch.zeros_like(x["token_rewards"])
    for part, weight in zip(x["score_parts"].unbind(1), x["part_weights"], strict=True):
        total += weight * grpo_reference(pad(part[:, None], (0, mask.shape[1] - 1)), mask, x["group"], norm)
    return total


SIZES = pytest.mark.parametrize(("rows", "length"), [(4, 1), (10, 6), (31, 140)])
HOLES = pytest.mark.parametrize("holes", [False, True])


@SIZES
@HOLES
@pytest.mark.parametrize("name", ["remax", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_estimators_of_rewards_to_go(name: str, rows: int, length: int, holes: bool) -> None:
    x = inputs(rows, length, holes)
    want = remax_reference(x) if name == "remax" else token_baseline_reference(x, name.startswith("tir"))
    for got, right in zip(advantages.compute(name, **x), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    float32 = {k: v.float() if isinstance(v, Tensor) and torch.is_floating_point(v) else v for k, v in x.items()}
    narrow, _ = advantages.compute(name, **float32)
    torch.testing.assert_close(narrow.double(), want[0], rtol=1e-3, atol=1e-3)


@SIZES
@HOLES
@pytest.mark.parametrize("norm", [True, False])
def test_gdpo(rows: int, length: int, holes: bool, norm: bool) -> None:
    x = inputs(rows, length, holes)
    x["response_mask"][1:3] = True
    want = gdpo_reference(x, norm)
    adv, returns = advantages.compute("gdpo", **x, norm_adv_by_std_in_grpo=norm)
    torch.testing.assert_close(adv, whiten_reference(want, x["response_mask"]), rtol=1e-9, atol=1e-9)
    assert torch.equal(adv, returns)
    plain, _ = advantages.compute("gdpo", **x, norm_adv_by_std_in_grpo=norm, whiten=False)
    torch.testing.assert_close(plain, want, rtol=1e-9, atol=1e-9)


def test_gdpo_gives_a_small_component_the_weight_of_a_large_one() -> None:
    x = inputs(12, 5, holes=False)
    both = {"score_parts": x["score_parts"][:, :2], "part_weights": None, "group": torch.arange(12) // 4}
    adv, _ = advantages.compute("gdpo", **x | both)
    scaled, _ = advantages.compute("gdpo", **x | both | {"score_parts": both["score_parts"] * torch.tensor([1, 1e4])})
    torch.testing.assert_close(adv, scaled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WHITENED)
def test_whitening_can_be_switched_off(name: str) -> None:
    x = inputs(10, 6, holes=True)
    white, returns = advantages.compute(name, **x)
    plain, same = advantages.compute(name, **x, whiten=False)
    torch.testing.assert_close(whiten_reference(plain, x["response_mask"]), white, rtol=1e-9, atol=1e-9)
    if name != "gdpo" and not name.endswith("baseline"):  # the other estimators return their advantages
        assert torch.equal(returns, same)


def test_certain_tokens_have_no_weight_and_break_nothing() -> None:
    """Certain tokens have no weight and cause no division by zero: with pi = 1 the energy is 0, or slightly less in
    float32, and the baseline is 0."""
    ones = torch.ones(2, 4)
    adv, _ = advantages.compute(
        "optimal_token_baseline",
        token_rewards=torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 2.0]]),
        response_mask=ones,
        group=torch.zeros(2, dtype=torch.int64),
        log_probs=0 * ones,
        sum_pi_squared=ones - 1e-6,
    )
    assert torch.equal(adv, torch.tensor([[1.0], [2.0]]).expand(2, 4))


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("remax", "greedy_scores", "'remax' needs greedy_scores"),
        ("gdpo", "score_parts", "'gdpo' needs score_parts"),
        ("optimal_token_baseline", "sum_pi_squared", "need log_probs and sum_pi_squared"),
        ("tir_optimal_token_baseline", "log_probs", "need log_probs and sum_pi_squared"),
    ],
)
def test_what_an_estimator_needs_is_named(name: str, missing: str, says: str) -> None:
    x = inputs(6, 3, holes=False)
    with pytest.raises(ValueError, match=says):
        advantages.compute(name, **{key: value for key, value in x.items() if key != missing})


def test_wrong_numbers_of_things_are_refused() -> None:
    x = inputs(6, 3, holes=False)
    with pytest.raises(ValueError, match="2 part_weights for 3 score_parts"):
        advantages.compute("gdpo", **x | {"part_weights": (1.0, 2.0)})
    with pytest.raises(ValueError, match=r"greedy_scores \[5\]"):
        advantages.compute("remax", **x | {"greedy_scores": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"sum_pi_squared \[6, 4\]"):
        advantages.compute("remax", **x | {"sum_pi_squared": torch.zeros(6, 4)})


@pytest.mark.parametrize("name", advantages.ESTIMATORS.names())
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(4, 12), length=st.integers(1, 9), holes=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_order_padding_group_names_and_what_lies_outside_the_mask(
    name: str, rows: int, length: int, holes: bool, seed: int, data: st.DataObject
) -> None:
    x = inputs(rows, length, holes, seed)
    if name == "grpo_passk":
        x["group"] = torch.arange(rows) % (rows // 2)
    x["token_rewards"].masked_fill_(~x["response_mask"], 0)
    adv, returns = advantages.compute(name, **x)
    assert torch.equal(adv[~x["response_mask"]], torch.zeros(int((~x["response_mask"]).sum()), dtype=adv.dtype))

    order = torch.tensor(data.draw(st.permutations(range(rows))))
    width = data.draw(st.integers(0, 5))
    moved = {key: value[order] if isinstance(value, Tensor) else value for key, value in x.items()}
    for key in ("token_rewards", "values", "log_probs", "sum_pi_squared"):
        junk = 0.0 if key == "token_rewards" else 7.0
        moved[key] = pad(moved[key], (0, width), value=junk).masked_fill(~pad(moved["response_mask"], (0, width)), junk)
    moved["response_mask"] = pad(moved["response_mask"], (0, width))
    moved["group"] = 1000 - 7 * moved["group"]
    for before, after in zip((adv, returns), advantages.compute(name, **moved), strict=True):
        torch.testing.assert_close(after, pad(before[order], (0, width)), rtol=1e-9, atol=1e-9)
