"""Values and gradients of preference losses against their papers' formulas with 60 digits, one pair at a time. They
stay finite however far the policy has moved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpmath import diff, exp, log, mp, mpf
from torch import Tensor

from mrl.algo import preference, preference_unpaired
from mrl.algo.preference import PAIR_LOSSES, LogProbSums, PreferencePairs
from mrl.algo.preference_unpaired import LABEL_LOSSES, LabelledResponses
from mrl.algo.registry import arguments
from mrl.options.preference import PREFERENCE_LOSSES, FDivergence

mp.dps = 60
Number = Any  # an mpf


def sigma(x: Number) -> Number:
    return 1 / (1 + exp(-x))


def divergence(kind: str, alpha: float, d: Number) -> Number:
    """Returns f' of the papers' generators at u = e^d, up to a constant."""
    u = exp(d)
    return {
        "reverse_kl": lambda: log(u),  # f = u log u
        "forward_kl": lambda: 1 - 1 / u,  # f = -log u
        "js_divergence": lambda: log(2 * u / (1 + u)),  # f = u log u - (u + 1) log((u + 1) / 2)
        "alpha_divergence": lambda: log(u) if alpha == 1 else (u ** mpf(alpha - 1) - 1) / mpf(alpha - 1),
    }[kind]()


class Pair:
    """One pair: log-prob sums of policy and reference for both responses, and the lengths."""

    def __init__(self, pc: Number, pr: Number, rc: float, rr: float, nc: int, nr: int, o: dict[str, Any]) -> None:
        self.pc, self.pr, self.nc, self.nr, self.b = pc, pr, nc, nr, mpf(o.get("beta", 1))
        self.dc, self.dr = pc - mpf(rc), pr - mpf(rr)
        kind, alpha = o.get("f_divergence_type", "reverse_kl"), o.get("f_alpha_divergence_coef", 0.5)
        self.sc, self.sr = divergence(kind, alpha, self.dc), divergence(kind, alpha, self.dr)
        self.e, self.o = mpf(o.get("label_smoothing", 0)), o

    @property
    def x(self) -> Number:
        return self.b * (self.sc - self.sr)


def odds(mean: Number) -> Number:
    return exp(mean) / (1 - exp(mean))


def alpha_reward(mean: Number, alpha: float) -> Number:
    return mean if alpha == 0 else (1 - exp(mean) ** mpf(-alpha)) / mpf(alpha)


def exo(p: Pair) -> Number:
    q = sigma(p.x)
    return q * log(q / (1 - p.e)) + sigma(-p.x) * log(sigma(-p.x) / p.e)


def disco(p: Pair) -> Number:
    m = sigma(p.x / mpf(p.o["discopop_tau"]))
    return -sigma(-p.x / mpf(p.o["discopop_tau"])) * log(sigma(p.x)) + m * exp(-p.x)


def simpo(p: Pair) -> Number:
    lead = alpha_reward(p.pc / p.nc, p.o["alpha"]) - alpha_reward(p.pr / p.nr, p.o["alpha"])
    x = p.b * lead - mpf(p.o["simpo_gamma"])
    return -(1 - p.e) * log(sigma(x)) - p.e * log(sigma(-x))


PAPERS: dict[str, Callable[[Pair], Number]] = {
    "sigmoid": lambda p: -(1 - p.e) * log(sigma(p.x)) - p.e * log(sigma(-p.x)),
    "robust": lambda p: (-(1 - p.e) * log(sigma(p.x)) + p.e * log(sigma(-p.x))) / (1 - 2 * p.e),
    "hinge": lambda p: max(mpf(0), 1 - p.x),
    "ipo": lambda p: (p.sc / p.nc - p.sr / p.nr - 1 / (2 * p.b)) ** 2,
    "sigmoid_norm": lambda p: -log(sigma(p.b * (p.sc / p.nc - p.sr / p.nr))),
    "exo_pair": exo,
    "nca_pair": lambda p: -log(sigma(p.b * p.dc)) - log(sigma(-p.b * p.dc)) / 2 - log(sigma(-p.b * p.dr)) / 2,
    "bco_pair": lambda p: -log(sigma(p.b * p.dc)) - log(sigma(-p.b * p.dr)),
    "sppo_hard": lambda p: (p.dc - 1 / (2 * p.b)) ** 2 + (p.dr + 1 / (2 * p.b)) ** 2,
    "apo_zero": lambda p: 1 - sigma(p.b * p.dc) + sigma(p.b * p.dr),
    "apo_down": lambda p: sigma(p.b * p.dc) + 1 - sigma(p.b * (p.dc - p.dr)),
    "discopop": disco,
    "sft": lambda p: -p.pc,
    "simpo": simpo,
    "orpo": lambda p: -p.b * log(sigma(log(odds(p.pc / p.nc) / odds(p.pr / p.nr)))),
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sigmoid": [{}, {"beta": 0.7, "label_smoothing": 0.2}],
    "robust": [{"label_smoothing": 0.1}],
    "ipo": [{"beta": 0.3}],
    "exo_pair": [{}, {"label_smoothing": 0.2}],
    "simpo": [{}, {"alpha": 0.25, "simpo_gamma": 0.5}, {"alpha": -0.5, "label_smoothing": 0.2}],
    "discopop": [{}, {"beta": 0.02}],
}
DIVERGENCES: list[dict[str, Any]] = [
    {"f_divergence_type": kind} for kind in ("forward_kl", "js_divergence", "alpha_divergence")
] + [{"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha} for alpha in (1.0, 2.0)]


def cases() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name in PAPERS:
        of_it = SETTINGS.get(name, [{}])
        of_it = of_it + (DIVERGENCES if issubclass(PREFERENCE_LOSSES[name], FDivergence) else [])
        found += [(name, PREFERENCE_LOSSES[name].filled(given)) for given in of_it]
    return found


def data(spread: float, count: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums of the policy, those of the reference, and the lengths, [2, count] each: chosen, rejected."""
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 30, (2, count), generator=g)
    reference = -3 * tokens * torch.rand(2, count, generator=g, dtype=torch.float64) - 0.5
    moved = spread * torch.randn(2, count, generator=g, dtype=torch.float64)
    return (reference + moved).clamp(max=-1e-2), reference, tokens


def as_pairs(policy: Tensor, reference: Tensor, tokens: Tensor) -> PreferencePairs:
    sides = (LogProbSums(policy[i], reference[i], tokens[i].to(policy)) for i in (0, 1))
    return PreferencePairs(*sides, text=policy[0], text_tokens=tokens[0].sum().to(policy))


def computed(name: str, options: dict[str, Any], policy: Tensor, reference: Tensor, tokens: Tensor) -> Any:
    """Returns (values, gradient of their sum)."""
    policy = policy.clone().requires_grad_()
    loss = PAIR_LOSSES.get(name)
    values = loss(as_pairs(policy, reference, tokens), **arguments(loss, options))
    return values.detach(), torch.autograd.grad(values.sum(), policy)[0]


def shown(case: Any) -> str:
    return case if isinstance(case, str) else "-".join(str(value) for value in case.values())


@pytest.mark.parametrize(("name", "options"), cases(), ids=shown)
@pytest.mark.parametrize("spread", [pytest.param(1.0, marks=pytest.mark.slow), 6.0])
def test_value_and_gradient_are_the_paper_s(name: str, options: dict[str, Any], spread: float) -> None:
    policy, reference, tokens = data(spread)
    values, gradient = computed(name, options, policy, reference, tokens)
    scale = tokens.shape[1] / float(tokens[0].sum()) if name == "sft" else 1.0
    for i in range(tokens.shape[1]):
        known = (*reference[:, i].tolist(), *tokens[:, i].tolist(), options)
        paper = lambda pc, pr, known=known: PAPERS[name](Pair(pc, pr, *known)) * scale  # noqa: E731
        at = tuple(mpf(float(x)) for x in policy[:, i])
        assert float(values[i]) == pytest.approx(float(paper(*at)), rel=1e-9, abs=1e-12)
        slopes = [float(diff(paper, at, order)) for order in ((1, 0), (0, 1))]
        assert gradient[:, i].tolist() == pytest.approx(slopes, rel=1e-8, abs=1e-11)


@pytest.mark.parametrize(("name", "options"), cases(), ids=shown)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_wherever_the_policy_has_gone(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.float32 and name == "ipo" and options["f_divergence_type"] in ("forward_kl", "alpha_divergence"):
        pytest.skip("the square of e^80: trainers compute in float64")
    far = torch.tensor([-200.0, -89.0, -30.0, 0.0, 30.0, 89.0, 200.0], dtype=dtype)
    reference = torch.stack(torch.broadcast_tensors(*2 * [torch.tensor(-300.0, dtype=dtype)])).repeat(49, 1).T
    policy = reference + torch.cartesian_prod(far, far).T
    for tokens in (torch.full((2, 49), 1), torch.full((2, 49), 200)):
        values, gradient = computed(name, options, policy, reference, tokens)
        assert values.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_alignment_of_distributions_sorts_the_whole_batch(name: str, smoothing: float) -> None:
    policy, reference, tokens = data(2.0)
    options = {"beta": 0.4, "label_smoothing": smoothing}

    def paper(flat: list[float]) -> Number:
        count = len(flat) // 2
        (pc, pr), (rc, rr) = (flat[:count], flat[count:]), reference.tolist()
        if name == "aot":
            first, second = [a - b for a, b in zip(pc, pr)], [a - b for a, b in zip(rc, rr)]  # noqa: B905
        else:
            first, second = [a - b for a, b in zip(pc, rc)], [a - b for a, b in zip(pr, rr)]  # noqa: B905
        leads = [mpf(0.4) * (a - b) for a, b in zip(sorted(first), sorted(second), strict=True)]
        e = mpf(smoothing)
        return sum(-(1 - e) * log(sigma(u)) - e * log(sigma(-u)) for u in leads)

    values, gradient = computed(name, options, policy, reference, tokens)
    flat = [mpf(x) for x in policy.flatten().tolist()]
    assert float(values.sum()) == pytest.approx(float(paper(flat)), rel=1e-10)
    for i, slope in enumerate(gradient.flatten().tolist()):
        moved = lambda x, i=i: paper([*flat[:i], x, *flat[i + 1 :]])  # noqa: E731
        assert slope == pytest.approx(float(diff(moved, flat[i], h=mpf(10) ** -20)), rel=1e-8, abs=1e-12)
    far, ref = 200 * torch.randn(2, 50, dtype=torch.float64), torch.zeros(2, 50, dtype=torch.float64)
    assert all(x.isfinite().all() for x in computed(name, options, far, ref, torch.ones(2, 50)))


UNPAIRED: dict[str, Callable[[Number, bool, dict[str, Any], float], Number]] = {
    "kto": lambda d, good, o, z: (
        o["desirable_weight"] * (1 - sigma(mpf(o["beta"]) * (d - mpf(z))))
        if good
        else o["undesirable_weight"] * (1 - sigma(mpf(o["beta"]) * (mpf(z) - d)))
    ),
    "apo_zero_unpaired": lambda d, good, o, z: UNPAIRED["kto"](d, good, o, 0.0),
    "bco": lambda d, good, o, z: -log(sigma((1 if good else -1) * (mpf(o["beta"]) * d - mpf(0.3)))),
}


@pytest.mark.parametrize("name", sorted(UNPAIRED))
def test_labelled_responses(name: str) -> None:
    given = {"desirable_weight": 1.2, "undesirable_weight": 0.7, "beta": 0.3}
    own = PREFERENCE_LOSSES[name].model_fields
    options = PREFERENCE_LOSSES[name].filled({key: value for key, value in given.items() if key in own})
    policy, reference, tokens = (x.flatten() for x in data(3.0))
    labels, loss = torch.arange(14) % 3 > 0, LABEL_LOSSES.get(name)
    for spread in (1.0, 66.0):
        at = (reference + spread * (policy - reference)).requires_grad_()
        rows = LabelledResponses(
            LogProbSums(at, reference, tokens.to(at)), labels, torch.tensor(0.8, dtype=torch.float64), shift=0.3
        )
        values = loss(rows, **arguments(loss, options))
        [slopes] = torch.autograd.grad(values.sum(), at)
        for d, good, value, slope in zip((at - reference).tolist(), labels.tolist(), values, slopes, strict=True):
            paper = lambda x, good=good: UNPAIRED[name](x, good, options, 0.8)  # noqa: E731
            assert float(value) == pytest.approx(float(paper(mpf(d))), rel=1e-9, abs=1e-12)
            assert float(slope) == pytest.approx(float(diff(paper, mpf(d))), rel=1e-8, abs=1e-12)


def test_every_offered_loss_has_its_function_and_was_looked_at() -> None:
    names = {*PAIR_LOSSES.names(), *LABEL_LOSSES.names()}
    assert names == PREFERENCE_LOSSES.keys() == {*PAPERS, *UNPAIRED, "aot", "aot_unpaired"}
    for name, kind in PREFERENCE_LOSSES.items():
        function = (LABEL_LOSSES if kind.is_unpaired else PAIR_LOSSES).get(name)
        left = kind.model_fields.keys() - arguments(function, kind.filled({})).keys()
        assert left == {"weight"} | {"bco": {"shift_decay"}, "sft": {"with_prompt"}}.get(name, set())


def test_the_first_step_and_exchanged_halves() -> None:
    """If policy and reference are equal, the loss is log 2. Exchanged responses change the sign of the margin."""
    policy, reference, tokens = data(1.0)
    options = PREFERENCE_LOSSES["sigmoid"].filled({})
    same, _ = computed("sigmoid", options, reference, reference, tokens)
    assert same.tolist() == pytest.approx([math.log(2)] * 7)
    there, back = (
        preference.margin(as_pairs(*(x[order] for x in (policy, reference, tokens))), "reverse_kl", 0.5)
        for order in (torch.tensor([0, 1]), torch.tensor([1, 0]))
    )
    assert torch.equal(there, -back)


def test_the_baselines_of_unpaired_losses() -> None:
    assert float(preference_unpaired.kl_estimate(torch.tensor([-3.0, 1.0]))) == 0
    assert float(preference_unpaired.kl_estimate(torch.tensor([3.0, 1.0]))) == 2
    rows = LogProbSums(torch.tensor([1.0, 3.0, 8.0]), torch.zeros(3), torch.ones(3))
    assert preference_unpaired.mean_reward(rows, torch.tensor([True, True, False]), 0.5) == (1.0 + 4.0) / 2
    assert preference_unpaired.mean_reward(rows, torch.tensor([True] * 3), 0.5) is None


def test_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        LogProbSums(torch.zeros(3), torch.zeros(3), torch.ones(1))
