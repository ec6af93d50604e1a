"""fp8 scales, casts and products against a slow table in float64, written from the formats' definitions."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrl.kernels.fp8 import E4M3, E5M2, ROLES, Recipe, Role, Scales, fp8_linear, round_trip, tensor_scale

RECIPES = {
    f"{scaling} {'hybrid' if hybrid else 'e4m3'}": Recipe(scaling, hybrid)  # type: ignore[arg-type]
    for scaling, hybrid in itertools.product(("current", "delayed", "blockwise", "mxfp8"), (True, False))
}
# operand of a product -> the dimension that the product sums over: y = x w', dx = g w, dw = g' x
ORIENTATIONS: dict[str, tuple[Role, int]] = {
    "fprop x": ("input", 1),
    "fprop w": ("weight", 1),
    "dgrad g": ("gradient", 1),
    "dgrad w": ("weight", 0),
    "wgrad g": ("gradient", 0),
    "wgrad x": ("input", 0),
}
F32 = np.float32


def table(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """Returns all non-negative numbers of the format in order. An even index means an even last bit."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        value = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
        found += [value] if value <= largest else []
    return found


TABLES = {E4M3: table(4, 3, 448.0), E5M2: table(5, 2, 57344.0)}


def nearest(value: float, dtype: torch.dtype) -> float:
    """Returns the nearest number of the format, ties to an even last bit, at most the format's largest."""
    if math.isnan(value):
        return value
    numbers, size = TABLES[dtype], min(abs(value), TABLES[dtype][-1])
    above = bisect_left(numbers, size)
    below = max(above - 1, 0)
    low, high = size - numbers[below], numbers[above] - size
    place = below if low < high or (low == high and below % 2 == 0) else above
    return math.copysign(numbers[place], value)


def own_scale(recipe: Recipe, amax: float, dtype: torch.dtype) -> tuple[float, float]:
    """Returns (the factor before the cast, the factor after it), each as a float32."""
    largest = TABLES[dtype][-1]
    if recipe.scaling == "mxfp8":
        ratio = float(F32(amax) * F32(1 / largest))
        mantissa, exponent = math.frexp(ratio)
        exponent = -127 if ratio <= 2.0**-127 else exponent - (mantissa == 0.5)
        return (1.0 if exponent == -127 else 2.0**-exponent), 2.0**exponent
    if amax == 0 or not math.isfinite(amax):
        return 1.0, 1.0
    with np.errstate(over="ignore"):
        scale = min(F32(largest) / F32(amax), np.finfo(F32).max)
    if recipe.scaling == "blockwise":
        scale = F32(2.0 ** math.floor(math.log2(float(scale))))
    return float(scale), float(F32(1) / F32(scale))


def slow(x: Tensor, recipe: Recipe, role: Role, along: int) -> Tensor:
    """Rounds element by element."""
    dtype = E5M2 if recipe.hybrid and role == "gradient" else E4M3
    rows, columns = x.shape
    size = {"current": None, "delayed": None, "blockwise": 128, "mxfp8": 32}[recipe.scaling]
    if size is None:
        block = (rows, columns)
    elif role == "weight" and recipe.scaling == "blockwise":
        block = (size, size)
    else:
        block = (size, 1) if along == 0 else (1, size)
    out = torch.empty(rows, columns)
    for i, j in itertools.product(range(0, rows, block[0]), range(0, columns, block[1])):
        part = x[i : i + block[0], j : j + block[1]]
        factor, inverse = own_scale(recipe, float(part.abs().max()), dtype)
        for a, b in itertools.product(range(part.size(0)), range(part.size(1))):
            scaled = float(F32(part[a, b].item()) * F32(factor))
            out[i + a, j + b] = float(F32(nearest(scaled, dtype)) * F32(inverse))
    return out


def values(seed: int, rows: int = 130, columns: int = 70) -> Tensor:
    """Returns values of many magnitudes, with ties, zeros of both signs, subnormal numbers, blocks of zeros, and
    partial blocks at the edges."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp(3 * torch.randn(rows, 1, generator=g))
    x[::7] = x[::7].sign() * 2.0 ** torch.randint(-9, 9, x[::7].shape, generator=g) * 1.0625
    x[1], x[2, ::2], x[3] = 0.0, -0.0, 1e-40
    x[32:64, 32:64] = 0.0
    x[-1, -1] = 1e-44
    return x


def rounding_cases() -> list[Any]:
    """Returns all recipes in all orientations. Cases with the same rounding as another one are slow: hybrid formats
    differ only in gradients, the first delayed scale is the current one, and a scale of a whole tensor has no
    direction."""
    cases = []
    for (name, recipe), (orientation, (role, along)) in itertools.product(RECIPES.items(), ORIENTATIONS.items()):
        of_tensor = recipe.scaling in ("current", "delayed")
        repeats = (recipe.hybrid and role != "gradient") or (of_tensor and along == 0 and role != "gradient")
        repeats |= recipe.scaling == "delayed" and not (recipe.hybrid and along == 1)
        cases.append(pytest.param(name, orientation, marks=[pytest.mark.slow] * repeats))
    return cases


@pytest.mark.parametrize(("name", "orientation"), rounding_cases())
def test_rounding_is_the_table_s_to_the_bit(name: str, orientation: str) -> None:
    recipe, (role, along) = RECIPES[name], ORIENTATIONS[orientation]
    x = values(seed=len(name) + along)
    got = recipe.rounded(x, role, along)  # type: ignore[arg-type]
    assert torch.equal(got.view(torch.int32), slow(x, recipe, role, along).view(torch.int32))
    assert torch.equal(recipe.rounded(x.bfloat16(), role, along), recipe.rounded(x.bfloat16().float(), role, along))  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", ["current", "blockwise", "mxfp8"])
@pytest.mark.parametrize("fill", [0.0, 1e-44, 2e-38, 3e38, -7.0])
def test_a_tensor_of_one_value_keeps_it(scaling: str, fill: float) -> None:
    recipe = Recipe(scaling, hybrid=False)  # type: ignore[arg-type]
    x = torch.full((3, 40), fill)
    got = recipe.rounded(x, "input", 1)
    assert torch.equal(got, slow(x, recipe, "input", 1))
    if abs(fill) > 1:
        assert torch.allclose(got, x, rtol=0.07 if scaling != "current" else 1e-6, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite_stays_seen_or_saturates(name: str) -> None:
    """Infinity saturates with a scale of 1; in mxfp8 the rest of its block is lost. A NaN stays visible."""
    recipe, x = RECIPES[name], values(0)[:, :64].clone()
    x[5, 3] = math.inf
    got = recipe.rounded(x, "input", 1)
    if recipe.scaling == "mxfp8":
        assert got[5, 3].isnan() and got[5, :32].nan_to_num(0.0).abs().max() == 0
    else:
        assert got[5, 3] == 448
    assert got[6].isfinite().all()
    x[5, 3] = math.nan
    assert recipe.rounded(x, "input", 1)[5, 3].isnan()


def test_every_number_of_a_format_is_kept_and_every_tie_goes_to_even() -> None:
    for dtype, numbers in TABLES.items():
        exact = torch.tensor(numbers, dtype=torch.float64).float()
        middles = ((exact[1:].double() + exact[:-1].double()) / 2).float()
        x = torch.cat([exact, middles, -exact, middles.nextafter(torch.tensor(0.0)), exact[-1:] * 4])[None]
        one = torch.ones(())
        want = torch.tensor([nearest(v, dtype) for v in x[0].tolist()])
        assert torch.equal(round_trip(x, dtype, lambda amax, one=one: (one, one))[0], want)
        assert len(numbers) == {E4M3: 127, E5M2: 124}[dtype]


def products(recipe: Recipe, x: Tensor, w: Tensor, g: Tensor, scales: Scales | None = None) -> tuple[Tensor, ...]:
    """Returns y, dx, dw."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp8_linear(x, w, None, recipe, scales)
    y.backward(g)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def gaussian() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w, d = (torch.randn(*shape, generator=g) for shape in ((256, 384), (512, 384), (256, 512)))
    return x, 0.02 * w, 1e-4 * d


# relative errors of y, dx, dw by Frobenius norm, in percent
ERRORS = {
    "current hybrid": (3.7, 5.9, 5.9),
    "current e4m3": (3.7, 3.7, 3.7),
    "blockwise e4m3": (3.7, 3.7, 3.7),
    "mxfp8 e4m3": (3.7, 3.7, 3.7),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_a_layer_is_the_format_s(name: str) -> None:
    x, w, g = gaussian()
    exact = (x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double())
    for got, want, percent in zip(products(RECIPES[name], x, w, g), exact, ERRORS[name], strict=True):
        error = 100 * float((got - want).norm() / want.norm())
        assert abs(error - percent) < 0.15, (name, error)


def test_rows_of_other_sizes_tell_blocks_from_tensors() -> None:
    """Rows of different magnitude distinguish blocks from tensors. A scale of the whole tensor turns far smaller rows
    into zeros; a block depends on its own row only."""
    x, w, g = gaussian()
    x = x * torch.exp(6 * torch.randn(256, 1, generator=torch.Generator().manual_seed(1)))
    want = x.double() @ w.double().T
    medians = {}
    for name in ERRORS:
        y, *_ = products(RECIPES[name], x, w, g)
        medians[name] = float(((y - want).norm(dim=1) / want.norm(dim=1)).median())
    assert medians["blockwise e4m3"] < 0.04 and medians["mxfp8 e4m3"] < 0.04
    assert medians["current hybrid"] > 0.5, medians


def test_columns_of_other_sizes_are_the_gradient_s_blocks() -> None:
    """dx sums over the outputs. A block of 32 follows their different magnitudes, a block of 128 less, and a scale of
    the tensor least."""
    x, w, g = gaussian()
    size = torch.exp(6 * torch.randn(512 // 32, generator=torch.Generator().manual_seed(2))).repeat_interleave(32)
    g, w = g * size, w / size[:, None]  # every output contributes equally to dx
    want = g.double() @ w.double()
    errors = {
        name: float((products(RECIPES[name], x, w, g)[1] - want).norm() / want.norm())
        for name in ("current e4m3", "blockwise e4m3", "mxfp8 e4m3")
    }
    assert errors["mxfp8 e4m3"] < 0.05 < 2 * errors["mxfp8 e4m3"] < errors["blockwise e4m3"], errors


def test_delayed_scales_by_what_was() -> None:
    recipe = Recipe("delayed", hybrid=True)
    x, w, g = gaussian()
    g = 1e-3 * g
    scales = Scales(recipe, length=2, use="max", margin=1)
    first = products(recipe, x, w, g, scales)
    assert torch.equal(scales.seen, torch.stack([t.abs().max() for t in (x, w, g)]))
    assert not first[1].any(), "gradients of 1e-7 are below e5m2's beginning while their scale is 1"
    scales.roll(scales.seen)
    want = [tensor_scale(t.abs().max(), recipe.format(role))[0] / 2 for t, role in zip((x, w, g), ROLES, strict=True)]
    assert torch.equal(scales.scale, torch.stack(want))
    second = products(recipe, x, w, g, scales)
    current = products(Recipe("current", hybrid=True), x, w, g)
    for mine, theirs in zip(second, current, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.08
    for size in (0.5, 0.5):  # the larger value leaves the history of 2
        scales.roll(torch.full((3,), size))
    assert torch.equal(scales.scale, torch.tensor([448.0, 448.0, 57344.0]))
    scales.roll(torch.tensor([0.0, math.inf, 0.5]))
    assert torch.equal(scales.scale, torch.tensor([448.0, 448.0, 57344.0]))
    other = Scales(recipe, length=2, use="max", margin=1)
    other.restore(scales.state())
    assert torch.equal(other.state(), scales.state())
    with pytest.raises(ValueError, match="12 numbers, expected 18"):
        Scales(recipe, length=4, use="max", margin=1).restore(scales.state())


def test_no_tokens_are_no_error_and_weight_gradients_may_be_exact() -> None:
    w = torch.randn(8, 4, requires_grad=True)
    for recipe in RECIPES.values():
        fp8_linear(torch.empty(0, 4), w, None, recipe).sum().backward()
    x, w, g = gaussian()
    _, _, exact = products(Recipe("delayed", hybrid=True, wgrad=False), x, w, g)
    assert torch.allclose(exact, g.T @ x)
