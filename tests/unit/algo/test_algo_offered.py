"""Features that users of TRL and verl expect, against references in float64 written from their definitions:
bias-corrected KL, the off-policy mask, resampling by scores, corrections of token baselines, and the forms for use as a
library."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algo import (
    FlatBatch,
    Sequences,
    advantages,
    aggregate,
    kl,
    off_policy_mask,
    policy_loss,
    resampling,
    rollout_correction,
    value_loss,
    whiten,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked(rows: int = 5, length: int = 7) -> Tensor:
    """Returns a mask with rows of different lengths; the first one is empty."""
    return torch.arange(length) < torch.tensor([0, 1, 3, 7, 5])[:rows, None]


# --- losses


def test_the_bias_corrected_kl_is_exact_in_value_and_gradient() -> None:
    """The bias-corrected KL is exact: summed over a vocabulary with the old policy's probabilities, its value and
    gradient are those of KL(p, ref)."""
    logits, old, ref = randn(9, seed=1).requires_grad_(), randn(9, seed=2), randn(9, seed=3).log_softmax(-1)
    log_p, log_old = logits.log_softmax(-1), old.log_softmax(-1)
    want = (log_p.exp() * (log_p - ref)).sum()
    for drawn_by in (log_old, log_p.detach()):
        got = (drawn_by.exp() * kl.penalty("k3", log_p, ref, drawn_by)).sum()
        torch.testing.assert_close(got, want)
        slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, want)]
        torch.testing.assert_close(*slopes)
    plain = (log_old.exp() * kl.penalty("k3", log_p, ref)).sum()
    assert abs(float(plain.detach()) - float(want.detach())) > 1e-3
    with pytest.raises(ValueError, match=r"old_log_probs \[2\]"):
        kl.penalty("k3", log_p, ref, torch.zeros(2))


def test_the_off_policy_mask() -> None:
    """The mask is 0 if A < 0 and the response's mean of (sampling - present) exceeds the threshold, as in TRL."""
    mask = masked()
    now, sampling, adv = randn(5, 7, seed=1), randn(5, 7, seed=2), randn(5, 7, seed=3)
    sampling[3] = now[3] + 0.5
    threshold, want = 0.4, torch.ones(5, 7, dtype=torch.bool)
    for i in range(5):
        inside = [float(sampling[i, t] - now[i, t]) for t in range(7) if mask[i, t]]
        if inside and sum(inside) / len(inside) > threshold:
            want[i] = adv[i] >= 0
    batch = FlatBatch.of_mask(mask, "token-mean")
    inputs = batch.flat(log_probs=now, sampling_log_probs=sampling, advantages=adv)
    got = off_policy_mask.keep(**inputs, sequences=batch.sequences, threshold=threshold)
    assert torch.equal(got, want[mask]) and 0 < int((~got).sum()) < int((adv[mask] < 0).sum())
    with pytest.raises(ValueError, match="must be > 0"):
        off_policy_mask.keep(**inputs, sequences=batch.sequences, threshold=0.0)


# --- advantages


def test_whitening_without_the_shift_of_the_mean() -> None:
    values, mask = 3 + 2 * randn(5, 7), masked()
    inside = values[mask]
    want = (inside - inside.mean()) / (inside.var() + 1e-8).sqrt() + inside.mean()
    got = whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(got[mask], want, rtol=1e-7, atol=1e-9)
    assert not got[~mask].any()


def estimate(name: str, **more: Any) -> tuple[Tensor, Tensor]:
    mask, group = masked(), torch.tensor([0, 0, 1, 1, 1])
    settings: dict[str, Any] = {"token_rewards": randn(5, 7, seed=4) * mask, "response_mask": mask, "group": group}
    return advantages.compute(name, **settings | more)


def test_the_divisor_of_gpg_and_what_whitening_may_leave() -> None:
    torch.testing.assert_close(estimate("gpg", f_norm=4.0)[0], estimate("gpg")[0] / 4)
    with pytest.raises(ValueError, match="f_norm > 0"):
        estimate("gpg", f_norm=0.0)
    raw, _ = estimate("reinforce_plus_plus", whiten=False)
    scaled, _ = estimate("reinforce_plus_plus", shift_mean=False)
    torch.testing.assert_close(scaled, whiten(raw, masked(), shift_mean=False))


@pytest.mark.parametrize("zero_tail", [None, False, True])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_with_importance_weights_and_tails(name: str, zero_tail: bool | None) -> None:
    p = torch.softmax(2 * randn(5, 7, 6, seed=5), -1)
    weights = randn(5, 7, seed=6).exp()
    rewards, mask, group = randn(5, 7, seed=4) * masked(), masked(), [0, 0, 1, 1, 1]
    log_probs, squares = p[..., 0].log(), p.square().sum(-1)
    adv, returns = estimate(
        name, log_probs=log_probs, sum_pi_squared=squares, importance_weights=weights, zero_tail=zero_tail
    )
    to_go = rewards.flip(1).cumsum(1).flip(1)
    energy = ((1 - 2 * log_probs.exp() + squares) * weights**2 * mask).cumsum(1)
    tails = name.startswith("tir") if zero_tail is None else zero_tail
    for i, t in mask.nonzero().tolist():
        others = [j for j in range(5) if group[j] == group[i] and mask[j, t]]
        baseline = sum(float(to_go[j, t] * energy[j, t]) for j in others) / sum(float(energy[j, t]) for j in others)
        baseline = 0.0 if tails and len(others) == 1 else baseline
        assert float(adv[i, t]) == pytest.approx(float(to_go[i, t]) - baseline, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(returns[mask], to_go[mask])
    assert bool((adv[3, 5:].abs() > 1e-6).any()) == tails  # the longest of its group


# --- resampling


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        ("pow", lambda s, scores: abs(s) ** 3),
        ("max_min", lambda s, scores: float(s in (max(scores), min(scores)))),
        ("max_random", lambda s, scores: 0.4 if s == max(scores) else 0.1),
    ],
)
def test_samples_are_drawn_in_proportion_to_their_weights(method: str, weight: Any) -> None:
    scores = [0.0, 1.0, -0.5, 0.25, 1.0, -0.5, 0.75]
    repeats = 2000
    found = resampling.draw(method, torch.tensor(scores * repeats), torch.Generator().manual_seed(1), 3.0)
    assert found.numel() == len(scores) * repeats
    shares = torch.bincount(found % len(scores), minlength=len(scores)) / found.numel()
    weights = torch.tensor([weight(s, scores) for s in scores])
    torch.testing.assert_close(shares, weights / weights.sum(), rtol=0.1, atol=0.005)


def test_a_draw_follows_from_its_generator_and_equal_scores_are_all_right() -> None:
    def drawn(seed: int, scores: Tensor) -> list[int]:
        return resampling.draw("pow", scores, torch.Generator().manual_seed(seed)).tolist()

    zeros = torch.zeros(50)  # as in verl an epsilon prevents a division by zero
    assert drawn(1, zeros) == drawn(1, zeros) != drawn(2, zeros)
    with pytest.raises(ValueError, match="not finite"):
        drawn(1, torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="unknown reweighting method 'power'"):
        resampling.draw("power", zeros, torch.Generator())


# --- corrections


def test_how_far_the_policies_are_from_each_other() -> None:
    mask = masked()
    engine = -randn(5, 7, seed=1).abs().masked_fill(~mask, math.nan)
    trainer = engine - 0.3 * randn(5, 7, seed=2)
    rows = [
        [(float(a), float(b)) for a, b, m in zip(*x, strict=True) if m] for x in zip(trainer, engine, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    log_ppl = [[-sum(x) / len(x) for x in zip(*row, strict=True)] for row in rows]
    diff = [a - b for a, b in log_ppl]
    ratios = [a - b for row in rows for a, b in row]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    assert rollout_correction.gap(trainer, engine, mask) == pytest.approx(
        {
            "training_ppl": mean([math.exp(a) for a, _ in log_ppl]),
            "training_log_ppl": mean([a for a, _ in log_ppl]),
            "rollout_ppl": mean([math.exp(b) for _, b in log_ppl]),
            "rollout_log_ppl": mean([b for _, b in log_ppl]),
            "log_ppl_diff": mean(diff),
            "log_ppl_abs_diff": mean([abs(d) for d in diff]),
            "log_ppl_diff_max": max(diff),
            "log_ppl_diff_min": min(diff),
            "ppl_ratio": mean([math.exp(d) for d in diff]),
            "chi2_token": mean([math.exp(2 * x) for x in ratios]) - 1,
            "chi2_seq": mean([math.exp(2 * sum(a - b for a, b in row)) for row in rows]) - 1,
        }
    )
    nothing = rollout_correction.gap(trainer, engine, mask & False)
    assert set(nothing.values()) == {0.0}


def test_a_correction_of_plain_tensors() -> None:
    mask, engine = masked(), -randn(5, 7, seed=1).abs()
    trainer = engine + 0.8 * randn(5, 7, seed=2)
    criteria = [rollout_correction.Criterion("seq_mean_k2", 0.0, 0.3)]
    made = rollout_correction.correct(trainer, engine, mask, level="token", upper=1.5, criteria=criteria)
    weights, _ = rollout_correction.importance_weights(trainer - engine, mask, level="token", lower=None, upper=1.5)
    keep, _ = rollout_correction.reject(trainer - engine, mask, criteria)
    assert made.weights is not None and torch.equal(made.weights, weights) and torch.equal(made.keep, keep)
    means = [float((trainer - engine)[i][mask[i]].exp().mean()) for i in range(1, 5)]
    seq = {name: made.metrics[f"rollout_is_seq_{name}"] for name in ("mean", "std", "min", "max", "max_deviation")}
    mean = sum(means) / 4
    want = {"mean": mean, "std": math.sqrt(sum((x - mean) ** 2 for x in means) / 3), "min": min(means)}
    want |= {"max": max(means), "max_deviation": max(abs(x - 1) for x in means)}
    assert seq == pytest.approx(want)
    assert {"chi2_token", "rollout_rs_masked_fraction", "rollout_is_mean"} <= set(made.metrics)
    untouched = rollout_correction.correct(trainer, engine, mask)
    assert untouched.weights is None and torch.equal(untouched.keep, mask)


def test_geometric_means_of_the_weights_of_whole_responses() -> None:
    mask = masked()
    weights = randn(5, 7).exp()
    got = rollout_correction.geometric_means(weights[mask], Sequences.of_mask(mask))
    want = [float(weights[i][mask[i]].log().mean().exp()) for i in mask.nonzero()[:, 0].tolist()]
    assert got.tolist() == pytest.approx(want)


# --- for use as a library

MODES = aggregate.MODES.names()


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_a_mini_batch_add_up_to_its_aggregate(mode: str) -> None:
    mask, loss = masked(), randn(5, 7).masked_fill(~masked(), math.nan)
    whole = aggregate.agg_loss(mode, loss, mask, 3.0)
    assert whole.dtype == torch.float64
    counts = {"tokens": int(mask.sum()), "sequences": int(mask.any(1).sum())}
    parts = [aggregate.agg_loss(mode, loss[i : i + 2], mask[i : i + 2], 3.0, **counts) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-14, atol=0)
    for dtype in (torch.float64, torch.bfloat16):
        assert aggregate.token_weights(mode, mask, dtype=dtype).dtype == dtype


def test_float64_losses_lose_nothing() -> None:
    loss, mask = torch.full((1, 3), 0.1, dtype=torch.float64), torch.ones(1, 3)
    assert float(aggregate.agg_loss("token-mean", loss, mask)) == pytest.approx(0.1, rel=1e-15)


def test_counts_that_cannot_be_the_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens=3 of the whole mini-batch, but the mask alone has 16"):
        aggregate.token_weights("token-mean", masked(), tokens=3)
    with pytest.raises(ValueError, match="sequences=1 of"):
        aggregate.token_weights("seq-mean-token-sum", masked(), sequences=1)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gspo_from_dense_tensors(mode: str) -> None:
    """gspo from dense tensors equals the formula, also with the mean over tokens if that is requested."""
    mask = masked()
    new, old, adv = randn(5, 7, seed=1), randn(5, 7, seed=2), randn(5, 7, seed=3)
    batch = FlatBatch.of_mask(mask, mode, dtype=torch.float64)
    flat = batch.flat(log_probs=new, old_log_probs=old, advantages=adv)
    got, metrics = policy_loss.compute("gspo", **flat, **batch.inputs, clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss = torch.zeros(5, 7, dtype=torch.float64)
    for i in range(1, 5):
        s = math.exp(float((new - old)[i][mask[i]].mean()))
        for t in mask[i].nonzero()[:, 0].tolist():
            a = float(adv[i, t])
            loss[i, t] = max(-a * s, -a * min(max(s, 0.8), 1.2))
    assert float(got) == pytest.approx(float(aggregate.agg_loss(mode, loss, mask)), rel=1e-12)
    assert float(metrics["ppo_kl"]) == pytest.approx(float((old - new)[mask].mean()))
    assert torch.equal(batch.dense(flat["advantages"]), adv.masked_fill(~mask, 0))


@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_takes_every_aggregate(mode: str) -> None:
    mask = masked()
    values, old, returns = randn(5, 7, seed=1), randn(5, 7, seed=2), randn(5, 7, seed=3)
    batch = FlatBatch.of_mask(mask, mode, 4.0, dtype=torch.float64)
    flat = batch.flat(values=values, old_values=old, returns=returns)
    got, _ = value_loss.compute(**flat, weights=batch.weights)
    near = old + (values - old).clamp(-0.5, 0.5)
    each = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    assert float(got) == pytest.approx(float(aggregate.agg_loss(mode, each, mask, 4.0)), rel=1e-12)


def test_sums_over_responses_are_those_of_whole_ones_wherever_their_tokens_lie() -> None:
    mask, values = masked(), randn(5, 7)
    sequences = Sequences.of_mask(mask)
    order = torch.randperm(int(mask.sum()), generator=torch.Generator().manual_seed(0))
    shuffled = replace(sequences, member=sequences.member[order], counted=sequences.counted[order])
    want = (values * mask).sum(1)[sequences.member]
    torch.testing.assert_close(sequences.sum(values[mask][None])[0], want)
    torch.testing.assert_close(shuffled.sum(values[mask][order][None])[0], want[order])
