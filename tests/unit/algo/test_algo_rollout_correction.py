"""Importance weights, rejection and mismatch, number by number in float64, and the configuration's thresholds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.algo import advantages, aggregate, custom, policy_loss, rollout_correction
from mrl.algo.rollout_correction import CRITERIA, Criterion
from mrl.config.schema import RolloutCorrectionConfig
from tools.bench import overlap

ONES = torch.ones(1, 2, dtype=torch.bool)


def log_ratios(spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns log-ratios with holes, an empty response and extreme values, and NaN outside the mask, with the mask."""
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 8, generator=gen) < 0.7
    mask[2] = False
    lr = spread * torch.randn(6, 8, generator=gen, dtype=torch.float64)
    lr[4, 0], mask[4, 0] = 50.0, True
    lr[5, 0], mask[5, 0] = -50.0, True
    return lr.masked_fill(~mask, math.nan), mask


def rows(lr: Tensor, mask: Tensor) -> list[list[float]]:
    return [[float(x) for x, m in zip(*row, strict=True) if m] for row in zip(lr, mask, strict=True)]


def exp20(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, 2.0), (0.0, 5.0), (None, math.inf)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("spread", [0.01, 1.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(level: str, bounds: tuple[float | None, float], spread: float, normalize: bool) -> None:
    lr, mask = log_ratios(spread)
    lower, upper = bounds
    raw = [[exp20(x if level == "token" else sum(row)) for x in row] for row in rows(lr, mask)]
    cut = [[min(w, upper) if lower is None else w * (lower <= w <= upper) for w in row] for row in raw]
    flat = [w for row in cut for w in row]
    ess = (sum(flat) / len(flat)) ** 2 / (sum(w * w for w in flat) / len(flat))
    per_response = [row[0] for row in cut if row]
    mean = sum(flat) / len(flat) if level == "token" else sum(per_response) / len(per_response)
    got, metrics = rollout_correction.importance_weights(
        lr, mask, level=level, lower=lower, upper=upper, batch_normalize=normalize
    )
    factor = mean if normalize else 1.0
    want = [[w / factor for w in row] for row in cut]
    assert rows(got, mask) == [pytest.approx(row, rel=1e-9) for row in want]
    assert not got[~mask].any()
    everything = [w for row in raw for w in row]
    assert metrics["rollout_is_mean"] == pytest.approx(sum(everything) / len(everything))
    assert (metrics["rollout_is_min"], metrics["rollout_is_max"]) == pytest.approx((min(everything), max(everything)))
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(ess)
    n = len(everything)
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(sum(w > upper for w in everything) / n)
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(sum(w < (lower or 0) for w in everything) / n)
    assert ("rollout_is_batch_norm_factor" in metrics) == normalize


def statistic(name: str, row: list[float]) -> list[float]:
    level, kind = name.rsplit("_", 1)
    row = [min(max(x, -20.0), 20.0) for x in row]
    k = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    values = [k(x) for x in row]
    whole = {"token": None, "seq_sum": sum, "seq_max": max, "seq_mean": lambda v: sum(v) / len(v)}[level]
    return values if whole is None or not row else [whole(values)] * len(row)


@pytest.mark.parametrize("spread", [0.01, 0.5])
@pytest.mark.parametrize("name", CRITERIA)
def test_rejection(name: str, spread: float) -> None:
    lr, mask = log_ratios(spread, seed=3)
    statistics = [statistic(name, row) for row in rows(lr, mask)]
    median = sorted(abs(x) for row in statistics for x in row)[int(mask.sum()) // 2] * 1.01
    k1 = name.endswith("k1")
    lower, upper = (math.exp(-0.7 * median), math.exp(1.1 * median)) if k1 else (0.0, median)
    want = [[-0.7 * median <= x <= 1.1 * median if k1 else x <= median for x in row] for row in statistics]
    keep, metrics = rollout_correction.reject(lr, mask, [Criterion(name, lower, upper)])
    assert [[bool(x) for x, m in zip(*row, strict=True) if m] for row in zip(keep, mask, strict=True)] == want
    assert not keep[~mask].any()
    tokens, responses = [x for row in want for x in row], [all(row) for row in want if row]
    assert metrics == pytest.approx(
        {
            "rollout_rs_masked_fraction": 1 - sum(tokens) / len(tokens),
            f"rollout_rs_{name}_masked_fraction": 1 - sum(tokens) / len(tokens),
            "rollout_rs_seq_masked_fraction": 1 - sum(responses) / len(responses),
        }
    )
    assert 0 < metrics["rollout_rs_masked_fraction"] < 1


def test_a_token_must_pass_every_criterion() -> None:
    lr, mask = log_ratios(0.5)
    criteria = [Criterion("token_k1", 0.7, 1.4), Criterion("seq_mean_k3", 0.0, 0.2)]
    both, metrics = rollout_correction.reject(lr, mask, criteria)
    one, two = (rollout_correction.reject(lr, mask, [criterion])[0] for criterion in criteria)
    assert torch.equal(both, one & two) and both.any() and not torch.equal(one, both) and not torch.equal(two, both)
    assert set(metrics) == {
        f"rollout_rs_{x}masked_fraction" for x in ("", "seq_", "token_k1_", "seq_mean_k3_")
    }  # fmt: skip


def test_equal_policies_are_left_alone() -> None:
    _, mask = log_ratios(1.0)
    lr = torch.zeros(mask.shape)
    keep, cut = rollout_correction.reject(lr, mask, [Criterion(name, 0.999, 1.001) for name in CRITERIA])
    assert torch.equal(keep, mask) and not any(cut.values())
    for level in rollout_correction.LEVELS:
        weights, metrics = rollout_correction.importance_weights(lr, mask, level=level, lower=0.5, upper=2.0)
        assert torch.equal(weights, mask.float())
        assert metrics["rollout_is_eff_sample_size"] == 1


def test_nothing_to_correct() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    lr = torch.zeros(2, 3)
    keep, _ = rollout_correction.reject(lr, mask, [Criterion("seq_max_k2", 0.0, 1.0)])
    weights, _ = rollout_correction.importance_weights(
        lr, mask, level="token", lower=None, upper=2.0, batch_normalize=True
    )
    assert not keep.any() and torch.equal(weights, torch.zeros(2, 3))
    assert rollout_correction.mismatch(lr[0], lr[0], mask[0])["mean_abs"] == 0


def test_mismatch() -> None:
    lr, mask = log_ratios(0.3, seed=2)
    engine = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2
    x = [value for row in rows(lr, mask) for value in row]
    w = [exp20(value) for value in x]
    n = len(x)
    assert rollout_correction.mismatch(engine + lr, engine, mask) == pytest.approx(
        {
            "mean_abs": sum(abs(v) for v in x) / n,
            "max_abs": 50.0,
            "kl": -sum(x) / n,
            "k3_kl": sum(exp20(v) - 1 - min(max(v, -20.0), 20.0) for v in x) / n,
            "ess": sum(w) ** 2 / n / sum(v * v for v in w),
        },
        rel=1e-6,
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 500), level=st.sampled_from(["token", "sequence"]), pad=st.integers(1, 4), data=st.data())
def test_padding_and_the_order_of_responses_do_not_matter(seed: int, level: str, pad: int, data: st.DataObject) -> None:
    lr, mask = log_ratios(0.3, seed)
    order = torch.tensor(data.draw(st.permutations(range(6))))
    wide_lr = torch.cat([lr[order], torch.full((6, pad), 7.0)], 1)
    wide_mask = torch.cat([mask[order], torch.zeros(6, pad, dtype=torch.bool)], 1)
    criteria = [Criterion("seq_mean_k1", 0.9, 1.2), Criterion("token_k3", 0.0, 0.1)]

    def both(lr: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        weights, metrics = rollout_correction.importance_weights(
            lr, mask, level=level, lower=0.5, upper=2.0, batch_normalize=True
        )
        keep, cut = rollout_correction.reject(lr, mask, criteria)
        return weights, keep, metrics | cut

    want_weights, want_keep, want_metrics = both(lr, mask)
    weights, keep, metrics = both(wide_lr, wide_mask)
    torch.testing.assert_close(weights[:, :8], want_weights[order])
    assert torch.equal(keep[:, :8], want_keep[order]) and not keep[:, 8:].any()
    assert metrics == pytest.approx(want_metrics)


def test_the_decoupled_loss() -> None:
    """The decoupled loss equals eq. 5 of arXiv 2505.24298. As in AReaL, tokens with a behaviour weight above the cap
    count 0, and the denominator includes all tokens."""
    gen = torch.Generator().manual_seed(0)
    behaviour, proximal, policy, adv = (torch.randn(3, 9, generator=gen, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(3, 9, generator=gen) < 0.8
    cap, total = 1.5, 0.0
    for i, j in mask.nonzero().tolist():
        weight = math.exp(float(proximal[i, j] - behaviour[i, j]))
        ratio, a = math.exp(float(policy[i, j] - proximal[i, j])), float(adv[i, j])
        clipped = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        total += -weight * (max(clipped, 3.0 * a) if a < 0 else clipped) * (weight <= cap)
    weights, _ = rollout_correction.importance_weights(proximal - behaviour, mask, level="token", lower=0.0, upper=cap)
    got, _ = policy_loss.compute(
        "vanilla",
        log_probs=policy,
        old_log_probs=proximal,
        advantages=adv,
        weights=aggregate.token_weights("token-mean", mask) * weights,
    )
    assert float(got) == pytest.approx(total / int(mask.sum()), rel=1e-6)


def test_the_benchmark_reads_on_policy_runs_which_log_no_staleness(tmp_path: Path) -> None:
    weights = ("is_max", "is_eff_sample_size", "is_ratio_fraction_high")
    row = {"step": 1, "reward/mean": 0.5, **{f"rollout_corr/rollout_{name}": 1.0 for name in weights}}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'step': 2, 'reward/mean': 1.0})}\n")
    found = overlap.curve(tmp_path)
    assert (found["staleness"], found["mean"], found["weight_max"]) == (0.0, 0.75, 1.0)


def test_a_bench_takes_the_correction_back() -> None:
    """The estimator of tools/bench/overlap.py removes the importance weights, which would change the gradients."""
    gen = torch.Generator().manual_seed(0)
    lr, rewards, old = (torch.randn(6, 8, generator=gen) for _ in range(3))
    mask = torch.rand(6, 8, generator=gen) < 0.7
    weights, _ = rollout_correction.importance_weights(lr, mask, level="token", lower=None, upper=2.0)
    batch = {"token_rewards": rewards, "response_mask": mask, "group": torch.arange(6) // 3}
    plain, _ = advantages.compute("grpo", **batch, norm_adv_by_std_in_grpo=True)
    file = Path(__file__).parents[3] / "tools" / "bench" / "uncorrected.py"
    takes_back = custom.load_custom_estimator(f"{file}:uncorrected", {}, has_values=False)
    undone, _ = advantages.compute(takes_back, **batch, importance_weights=weights)

    def gradient(adv: Tensor, factors: Tensor) -> Tensor:
        log_probs = (old + rewards / 4)[mask].requires_grad_()
        loss, _ = policy_loss.compute(
            "vanilla", log_probs=log_probs, old_log_probs=old[mask], advantages=adv[mask], weights=factors[mask]
        )
        return torch.autograd.grad(loss, log_probs)[0]

    want = gradient(plain, torch.ones_like(weights))
    torch.testing.assert_close(gradient(undone, weights), want)
    assert (gradient(plain, weights) - want).abs().max() > 0.1


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("2.0", (None, 2.0)), (2, (None, 2.0)), ("0.5_2.0", (0.5, 2.0)), ("0_5", (0.0, 5.0)), ("inf", (None, math.inf))],
)
def test_thresholds_of_weights(text: Any, bounds: tuple[float | None, float]) -> None:
    cfg = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "rollout_is_threshold": text})
    assert cfg.importance_bounds() == bounds


@pytest.mark.parametrize("text", ["0.5", "", "2.0_3.0", "-1_2", "a_b", "nan", "2_", "1_2_3"])
def test_bad_thresholds_of_weights(text: str) -> None:
    cfg = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "rollout_is_threshold": text})
    with pytest.raises(ValueError, match="excludes the weight 1|neither a number"):
        cfg.importance_bounds()


def test_criteria_are_written_as_in_verl_or_as_lists() -> None:
    want = [("token_k1", 0.5, 2.0), ("seq_mean_k3", 0.0, 0.01)]
    for rs, threshold in (("token_k1, seq_mean_k3", "2.0,0.01"), (("token_k1", "seq_mean_k3"), ("0.5_2.0", 0.01))):
        cfg = RolloutCorrectionConfig.model_validate({"rollout_rs": rs, "rollout_rs_threshold": threshold})
        assert cfg.criteria() == want
    shared = RolloutCorrectionConfig.model_validate({"rollout_rs": "token_k2,seq_max_k2", "rollout_rs_threshold": 0.1})
    assert shared.criteria() == [("token_k2", 0.0, 0.1), ("seq_max_k2", 0.0, 0.1)]


@pytest.mark.parametrize(
    ("rs", "threshold"),
    [("token_k1", "0"), ("token_k1", "2_0.5"), ("token_k1", "0.5_0.9"), ("token_k2", "-1"), ("token_k2", "0.1_2"),
     ("token_k1,token_k2,token_k3", "1,2"), ("token_k2", "x"), ("token_k2", "nan")],
)  # fmt: skip
def test_bad_criteria(rs: str, threshold: str) -> None:
    cfg = RolloutCorrectionConfig.model_validate({"rollout_rs": rs, "rollout_rs_threshold": threshold})
    with pytest.raises(ValueError, match=f"for {rs}: expected|thresholds for|neither a number"):
        cfg.criteria()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown rejection criterion 'seq_max_k1' .known: token_k1"):
        Criterion("seq_max_k1", 0.5, 2.0)
    with pytest.raises(ValueError, match="unknown level 'geometric'"):
        rollout_correction.importance_weights(torch.zeros(1, 2), ONES, level="geometric", lower=None, upper=2.0)
