"""Functions under verl's names: each against the reference of its flat form, on masks with holes and empty rows and NaN
outside the mask; small cases by hand; and verl's signatures."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.algo import core, rollout_correction, token_choice
from mrl.algo.sequences import Sequences
from tests.unit.algo.test_algo_advantages import gae_reference, grpo_reference, random_mask, whiten_reference
from tests.unit.algo.test_algo_group_advantages import reference as group_reference
from tests.unit.algo.test_algo_losses import KL_FORMULAS, ppo_token
from tests.unit.algo.test_algo_more_policy_losses import COEF, HIGH, LOW, Batch, sequence_reference, token_reference
from tests.unit.algo.test_algo_policy_losses import TOKEN

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
BOUNDS = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}


def aggregate_reference(loss: Tensor, mask: Tensor, mode: str) -> float:
    rows = [[float(x) for x in row[inside]] for row, inside in zip(loss, mask.bool(), strict=True)]
    rows = [row for row in rows if row]
    every = [x for row in rows for x in row]
    sums, means = sum(every) / len(rows), sum(sum(row) / len(row) for row in rows) / len(rows)
    norm = sums / mask.shape[1]
    return dict(zip(MODES, (sum(every) / len(every), sum(every), sums, means, norm), strict=True))[mode]


class Dense:
    """The tokens of a Batch at random columns of their rows, with NaN elsewhere."""

    def __init__(self, spread: float, seed: int = 4) -> None:
        lengths = [7, 0, 1, 20, 12]
        self.batch = Batch(lengths, spread, seed)
        gen = torch.Generator().manual_seed(seed)
        order = torch.rand(len(lengths), 25, generator=gen).argsort(1).argsort(1)
        self.mask = order < torch.tensor(lengths)[:, None]
        self.old, self.new, self.adv = (
            self.of(x) for x in (self.batch.old, self.batch.log_probs, self.batch.advantages)
        )

    def of(self, flat: Tensor) -> Tensor:
        return torch.full(self.mask.shape, math.nan, dtype=flat.dtype).masked_scatter(self.mask, flat)

    def loss(self, name: str, mask: Tensor | None = None, **more: Any) -> tuple[Tensor, dict[str, float]]:
        function = getattr(core, f"compute_policy_loss_{name}")
        return function(self.old, self.new, self.adv, self.mask if mask is None else mask, **more)

    def token_losses(self, name: str, chosen: Tensor | None = None) -> list[float]:
        b, n = self.batch, int(self.mask.sum())
        rows = list(zip(b.log_probs.tolist(), b.old.tolist(), b.advantages.tolist(), strict=True))
        if name == "vanilla":
            return [ppo_token(*row, LOW, HIGH, 3.0)[0] for row in rows]
        if name in TOKEN:
            return [TOKEN[name][1](*row) for row in rows]
        picked = [False] * n if chosen is None else chosen[self.mask].tolist()
        return [token_reference(name, *row, c)[0] for row, c in zip(rows, picked, strict=True)]


OPTIONS: dict[str, dict[str, float]] = {
    "vanilla": BOUNDS,
    "gpg": {},
    "cispo": TOKEN["cispo"][0],
    "sapo": TOKEN["sapo"][0],
    "dppo_tv": BOUNDS,
    "dppo_kl": BOUNDS,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_token_losses(name: str, mode: str) -> None:
    dense = Dense(0.5)
    mode = "seq-mean-token-mean" if name == "sapo" else mode
    each = dense.of(torch.tensor(dense.token_losses(name), dtype=torch.float64))
    got, metrics = dense.loss(name, loss_agg_mode=mode, **OPTIONS[name])
    rel = 1e-6 if name == "dppo_kl" else 1e-10
    assert float(got) == pytest.approx(aggregate_reference(each, dense.mask, mode), rel=rel)
    assert float(core.agg_loss(each, dense.mask.long(), mode)) == pytest.approx(float(got), rel=rel)
    assert set(metrics) == {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"}
    assert metrics["actor/ppo_kl"] == pytest.approx(float((dense.old - dense.new)[dense.mask].mean()))
    weights = dense.of(torch.linspace(0.1, 2.0, int(dense.mask.sum()), dtype=torch.float64)).requires_grad_()
    got, weighted = dense.loss(name, loss_agg_mode=mode, rollout_is_weights=weights, **OPTIONS[name])
    assert float(got) == pytest.approx(aggregate_reference(each * weights.detach(), dense.mask, mode), rel=rel)
    assert weighted == metrics and not got.requires_grad


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_losses_of_responses_have_one_aggregation(name: str) -> None:
    dense = Dense(0.3)
    for mode in MODES:
        got, _ = dense.loss(name, loss_agg_mode=mode, **BOUNDS)
        assert float(got) == pytest.approx(sequence_reference(name, dense.batch), rel=1e-12)
    weights = torch.rand(int(dense.mask.sum()), dtype=torch.float64) + 0.5
    got, _ = dense.loss(name, rollout_is_weights=dense.of(weights), **BOUNDS)
    flat = rollout_correction.geometric_means(weights, Sequences.of_mask(dense.mask)) if name == "geo_mean" else weights
    dense.batch.weights = dense.batch.seq_mean_token_mean() * flat
    assert float(got) == pytest.approx(float(dense.batch.loss(name, dense.batch.log_probs)[0]), rel=1e-12)


def test_losses_that_choose_tokens() -> None:
    dense = Dense(0.5)
    inside = {"log_probs": dense.new, "old_log_probs": dense.old, "advantages": dense.adv, "mask": dense.mask}
    options = {"clip_cov_ratio": 0.1, "clip_cov_lb": -0.5, "clip_cov_ub": 0.5}
    for name, given in (("clip_cov", BOUNDS | options), ("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": COEF})):
        torch.manual_seed(3)
        got, metrics = dense.loss(name, **given)
        chosen = token_choice.choose(name, **inside, generator=torch.Generator().manual_seed(3), **given)
        each = dense.token_losses(name, chosen)
        assert 1 < int(chosen.sum()) < len(each)
        assert float(got) == pytest.approx(sum(each) / len(each), rel=1e-12)
        assert metrics["actor/pg_clipfrac"] == pytest.approx(int(chosen.sum()) / len(each))


@pytest.mark.parametrize("name", [*OPTIONS, "gspo", "geo_mean", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_flow_to_the_policy_alone_and_inside_the_mask(name: str, dtype: torch.dtype) -> None:
    dense = Dense(0.2)
    dense.old, dense.new, dense.adv = (x.to(dtype).requires_grad_() for x in (dense.old, dense.new, dense.adv))
    loss, _ = dense.loss(name)
    loss.backward()
    assert loss.dtype == dtype and loss.dim() == 0
    grad = dense.new.grad
    assert grad is not None and grad.dtype == dtype and bool(grad.isfinite().all()) and bool(grad[dense.mask].any())
    assert not grad[~dense.mask].any() and dense.old.grad is None and dense.adv.grad is None
    nothing, metrics = dense.loss(name, torch.zeros_like(dense.mask))
    assert nothing.requires_grad and float(nothing.detach()) == 0 and set(metrics.values()) == {0.0}


def test_verl_s_config_gives_the_options() -> None:
    dense = Dense(0.5)
    want, _ = dense.loss("vanilla", clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    as_object = SimpleNamespace(clip_ratio=0.3, clip_ratio_low=0.1, clip_ratio_high=None, clip_ratio_c=2.0)
    for config in (as_object, vars(as_object)):
        assert torch.equal(dense.loss("vanilla", config=config)[0], want)
    overridden, _ = dense.loss("vanilla", config=as_object, clip_ratio=0.2)
    assert torch.equal(overridden, dense.loss("vanilla", clip_ratio=0.2, clip_ratio_c=2.0)[0])
    nested = SimpleNamespace(policy_loss={"kl_cov_ratio": 0.3, "ppo_kl_coef": COEF})
    assert torch.equal(
        dense.loss("kl_cov", config=nested)[0], dense.loss("kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=COEF)[0]
    )
    tokens = int(dense.mask.sum())
    halves = {"dp_size": 2, "batch_num_tokens": 2 * tokens, "global_batch_size": None, "loss_scale_factor": None}
    whole, metrics = dense.loss("gpg", config={"global_batch_info": halves})
    alone, means = dense.loss("gpg")
    assert float(whole) == pytest.approx(float(alone)) and metrics == means
    with pytest.raises(
        TypeError, match="compute_policy_loss_gspo has no option clip_ratio_c; available: clip_ratio_low"
    ):
        dense.loss("gspo", clip_ratio_c=3.0)
    with pytest.raises(ValueError, match="shapes differ"):
        dense.loss("gpg", torch.ones(5, 3))


def test_the_classic_form() -> None:
    new, old = torch.tensor([[0.5, -1.0, 2.0, 9.0]]), torch.zeros(1, 4)
    adv, mask = torch.tensor([[1.0, 1.0, -1.0, 1.0]]), torch.tensor([[1, 1, 1, 0]])
    loss, clipfrac, ppo_kl, lower = core.compute_policy_loss(old, new, adv, mask, 0.2)
    # clipped at 1.2, not clipped, and the dual clip at 3
    assert float(loss) == pytest.approx((-1.2 - math.exp(-1.0) + 3.0) / 3)
    assert [float(x) for x in (clipfrac, ppo_kl, lower)] == pytest.approx([1 / 3, -0.5, 1 / 3])
    wider, *_ = core.compute_policy_loss(old, new, adv, mask, 0.2, cliprange_high=0.28, clip_ratio_c=4.0)
    assert float(wider) == pytest.approx((-1.28 - math.exp(-1.0) + 4.0) / 3)
    with pytest.raises(ValueError, match="needs cliprange"):
        core.compute_policy_loss(old, new, adv, mask, cliprange_low=0.2)


@pytest.mark.parametrize(("mode", "want"), list(zip(MODES, (8 / 3, 8.0, 4.0, 3.0, 4 / 3), strict=True)))
def test_agg_loss(mode: str, want: float) -> None:
    loss = torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    assert float(core.agg_loss(loss, mask, mode)) == pytest.approx(want)
    counts = {"batch_num_tokens": 6, "global_batch_size": 4}
    whole = core.agg_loss(loss, mask, mode, 2, **counts)
    assert float(whole) == pytest.approx(2 * want if mode == "token-sum" else want)
    scaled = core.agg_loss(loss, mask, mode, loss_scale_factor=12)
    assert float(scaled) == pytest.approx(want / 4 if mode.endswith("norm") else want)
    assert float(core.agg_loss(loss, 0 * mask, mode)) == 0
    if mode != "token-sum":
        with pytest.raises(ValueError, match="dp_size=2 and loss_agg_mode .* need"):
            core.agg_loss(loss, mask, mode, dp_size=2)


@pytest.mark.parametrize("mode", MODES)
def test_value_and_entropy_losses(mode: str) -> None:
    dense = Dense(0.5)
    values, returns = dense.new.clone().requires_grad_(), dense.adv.clone().requires_grad_()
    near = dense.old + (dense.new - dense.old).clamp(-0.4, 0.4)
    plain, clipped = (dense.new - dense.adv).square(), (near - dense.adv).square()
    loss, clipfrac = core.compute_value_loss(values, returns, dense.old, dense.mask, 0.4, mode)
    want = aggregate_reference(0.5 * torch.maximum(plain, clipped), dense.mask, mode)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-12)
    assert float(clipfrac) == pytest.approx(float((clipped > plain)[dense.mask].double().mean())) and clipfrac > 0
    loss.backward()
    assert returns.grad is None and values.grad is not None and not values.grad[~dense.mask].any()
    part, share = core.compute_value_loss(
        values, returns, dense.old, dense.mask, 0.4, mode, dp_size=2, batch_num_tokens=80, global_batch_size=8
    )
    assert float(part.detach()) == pytest.approx(2 * want if mode == "token-sum" else want) and share == clipfrac
    logits = torch.randn(*dense.mask.shape, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    p = logits.detach().double().softmax(-1)
    entropy = core.compute_entropy_loss(logits, dense.mask, mode)
    assert float(entropy.detach()) == pytest.approx(aggregate_reference(-(p * p.log()).sum(-1), dense.mask, mode))
    assert entropy.requires_grad


@pytest.mark.parametrize("name", sorted(KL_FORMULAS))
def test_kl_penalties(name: str) -> None:
    dense = Dense(1.0)
    new, ref = dense.new[dense.mask].requires_grad_(), dense.old[dense.mask].requires_grad_()
    distances = (new - ref).detach()
    want = torch.tensor([KL_FORMULAS[name](d) for d in distances.tolist()], dtype=torch.float64)
    plain, straight = core.kl_penalty(new, ref, name), core.kl_penalty(new, ref, f"{name}+")
    for got in (plain, straight, core.kl_penalty_forward(new, ref, name)):
        torch.testing.assert_close(got.detach(), want)
    straight.sum().backward()
    torch.testing.assert_close(new.grad, distances)
    assert ref.grad is None
    with pytest.raises(ValueError, match="unknown KL penalty 'full'"):
        core.kl_penalty(new, ref, "full")


def test_rewards_with_a_penalty() -> None:
    scores, old, ref = torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]])
    torch.testing.assert_close(core.compute_rewards(scores, old, ref, 0.1), torch.tensor([[-0.2, 1.1]]))
    with pytest.raises(ValueError, match="shapes differ"):
        core.compute_rewards(scores, old[0], ref, 0.1)


def test_controllers() -> None:
    keys = {"kl_coef": 0.1, "target_kl": 6.0, "horizon": 1000}
    adaptive = core.get_kl_controller({"type": "adaptive", **keys})
    fixed = core.get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.1))
    for controller in (adaptive, fixed):
        controller.update(current_kl=6.6, n_steps=100)
        controller.update(0.0, 100)
    assert adaptive.value == pytest.approx(0.1 * 1.01 * 0.98) and fixed.value == 0.1
    for bad in ({"type": "linear", "kl_coef": 0.1}, {"type": "adaptive", "kl_coef": 0.1}, {"type": "fixed"}):
        with pytest.raises(ValueError, match="needs type fixed or adaptive"):
            core.get_kl_controller(bad)
    with pytest.raises(ValueError, match="must be > 0"):
        core.get_kl_controller({"type": "adaptive", **keys, "horizon": 0})


def test_statistics_over_a_mask() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, 6.0, 100.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(core.masked_mean(values, mask)) == pytest.approx(7 / 3)
    assert core.masked_mean(values, mask, axis=-1).tolist() == pytest.approx([1.5, 4.0])
    assert core.masked_mean(values, mask, axis=0).tolist() == pytest.approx([2.5, 2.0, 0.0])
    assert float(core.masked_var(values, mask)) == pytest.approx(7 / 3)
    assert float(core.masked_var(values, mask, unbiased=False)) == pytest.approx(14 / 9)
    white = core.masked_whiten(values.requires_grad_(), mask)
    assert white[mask.bool()].tolist() == pytest.approx([(x - 7 / 3) / math.sqrt(7 / 3) for x in (1, 2, 4)])
    assert not white[~mask.bool()].any() and not white.requires_grad
    assert float(core.masked_mean(core.masked_whiten(values, mask, shift_mean=False), mask)) == pytest.approx(7 / 3)


# --- advantages


def rewards_of(rows: int = 12, length: int = 9) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(rows)
    return torch.randn(rows, length, generator=gen, dtype=torch.float64), random_mask(gen, rows, length, holes=True)


GROUPS = torch.tensor([0, 0, 1, 2, 1, 2, 0, 1, 2, 0, 1, 2])
IDS = {
    "array of strings": np.array([f"uid-{i}" for i in GROUPS], dtype=object),
    "array": GROUPS.numpy(),
    "tensor": GROUPS,
    "list": [(int(i), None) for i in GROUPS],
}


@pytest.mark.parametrize("ids", IDS)
def test_grpo_of_any_index(ids: str) -> None:
    rewards, mask = rewards_of()
    for norm in (True, False):
        adv, returns = core.compute_grpo_outcome_advantage(rewards, mask.long(), IDS[ids], norm_adv_by_std_in_grpo=norm)
        torch.testing.assert_close(adv, grpo_reference(rewards, mask, GROUPS, norm))
        assert torch.equal(adv, returns)


def test_the_epsilon_of_grpo() -> None:
    rewards, mask, index = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), ["a", "a"]
    for epsilon in (1e-6, 0.5):
        lead = 2 / (math.sqrt(2) + epsilon)
        adv, _ = core.compute_grpo_outcome_advantage(rewards, mask, index, epsilon)
        assert adv.flatten().tolist() == pytest.approx([-lead / 2, lead / 2])
        adv, _ = core.compute_grpo_passk_outcome_advantage(rewards, mask, index, epsilon, config={})
        assert adv.flatten().tolist() == pytest.approx([0, lead])
    config = SimpleNamespace(norm_adv_by_std_in_grpo=False)
    adv, _ = core.compute_grpo_passk_outcome_advantage(rewards, mask, index, config=config)
    assert adv.flatten().tolist() == [0, 2]


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "grpo_passk"])
def test_group_estimators(name: str) -> None:
    rewards, mask = rewards_of()
    rewards.requires_grad_()
    adv, returns = getattr(core, f"compute_{name}_outcome_advantage")(rewards, mask, IDS["array of strings"])
    torch.testing.assert_close(adv, group_reference(name, rewards.detach(), mask, GROUPS))
    assert torch.equal(adv, returns) and not adv.requires_grad and not adv[~mask].any()


def test_gae_and_rewards_to_go() -> None:
    rewards, mask = rewards_of()
    values = rewards_of(rows=12)[0].roll(1, 0)
    adv, returns = core.compute_gae_advantage_return(rewards, values, mask.long(), torch.tensor(0.9), 0.8)
    raw, want = gae_reference(rewards, values, mask, 0.9, 0.8)
    torch.testing.assert_close(adv, whiten_reference(raw, mask))
    torch.testing.assert_close(returns, want)
    zeros = torch.zeros_like(rewards)
    for config, gamma in ((None, 1.0), ({"gamma": 0.9}, 0.9), (SimpleNamespace(gamma=0.9), 0.9)):
        to_go, _ = gae_reference(rewards, zeros, mask, gamma, 1.0)
        adv, returns = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config, index=GROUPS)
        torch.testing.assert_close(returns, to_go)
        torch.testing.assert_close(adv, whiten_reference(to_go, mask))
        adv, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=gamma)
        torch.testing.assert_close(adv, whiten_reference(to_go, mask))
    to_go, _ = gae_reference(rewards, zeros, mask, 1.0, 1.0)
    greedy = torch.arange(12.0)
    adv, returns = core.compute_remax_outcome_advantage(rewards, greedy, mask, index=GROUPS)
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(adv, (to_go - greedy[:, None]).masked_fill(~mask, 0))


def test_small_groups_by_hand() -> None:
    """Advantages of small groups equal values computed by hand: scores 1 and 0 for one prompt, 5 for another. The
    second response has a hole, the third has one token."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0]])
    index = np.array(["a", "a", "b"], dtype=object)
    by_hand = {
        "grpo": (0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6), 5.0),
        "rloo": (1.0, -1.0, 0.0),
        "opo": (1 - 3 / 5, -3 / 5, 5.0),
        "gpg": (1.5 * 0.5, -1.5 * 0.5, 1.5 * 5),
    }
    for name, want in by_hand.items():
        adv, _ = getattr(core, f"compute_{name}_outcome_advantage")(rewards, mask, index)
        torch.testing.assert_close(adv, torch.tensor(want)[:, None] * mask)
    adv, _ = core.compute_gpg_outcome_advantage(rewards, mask, index, f_norm=3.0)
    assert float(adv[0, 0]) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"not \[B, T\], \[B\]"):
        core.compute_grpo_outcome_advantage(rewards, mask, ["a", "b"])


# --- signatures: names, order and defaults in verl's documentation, and in its code where that has more

WITH_INDEX = "token_level_rewards response_mask index epsilon=1e-06"
POLICY = "old_log_prob log_prob advantages response_mask loss_agg_mode={} config=None rollout_is_weights=None"
COUNTS = "dp_size=1 batch_num_tokens=None global_batch_size=None loss_scale_factor=None"
CLASSIC = "old_log_prob log_prob advantages response_mask cliprange=None cliprange_low=None cliprange_high=None "
SIGNATURES = {
    "agg_loss": f"loss_mat loss_mask loss_agg_mode {COUNTS}",
    "compute_policy_loss": CLASSIC + "clip_ratio_c=3.0 loss_agg_mode='token-mean'",
    "kl_penalty": "logprob ref_logprob kl_penalty",
    "kl_penalty_forward": "logprob ref_logprob kl_penalty",
    "compute_value_loss": (f"vpreds returns values response_mask cliprange_value loss_agg_mode='token-mean' {COUNTS}"),
    "compute_entropy_loss": "logits response_mask loss_agg_mode='token-mean'",
    "compute_rewards": "token_level_scores old_log_prob ref_log_prob kl_ratio",
    "AdaptiveKLController": "init_kl_coef target_kl horizon",
    "FixedKLController": "kl_coef",
    "get_kl_controller": "kl_ctrl",
    "masked_mean": "values mask axis=None",
    "masked_var": "values mask unbiased=True",
    "masked_whiten": "values mask shift_mean=True",
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_grpo_outcome_advantage": f"{WITH_INDEX} norm_adv_by_std_in_grpo=True config=None",
    "compute_grpo_vectorized_outcome_advantage": f"{WITH_INDEX} norm_adv_by_std_in_grpo=True config=None",
    "compute_grpo_passk_outcome_advantage": f"{WITH_INDEX} norm_adv_by_std_in_grpo=True config=None",
    "compute_rloo_outcome_advantage": f"{WITH_INDEX} config=None",
    "compute_rloo_vectorized_outcome_advantage": f"{WITH_INDEX} config=None",
    "compute_opo_outcome_advantage": f"{WITH_INDEX} config=None",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": f"{WITH_INDEX} config=None",
    "compute_gpg_outcome_advantage": f"{WITH_INDEX} f_norm=1.0 alpha=1.0 config=None",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask config=None",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config=None",
    **{
        f"compute_policy_loss_{name}": POLICY.format(
            repr("seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean")
        )
        for name in ("vanilla", "gspo", "geo_mean", "sapo", "cispo", "gpg", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
    },
}


def shown(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def test_every_function_has_verl_s_signature_and_a_docstring() -> None:
    assert {*SIGNATURES} == {*core.__all__}
    for name, want in SIGNATURES.items():
        function = getattr(core, name)
        parameters = [
            shown(each) for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD
        ]
        more = ["gamma=None"] if name == "compute_reinforce_plus_plus_outcome_advantage" else []
        assert parameters == want.split() + more, name
        assert inspect.getdoc(function), name
