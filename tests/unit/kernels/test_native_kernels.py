"""C kernels for CPUs against float64 and torch's forms, and the cases in which they are not used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algo import advantages, group_advantages, stats
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine import batched_attention, draws
from mrl.kernels import clipped_loss, head_rows, layers, native
from mrl.kernels.native import algo, engine
from mrl.kernels.native import attention as native_attention
from mrl.kernels.native import head as native_head
from mrl.kernels.native.attention import NativeAttention, Segments

WITHOUT = native.problem() or ""
NO_FAULT = ("there is no C compiler", "cannot be used", "MRL_KERNELS=")  # of the kernels themselves
pytestmark = pytest.mark.skipif(any(words in WITHOUT for words in NO_FAULT), reason=WITHOUT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Returns a function that calls a function with torch's forms."""

    def call(function: Callable[[], object]) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(native, "supports_tensors", lambda *tensors: False)
            return function()

    return call


@pytest.fixture
def c_serves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that has not called any C kernel."""
    stock, called = native.call, []

    def call(name: str, *arguments: Any) -> int:
        called.append(name)
        return stock(name, *arguments)

    monkeypatch.setattr(native, "call", call)
    yield
    assert called


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns the function's value and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    made = function(*leaves)
    return [made, *torch.autograd.grad(made, leaves, grad.to(made.dtype))]


def test_they_are_there() -> None:
    assert native.problem() is None and native.supports_float32_tensors(
        torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    )


@pytest.mark.parametrize(
    "x", [torch.zeros(1).double(), torch.zeros(1).bfloat16(), torch.zeros(1, device="meta"), torch.arange(2)]
)
def test_others_are_left_to_torch(x: Tensor) -> None:
    assert not native.supports_float32_tensors(torch.zeros(1), x)


def test_more_threads_are_left_to_torch() -> None:
    torch.set_num_threads(2)
    assert not native.supports_float32_tensors(torch.zeros(1))


ANGLES = draw(5, 1, 16, seed=9)
COS, SIN = ANGLES.cos().repeat(1, 1, 2), torch.cat([-ANGLES.sin(), ANGLES.sin()], -1)
PARTS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "swiglu": (layers.swiglu, [3 * draw(5, 1, 96)]),
    "swiglu, far": (layers.swiglu, [torch.tensor([-1e4, -95, -87.5, 0, 40, 1e4]).repeat(16).view(3, 32)]),
    "rms_norm": (lambda x, w: layers.rms_norm(x, w, 1e-5), [draw(200, 1, 48), draw(48, seed=1)]),
    "rotate": (lambda x: layers.rotate(x, COS.to(x.dtype), SIN.to(x.dtype)), [draw(5, 3, 32)]),
    "rotate, a part": (lambda x: layers.rotate(x, COS.to(x.dtype), SIN.to(x.dtype)), [draw(5, 3, 40)]),
}


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize("name", PARTS)
def test_layers(name: str, plain: Callable[..., list[Tensor]]) -> None:
    function, inputs = PARTS[name]
    grad = draw(*function(*inputs).shape, seed=7)
    made = results(function, *inputs, grad=grad)
    want = results(function, *[x.double() for x in inputs], grad=grad)
    for mine, exact in zip(made, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=2e-6, atol=2e-6)
    for mine, theirs in zip(made, plain(lambda: results(function, *inputs, grad=grad)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("c_serves")
def test_heads_that_lie_beside_others_are_rotated_where_they_are() -> None:
    both = draw(5, 3, 64)
    for part in (both[..., :32], both[..., 32:]):
        assert torch.equal(layers.rotate(part, COS, SIN), layers.rotate(part.contiguous(), COS, SIN))


def segments_of(*parts: tuple[list[int], range], results: list[int]) -> Segments:
    """Returns segments. parts: the keys of each segment, and which of them are its queries"""
    queries, asked = [len(asking) for _, asking in parts], [keys[i] for keys, asking in parts for i in asking]
    return Segments(
        query_starts=torch.tensor([0, *queries]).cumsum(0),
        queries=torch.tensor(asked),
        results=torch.tensor(results),
        last=torch.tensor([i for _, asking in parts for i in asking]),
        key_starts=torch.tensor([0, *(len(keys) for keys, _ in parts)]).cumsum(0),
        keys=torch.tensor([key for keys, _ in parts for key in keys]),
        longest=max(len(keys) for keys, _ in parts),
    )


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, of: Segments, window: int | None
) -> Tensor:
    """Computes attention one query at a time."""
    out, share = query.new_zeros(len(of.results), *query.shape[1:]), query.size(1) // key.size(1)
    for s, (begin, end) in enumerate(itertools.pairwise(of.query_starts.tolist())):
        tokens = of.keys[of.key_starts[s] : of.key_starts[s + 1]]
        for i in range(begin, end):
            last = int(of.last[i])
            seen = tokens[max(0, last + 1 - (window or last + 1)) : last + 1]
            k, v = (x[seen].repeat_interleave(share, 1) for x in (key, value))
            scores = torch.einsum("hd,khd->hk", query[of.queries[i]], k) * 0.3
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], 1)
            out = out.index_put((of.results[i],), torch.einsum("hk,khd->hd", scores.softmax(1)[:, : len(seen)], v))
    return out


# Tokens shared by segments in any order, queries for a part of them, segments without queries, single tokens.
SHARED = [*range(70, 20, -1)]
PARTS_OF_ATTENTION = (
    (SHARED, range(50)),
    ([*SHARED, *range(20)], range(50, 70)),
    ([71], range(1)),
    ([*SHARED[:31], *range(72, 90)], range(40, 49, 3)),
    ([*range(90, 200)], range(110)),
    ([*range(72, 78)], range(0)),
)


def attention_cases() -> list[Any]:
    """Returns all windows and sinks for one shape, and one case of each other shape; the rest is slow."""
    cases, whole = [], (6, 2, 32)
    shapes = ((4, 2, 16), (1, 1, 80), (2, 2, 64), whole)
    for shape, with_sinks, window in itertools.product(shapes, (False, True), (None, 1, 21)):
        is_slow = shape != whole and not (with_sinks and window == 21)
        cases.append(pytest.param(*shape, with_sinks, window, marks=[pytest.mark.slow] * is_slow))
    return cases


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize(("heads", "groups", "channels", "with_sinks", "window"), attention_cases())
def test_attention(window: int | None, with_sinks: bool, heads: int, groups: int, channels: int) -> None:
    """Attention with shared keys, strided heads, and sizes that fill no vector register."""
    count = sum(len(asking) for _, asking in PARTS_OF_ATTENTION)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    of = segments_of(*PARTS_OF_ATTENTION, results=order.tolist())
    wide = [draw(200, heads + i, channels + 8, seed=i) for i in range(3)]
    inputs = [x[:, :number, 3 : 3 + channels] for x, number in zip(wide, (heads, groups, groups), strict=True)]
    inputs += [draw(heads, seed=3)] * with_sinks
    grad = draw(count, heads, channels, seed=6)

    def packed(*x: Tensor) -> Tensor:
        assert native_attention.supports(x[0], x[1], x[2], x[3] if with_sinks else None)
        made: Tensor = NativeAttention.apply(*x, *[None] * (not with_sinks), of, 0.3, window)
        return made

    made = results(packed, *inputs, grad=grad)
    want = results(
        lambda *x: slow_attention(*x, *[None] * (not with_sinks), of, window),  # type: ignore[call-arg]
        *[x.double() for x in inputs],
        grad=grad,
    )
    for mine, exact in zip(made, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("c_serves")
def test_what_attention_gives_of_a_token_depends_on_nothing_behind_it_or_beside_it() -> None:
    inputs = [draw(160, 4, 32, seed=seed) for seed in range(3)]
    beside = segments_of(([*range(40)], range(40)), ([*range(40, 160)], range(120)), results=[*range(160)])
    alone = segments_of(([*range(40, 130)], range(7, 90)), results=[*range(83)])
    whole, some = (NativeAttention.apply(*inputs, None, of, 0.3, None) for of in (beside, alone))
    assert torch.equal(whole[47:130], some)


def test_attention_hands_nan_on() -> None:
    inputs = [draw(8, 1, 16, seed=seed) for seed in range(3)]
    inputs[0][5, 0, 3] = torch.nan
    made = NativeAttention.apply(*inputs, None, segments_of(([*range(8)], range(8)), results=[*range(8)]), 0.3, None)
    assert made[5].isnan().all() and not made[[0, 1, 2, 3, 4, 6, 7]].isnan().any()


@pytest.mark.parametrize("wrong", ["of 20 channels", "values narrower", "sinks in bfloat16"])
def test_attention_of_others_is_left_to_torch(wrong: str) -> None:
    channels = 20 if wrong == "of 20 channels" else 32
    query, key, value = (draw(8, heads, channels) for heads in (4, 2, 2))
    value = value[..., :16] if wrong == "values narrower" else value
    sinks = draw(4).bfloat16() if wrong == "sinks in bfloat16" else None
    assert not native_attention.supports(query, key, value, sinks)


@pytest.mark.parametrize("length", [1, 16, 37, 3000])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_advantages(length: int, shift_mean: bool, plain: Callable[..., tuple[Tensor, Tensor]]) -> None:
    rewards, values = draw(4, length), draw(4, length, seed=1)
    mask = torch.arange(length) < torch.tensor([length, length // 2, 0, max(1, length - 5)])[:, None]
    rewards[~mask] = values[~mask] = torch.nan
    inputs = advantages.AdvantageInputs(rewards, mask, torch.arange(4), values)
    made = advantages.gae(inputs, 0.99, 0.95, True, shift_mean)
    assert algo.gae(rewards, values, mask, 0.99, 0.95 * 0.99) is not None
    for mine, theirs in zip(made, plain(lambda: advantages.gae(inputs, 0.99, 0.95, True, shift_mean)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hole", [0, 7, 15, 16, 40])
def test_a_mask_with_a_hole_is_seen(hole: int, plain: Callable[..., tuple[Tensor, Tensor]]) -> None:
    rewards, values, mask = draw(3, 50), draw(3, 50, seed=1), torch.ones(3, 50, dtype=torch.bool)
    mask[1, hole] = False
    assert algo.gae(rewards, values, mask, 0.99, 0.9) is None
    inputs = advantages.AdvantageInputs(rewards, mask, torch.arange(3), values)
    made = advantages.gae(inputs, 0.99, 0.95, False, True)
    for mine, theirs in zip(made, plain(lambda: advantages.gae(inputs, 0.99, 0.95, False, True)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize("length", [1, 16, 37])
def test_advantages_of_whole_responses(length: int, plain: Callable[..., tuple[Tensor, Tensor]]) -> None:
    rewards, mask = draw(6, length), draw(6, length, seed=1) < 0.5
    inputs = advantages.AdvantageInputs(rewards, mask, torch.arange(6) // 3)
    made = group_advantages.grpo(inputs, True)
    for mine, theirs in zip(made, plain(lambda: group_advantages.grpo(inputs, True)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("c_serves")
def test_whitening_of_what_is_far_from_zero() -> None:
    x, mask = draw(3, 70) + 1e4, draw(3, 70, seed=2) < 1
    want = stats.whiten(x.double(), mask)
    torch.testing.assert_close(stats.whiten(x, mask).double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize("n", [1, 16, 5000])
def test_the_clipped_loss(n: int, plain: Callable[..., list[Tensor]]) -> None:
    """The clipped loss with log-ratios beyond the limit, and non-finite ones."""
    old, advantage, noise, weight, of_metrics = draw(5, n)
    new = old + torch.where(torch.arange(n) % 11 == 0, 25.0, 0.3) * noise
    clip = clipped_loss.Clip(0.2, 0.28, 3.0, 20.0)

    def run() -> list[Tensor]:
        leaf = new.clone().requires_grad_()
        loss, metrics = clipped_loss.clipped_loss(leaf, old, advantage, weight.abs() / n, of_metrics.abs() / n, clip)
        return [loss, *torch.autograd.grad(loss, leaf), metrics]

    for mine, theirs in zip(run(), plain(run), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    new[0] = torch.nan
    loss, gradient, _ = run()
    assert loss.isnan() and gradient[0] == 0


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [5, 48, 5003])
def test_the_loss_head_s_rows(
    words: int, dtype: torch.dtype, with_entropy: bool, plain: Callable[..., list[Tensor]]
) -> None:
    """Rows of the loss head with a new maximum in each block, and with strided rows."""
    x = (3 * draw(6, words + 3) + torch.linspace(0, 30, words + 3)).to(dtype)[:, :words]
    labels = head_rows.LabelColumns.of(torch.tensor([0, 1, 2, 3, 4, 99_999]), 0, words)
    loss_gradients = draw(6, seed=1), draw(6, seed=2) if with_entropy else None

    def run() -> list[Tensor]:
        found = head_rows.statistics(x.clone(), labels, 0.7, None, squares=True)
        made = head_rows.d_logits(x.clone(), found, labels, 0.7, loss_gradients, torch.empty_like(x, dtype=dtype))
        return [*vars(found).values(), made]

    assert native_head.supports(x)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-7, "atol": 1e-5}
    for mine, theirs in zip(run(), plain(run), strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.usefixtures("c_serves")
def test_a_gradient_in_bfloat16_is_rounded_as_torch_rounds() -> None:
    rows = head_rows.RowStatistics(*torch.zeros(6, 1))
    labels = head_rows.LabelColumns.of(torch.zeros(1, dtype=torch.int64), 0, 4000)
    x = torch.linspace(-9, 0, 4000)[None]
    made = [
        head_rows.d_logits(x, rows, labels, 1.0, (torch.ones(1), None), torch.empty_like(x, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert torch.equal(made[0], made[1].bfloat16())


@pytest.mark.usefixtures("c_serves")
@pytest.mark.parametrize("vocab", [3, 16, 500, 5003])
def test_draws_are_torch_s(vocab: int, plain: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    """Draws the same tokens as torch with masked, certain and non-finite probabilities."""
    log_probs = (4 * draw(400, vocab)).log_softmax(-1)
    log_probs[:100, 1:-1] = -torch.inf
    log_probs[100:120] = -torch.inf
    log_probs[100:120, 2] = 0
    log_probs[120] = torch.nan
    log_probs[121, 1] = torch.nan
    seeds = torch.randint(-(2**62), 2**62, (400,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(400)
    made = draws.draw(log_probs, seeds, positions)
    assert torch.equal(made, plain(lambda: draws.draw(log_probs, seeds, positions)))
    assert torch.equal(made[100:120], torch.full((20,), 2))
    assert torch.equal(made[50:60], draws.draw(log_probs[50:60], seeds[50:60], positions[50:60]))


@pytest.mark.parametrize("window", [None, -1, 5])
@pytest.mark.parametrize(("heads", "groups", "wide"), [(4, 2, 32), (3, 3, 16)])
def test_an_engine_decodes_where_its_cache_lies(window: int | None, heads: int, groups: int, wide: int) -> None:
    query, key, value = draw(4, heads, 32), draw(90, groups, 32, seed=1), draw(90, groups, wide, seed=2)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(3)).view(9, 10).int()
    rows, lengths = torch.tensor([7, 0, 3, 4], dtype=torch.int32), torch.tensor([1, 10, 6, 3], dtype=torch.int32)
    assert engine.supports_decode_attention(query, key, value, slots)
    assert not engine.supports_decode_attention(query, key, value, slots.long()), "as another version may have them"
    made = torch.empty(4, heads, wide)
    engine.decode_attention(query, key, value, slots, rows, lengths, made, window=window, scale=0.2)
    want = torch.empty_like(made)
    for group in batched_attention.plan_decode(slots[rows.long()], lengths, window, heads):
        batched_attention._attend_decode(group, query, want, key, value, 0.2)
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-6)
