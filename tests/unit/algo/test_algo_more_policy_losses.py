"""Policy losses over whole responses, over selected tokens, and with a trust region, by token in float64 from
papers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.algo import FlatBatch, Sequences, aggregate, policy_loss, token_choice

LOW, HIGH, COEF = 0.15, 0.3, 0.7
NAMES = ["gspo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "vespo"]
VESPO = {"vespo_k_pos": 1.3, "vespo_lambda_pos": 2.7, "vespo_k_neg": 3.1, "vespo_lambda_neg": 1.9}
OPTIONS = dict.fromkeys(NAMES, {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}) | {
    "kl_cov": {"ppo_kl_coef": COEF},
    "vespo": VESPO,
}


class Batch:
    """Flat responses of these lengths (0 means no tokens); log-probs are below 0."""

    def __init__(self, lengths: Sequence[int], spread: float, seed: int, sequence_advantage: bool = False) -> None:
        gen = torch.Generator().manual_seed(seed)
        width = max(1, *lengths)
        self.mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        n = int(self.mask.sum())
        self.old = -2.5 * torch.rand(n, generator=gen, dtype=torch.float64) - 0.01
        step = spread * torch.randn(n, generator=gen, dtype=torch.float64)
        self.log_probs = (self.old + step).clamp(max=-1e-3)
        self.advantages = torch.randn(n, generator=gen, dtype=torch.float64)
        if sequence_advantage:
            per_response = torch.randn(len(lengths), generator=gen, dtype=torch.float64)
            self.advantages = per_response.repeat_interleave(torch.tensor(lengths))
        self.chosen = torch.rand(n, generator=gen) < 0.3
        self.weights = torch.rand(n, generator=gen, dtype=torch.float64)
        self.sequences = Sequences.of_mask(self.mask)

    def loss(self, name: str, log_probs: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss.compute(
            name,
            log_probs=log_probs,
            old_log_probs=self.old,
            advantages=self.advantages,
            weights=self.weights if weights is None else weights,
            sequences=self.sequences,
            chosen=self.chosen,
            **OPTIONS[name],
        )

    def rows(self) -> list[list[int]]:
        """Returns the positions of each response's tokens."""
        return [(self.sequences.member == row).nonzero()[:, 0].tolist() for row in range(self.mask.shape[0])]

    def seq_mean_token_mean(self) -> Tensor:
        return aggregate.token_weights("seq-mean-token-mean", self.mask, dtype=torch.float64)[self.mask]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def binary_kl(old: float, new: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def token_reference(name: str, lp: float, old: float, adv: float, chosen: bool) -> tuple[float, bool]:
    """Returns (loss, clipped?) of a token."""
    ratio, p, p_old = math.exp(lp - old), math.exp(lp), math.exp(old)
    if name == "kl_cov":
        return -adv * ratio + (COEF * abs(lp - old) if chosen else 0), chosen
    if name == "clip_cov":
        return 0.0 if chosen else max(-adv * ratio, -adv * clip(ratio, 1 - LOW, 1 + HIGH)), chosen
    further = p > p_old if adv > 0 else p < p_old
    distance = abs(p - p_old) if name == "dppo_tv" else binary_kl(p_old, p)
    outside = further and distance > (HIGH if adv > 0 else LOW)
    return 0.0 if outside else -adv * min(ratio, 20.0) * lp, outside


@pytest.mark.parametrize("spread", [0.05, 0.5, 4.0])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
def test_token_losses(name: str, spread: float) -> None:
    b = Batch([5, 0, 1, 30, 60], spread, seed=4)
    lists = (x.tolist() for x in (b.log_probs, b.old, b.advantages, b.chosen))
    want = [token_reference(name, *row) for row in zip(*lists, strict=True)]
    got, metrics = b.loss(name, b.log_probs)
    rel = 1e-7 if name == "dppo_kl" else 1e-13  # only dppo_kl has an epsilon of its own
    total = sum(w * x for w, (x, _) in zip(b.weights.tolist(), want, strict=True))
    assert float(got) == pytest.approx(total, rel=rel)
    clipfrac = sum(w for w, (_, clipped) in zip(b.weights.tolist(), want, strict=True) if clipped)
    assert float(metrics["clipfrac"]) == pytest.approx(clipfrac)
    if spread > 1:
        assert clipfrac > 0


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_gradients(name: str) -> None:
    b = Batch([5, 0, 20], 0.4, seed=8)  # no kink within 1e-6 of these points
    assert torch.autograd.gradcheck(lambda x: b.loss(name, x)[0], b.log_probs.clone().requires_grad_())


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_trust_region_is_one_sided_and_caps_the_ratio(name: str) -> None:
    """A trust region is one-sided and caps the ratio. Here a rare token becomes likely: with A > 0 it is outside, with
    A < 0 it may move back, with a ratio of at most 20."""
    old = torch.full((2,), -6.0, dtype=torch.float64)
    log_probs = torch.full((2,), -0.1, dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_loss.compute(
        name, log_probs=log_probs, old_log_probs=old, advantages=torch.tensor([1.0, -1.0]).double(), weights=old**0
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert grad.tolist() == [0.0, 20.0]
    assert float(metrics["clipfrac"]) == 1 and float(metrics["clipfrac_lower"]) == 1


def test_binary_kl_stays_finite_where_a_probability_is_1() -> None:
    log_probs = torch.tensor([0.0, -1e-9, -30.0, 0.0], requires_grad=True)
    old = torch.tensor([0.0, -30.0, 0.0, -1e-9])
    loss, _ = policy_loss.compute(
        "dppo_kl", log_probs=log_probs, old_log_probs=old, advantages=torch.ones(4), weights=torch.ones(4)
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert grad.isfinite().all() and grad[0] == -1 and grad[1] == 0


def sequence_reference(name: str, b: Batch) -> float:
    """Returns the mean over responses: GSPO eq. 5, GMPO eq. 4, VESPO with the kernel W^k exp(l (1 - W))."""
    losses = []
    for places in b.rows():
        if not places:
            continue
        lr = [float(b.log_probs[i] - b.old[i]) for i in places]
        adv = [float(b.advantages[i]) for i in places]
        mean_adv = sum(adv) / len(adv)
        if name == "vespo":
            w = math.exp(clip(sum(clip(x, -20, 20) for x in lr), math.log(1e-8), 20))
            phi = [w ** VESPO[f"vespo_k_{s}"] * math.exp(VESPO[f"vespo_lambda_{s}"] * (1 - w)) for s in ("pos", "neg")]
            tokens = zip(adv, (float(b.log_probs[i]) for i in places), strict=True)
            losses.append(sum(-phi[a < 0] * a * lp for a, lp in tokens) / len(adv))
        elif name == "gspo":
            s = math.exp(min(sum(lr) / len(lr), 10.0))
            losses.append(sum(max(-a * s, -a * clip(s, 1 - LOW, 1 + HIGH)) for a in adv) / len(adv))
        else:
            signed = [math.copysign(1, a) if a else 0.0 for a in adv]
            bounded = [s * min(s * x, s * clip(x, -LOW, HIGH)) for x, s in zip(lr, signed, strict=True)]
            losses.append(-mean_adv * math.exp(sum(bounded) / len(bounded)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("spread", [0.02, 0.5, 8.0])
@pytest.mark.parametrize("name", ["gspo", "geo_mean", "vespo"])
def test_sequence_losses(name: str, spread: float) -> None:
    b = Batch([7, 1, 0, 24, 3, 1], spread, seed=6)
    got, _ = b.loss(name, b.log_probs, b.seq_mean_token_mean())
    assert float(got) == pytest.approx(sequence_reference(name, b), rel=1e-12)


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_the_gradient_of_a_sequence_loss_is_that_of_the_whole_response(name: str) -> None:
    """With one advantage per response the gradient equals autograd through the mean of the response."""
    b = Batch([7, 1, 24, 3], 0.1, seed=2, sequence_advantage=True)
    x = b.log_probs.clone().requires_grad_()
    (got,) = torch.autograd.grad(b.loss(name, x, b.seq_mean_token_mean())[0], x)
    lr = x - b.old
    if name == "geo_mean":
        sign = b.advantages.sign()
        lr = sign * torch.minimum(sign * lr, sign * lr.clamp(-LOW, HIGH))
    lengths = b.mask.sum(1)
    member, zeros = b.sequences.member, torch.zeros(4, dtype=torch.float64)
    ratio = (zeros.index_add(0, member, lr) / lengths).exp()
    adv = zeros.index_add(0, member, b.advantages) / lengths
    loss = -adv * ratio
    if name == "gspo":
        loss = torch.maximum(loss, -adv * ratio.clamp(1 - LOW, 1 + HIGH))
    (want,) = torch.autograd.grad(loss.mean(), x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-12)


def test_the_log_ratio_of_gspo_is_at_most_10() -> None:
    log_probs = torch.full((4,), -0.5, dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss.compute(
        "gspo",
        log_probs=log_probs,
        old_log_probs=torch.tensor([-9.0, -15.0, -9.0, -14.0]).double(),
        advantages=-torch.ones(4).double(),
        weights=torch.ones(4).double(),
        sequences=Sequences(torch.tensor([0, 1, 0, 1]), torch.ones(4, dtype=torch.bool), torch.tensor([2, 2])),
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert float(loss.detach()) == pytest.approx(2 * math.exp(8.5) + 2 * math.exp(10))
    assert grad.tolist() == pytest.approx([math.exp(8.5), 0, math.exp(8.5), 0])


def test_a_token_that_geo_mean_does_not_clip_keeps_its_whole_log_ratio() -> None:
    """A token that geo_mean does not clip keeps its whole log-ratio. One of 100 tokens moves by -24 against its
    advantage of 1, so the ratio is exp(-24 / 100), of which each token has a hundredth."""
    log_probs = torch.zeros(100, dtype=torch.float64).index_fill(0, torch.tensor([7]), -24.0).requires_grad_()
    batch = FlatBatch.of_mask(torch.ones(1, 100), "seq-mean-token-mean", dtype=torch.float64)
    same = torch.zeros(100, dtype=torch.float64)
    loss, _ = policy_loss.compute(
        "geo_mean", log_probs=log_probs, old_log_probs=same, advantages=same + 1, **batch.inputs
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert float(loss.detach()) == pytest.approx(-math.exp(-0.24), rel=1e-12)
    assert float(grad[7]) == pytest.approx(-math.exp(-0.24) / 100, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [("clip_cov", math.exp(25), math.exp(25)), ("kl_cov", math.exp(25) + 25 * COEF, math.exp(25) + COEF)],
)
def test_covariance_losses_do_not_clamp_the_log_ratio(name: str, value: float, slope: float) -> None:
    log_probs = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    chosen = torch.tensor([name == "kl_cov"])
    loss, _ = policy_loss.compute(
        name, log_probs=log_probs, old_log_probs=-25 * one, advantages=-one, weights=one, chosen=chosen, **OPTIONS[name]
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert (float(loss.detach()), float(grad)) == (pytest.approx(value, rel=1e-14), pytest.approx(slope, rel=1e-14))


def test_geo_mean_says_what_it_clips() -> None:
    b = Batch([6], 2.0, seed=3)
    _, metrics = b.loss("geo_mean", b.log_probs, torch.ones(6).double())
    outside = [not -LOW <= float(x) <= HIGH for x in b.log_probs - b.old]
    for name, sign in (("clipfrac", 1), ("clipfrac_lower", -1)):
        assert float(metrics[name]) == sum(
            o and sign * float(a) > 0 for o, a in zip(outside, b.advantages, strict=True)
        )


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=5).filter(any),
    spread=st.sampled_from([0.1, 2.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_no_order_and_no_split_of_tokens_matters(
    name: str, lengths: list[int], spread: float, seed: int, data: st.DataObject
) -> None:
    """Neither the order of the tokens nor their split over ranks changes the loss; `total` then sums over the parts."""
    b = Batch(lengths, spread, seed)
    x = b.log_probs.clone().requires_grad_()
    whole, metrics = b.loss(name, x)
    (want,) = torch.autograd.grad(whole, x)
    order = torch.tensor(data.draw(st.permutations(range(x.numel()))), dtype=torch.int64)
    cut = data.draw(st.integers(0, x.numel()))
    parts = [order[:cut], order[cut:]]
    loss, grad, summed = 0.0, torch.zeros_like(x), dict.fromkeys(metrics, 0.0)
    for places, other in (parts, parts[::-1]):
        got, of_part = policy_loss.compute(
            name,
            log_probs=x[places],
            old_log_probs=b.old[places],
            advantages=b.advantages[places],
            weights=b.weights[places],
            sequences=Sequences(
                b.sequences.member[places], b.sequences.counted[places], b.sequences.lengths, OnTwoRanks(b, name, other)
            ),
            chosen=b.chosen[places],
            **OPTIONS[name],
        )
        loss += float(got.detach())
        grad += torch.autograd.grad(got, x, allow_unused=True)[0]
        summed = {key: value + float(of_part[key]) for key, value in summed.items()}
    assert loss == pytest.approx(float(whole.detach()), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(grad, want)
    assert summed == pytest.approx({key: float(value) for key, value in metrics.items()}, rel=1e-9, abs=1e-12)


class OnTwoRanks:
    """Stands for the all-reduce: adds the contribution of the other rank's tokens, by running its loss."""

    def __init__(self, b: Batch, name: str, other: Tensor) -> None:
        self.b, self.name, self.other = b, name, other

    def __call__(self, partial: Tensor) -> Tensor:
        theirs: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            theirs.append(x)
            return x

        b, places = self.b, self.other
        policy_loss.compute(
            self.name,
            log_probs=b.log_probs[places],
            old_log_probs=b.old[places],
            advantages=b.advantages[places],
            weights=b.weights[places],
            sequences=Sequences(b.sequences.member[places], b.sequences.counted[places], b.sequences.lengths, note),
            **OPTIONS[self.name],
        )
        return partial + theirs[0]


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_rejected_tokens_are_as_if_they_were_not_there(name: str) -> None:
    b = Batch([6, 4, 5], 0.3, seed=9)
    keep = b.mask.clone()
    keep[0, 3:] = False
    keep[1] = False
    kept = keep[b.mask]
    weights = aggregate.token_weights("seq-mean-token-mean", keep)[b.mask].double()
    b.sequences = Sequences.of_mask(b.mask, keep)
    got, _ = b.loss(name, b.log_probs, weights)
    b.log_probs, b.old, b.advantages, b.chosen = (x[kept] for x in (b.log_probs, b.old, b.advantages, b.chosen))
    b.sequences = Sequences.of_mask(torch.arange(5) < torch.tensor([3, 0, 5])[:, None])
    want, _ = b.loss(name, b.log_probs, weights[kept])
    assert float(got) == pytest.approx(float(want))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_at_ratio_1(name: str) -> None:
    """At ratio 1 the gradient is the policy gradient, except at tokens that clip_cov drops."""
    b = Batch([4, 0, 9, 1], 0.0, seed=1, sequence_advantage=True)
    x = b.log_probs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(b.loss(name, x)[0], x)
    want = -b.weights * b.advantages
    torch.testing.assert_close(grad, want.masked_fill(b.chosen, 0) if name == "clip_cov" else want)


def test_what_is_missing_is_named() -> None:
    b = Batch([3], 0.1, seed=0)
    for name, says in (
        ("gspo", "sequences"),
        ("geo_mean", "sequences"),
        ("vespo", "sequences"),
        ("clip_cov", "chosen"),
        ("kl_cov", "chosen"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*`{says}`"):
            policy_loss.compute(
                name, log_probs=b.log_probs, old_log_probs=b.old, advantages=b.advantages, weights=b.weights
            )


def covariances(b: Batch, mask: list[bool]) -> list[float]:
    inside = [i for i, m in enumerate(mask) if m]
    mean_a = sum(float(b.advantages[i]) for i in inside) / len(inside)
    mean_lp = sum(float(b.log_probs[i]) for i in inside) / len(inside)
    return [float(a - mean_a) * float(lp - mean_lp) for a, lp in zip(b.advantages, b.log_probs, strict=True)]


def chosen(name: str, b: Batch, mask: list[bool], seed: int = 0, **options: float) -> list[int]:
    got = token_choice.choose(
        name,
        log_probs=b.log_probs,
        old_log_probs=b.old,
        advantages=b.advantages,
        mask=torch.tensor(mask),
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    return got.nonzero()[:, 0].tolist()


def test_kl_cov_takes_the_highest_covariances_of_the_mini_batch() -> None:
    b = Batch([40, 60], 0.3, seed=5)
    mask = [i % 7 != 0 for i in range(100)]
    cov = covariances(b, mask)
    best = sorted((i for i in range(100) if mask[i]), key=lambda i: -cov[i])
    assert chosen("kl_cov", b, mask, kl_cov_ratio=0.1) == sorted(best[: int(0.1 * sum(mask))])
    assert chosen("kl_cov", b, mask) == [best[0]], "0.0002 of 85 tokens is at least one"
    assert chosen("kl_cov", b, [False] * 100) == []


def test_clip_cov_takes_a_random_share_of_those_between_the_bounds_that_ppo_does_not_clip() -> None:
    b = Batch([400, 600], 0.3, seed=5)
    mask = [i % 7 != 0 for i in range(1000)]
    cov, ratio = covariances(b, mask), (b.log_probs - b.old).exp().tolist()
    bounds = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0}

    def clipped(i: int) -> bool:
        adv = float(b.advantages[i])
        return -adv * clip(ratio[i], 1 - LOW, 1 + HIGH) > -adv * ratio[i]

    possible = {i for i in range(1000) if mask[i] and 0.2 < cov[i] < 1.0 and not clipped(i)}
    some = chosen("clip_cov", b, mask, clip_cov_ratio=0.05, **bounds)
    assert len(some) == int(0.05 * sum(mask)) and set(some) < possible
    assert some == chosen("clip_cov", b, mask, clip_cov_ratio=0.05, **bounds)
    assert some != chosen("clip_cov", b, mask, seed=1, clip_cov_ratio=0.05, **bounds)
    assert set(chosen("clip_cov", b, mask, clip_cov_ratio=1.0, **bounds)) == possible
    assert len(chosen("clip_cov", b, mask, **bounds)) == 1
    assert chosen("clip_cov", b, mask, **bounds | {"clip_cov_lb": 50.0, "clip_cov_ub": 60.0}) == []


def test_high_entropy_tokens() -> None:
    entropies = torch.tensor([0.1, 5.0, 0.3, 0.2, 9.0, 0.4])
    mask = torch.tensor([True, True, True, True, False, True])
    assert token_choice.high_entropy(entropies, mask, 0.4).tolist() == [False, True, False, False, False, True]
    assert token_choice.high_entropy(entropies, mask, 0.01).sum() == 1
    assert torch.equal(token_choice.high_entropy(entropies, mask, 1.0), mask)
    assert not token_choice.high_entropy(entropies, torch.zeros_like(mask), 0.5).any()
