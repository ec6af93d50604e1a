"""The lm_head in emulated fp8: its three products use rounded operands, for any chunk size."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mrl.config.schema import FP8Config
from mrl.kernels import head_fused
from mrl.kernels.fp8 import Recipe
from mrl.kernels.head_fused import FusedFP8Products
from mrl.kernels.head_products import PlainProducts, Products, RoundedProducts, plain_products
from mrl.kernels.linear_logprob import linear_distribution, linear_log_prob
from mrl.models.precision import head_products

HYBRID = {"current": True, "delayed": True, "blockwise": False, "mxfp8": False}
RECIPES = {name: Recipe(name, hybrid) for name, hybrid in HYBRID.items()}  # type: ignore[arg-type]


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns hidden, weight, labels, and the weight of each row in the loss."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 256, generator=g), 0.06 * torch.randn(384, 256, generator=g)
    return hidden, weight, torch.randint(0, 380, (300,), generator=g), torch.randn(300, generator=g)


def made(products: Products, chunk: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs and the gradients of hidden states and weight."""
    hidden, weight, labels, counts = numbers()
    hidden.requires_grad_(), weight.requires_grad_()
    log_probs, *_ = linear_log_prob(hidden, weight, labels, 0.9, 0, 380, chunk=chunk, products=products)
    (counts * log_probs).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return log_probs.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_take_rounded_operands(name: str) -> None:
    recipe = RECIPES[name]
    hidden, weight, labels, counts = numbers()
    logits = recipe.rounded(hidden, "input", 1) @ recipe.rounded(weight, "weight", 1).T / 0.9
    log_p = logits[:, :380].log_softmax(-1)
    dx = torch.zeros(300, 384)
    dx[:, :380] = counts[:, None] * (torch.nn.functional.one_hot(labels, 380) - log_p.exp()) / 0.9
    d_hidden = recipe.rounded(dx, "gradient", 1) @ recipe.rounded(weight, "weight", 0)
    d_weight = recipe.rounded(dx, "gradient", 0).T @ recipe.rounded(hidden, "input", 0)
    got = made(partial(RoundedProducts, recipe=recipe))
    torch.testing.assert_close(got[0], log_p.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    for mine, want in zip(got[1:], (d_hidden, d_weight), strict=True):
        assert float((mine - want).norm() / want.norm()) < 2e-3  # one ulp in dx may round to the next number
    spread = linear_distribution(hidden, weight, labels, 0.9, 0, 380, products=partial(RoundedProducts, recipe=recipe))
    assert torch.equal(spread[0], got[0])


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_chunks_of_whole_blocks_change_nothing(name: str) -> None:
    products = partial(RoundedProducts, recipe=RECIPES[name])
    for whole, cut in zip(made(products), made(products, chunk=128), strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


def test_log_probs_and_gradients_are_off_by_what_fp8_has_of_digits() -> None:
    """Errors match fp8's precision: RMS in nats for log-probs, relative for both gradients."""
    exact = made(PlainProducts)
    for name, recipe in RECIPES.items():
        log_probs, *gradients = made(partial(RoundedProducts, recipe=recipe))
        assert 0.01 < float((log_probs - exact[0]).square().mean().sqrt()) < 0.06, name
        for mine, want in zip(gradients, exact[1:], strict=True):
            assert 0.02 < float((mine - want).norm() / want.norm()) < (0.09 if HYBRID[name] else 0.06), name


def test_weight_gradients_may_stay_as_they_are() -> None:
    rounded = made(partial(RoundedProducts, recipe=Recipe("delayed", hybrid=True, wgrad=False)))
    hidden, *_ = numbers()
    direction = torch.nn.functional.cosine_similarity(rounded[2].flatten(), made(PlainProducts)[2].flatten(), dim=0)
    assert direction > 0.9995


@pytest.mark.parametrize("wgrad", [True, False])
def test_transformer_engine_s_products_follow_the_recipe(monkeypatch: pytest.MonkeyPatch, wgrad: bool) -> None:
    """transformer-engine's products follow the recipe. Its casts and products are imitated in torch, and the test
    checks which are called. Products of later chunks are added to the first chunk's in place."""
    layouts = {"TN": lambda a, b: b @ a.T, "NN": lambda a, b: b @ a, "NT": lambda a, b: b.T @ a}
    seen: list[str] = []

    def general_gemm(
        a: Tensor, b: Tensor, *, out_dtype: torch.dtype, layout: str, use_split_accumulator: bool,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        assert accumulate == (out is not None)
        seen.append(layout + "+" * accumulate)
        result = layouts[layout](a, b).to(out_dtype)
        return [result if out is None else out.add_(result)]

    name = "transformer_engine.pytorch.cpp_extensions"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(general_gemm=general_gemm))
    for parent in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    monkeypatch.setattr(head_fused, "_cast", lambda x, role, recipe: x)
    got = made(partial(FusedFP8Products, recipe=Recipe("delayed", hybrid=True, wgrad=wgrad)), chunk=128)
    for mine, want in zip(got, made(PlainProducts), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
    assert [each for each in seen if "NT" in each] == ["NT", "NT+", "NT+"] * wgrad


def test_who_multiplies_follows_from_the_configuration() -> None:
    assert head_products(FP8Config(recipe="current", emulate=True)) is plain_products
    emulated = head_products(FP8Config(recipe="mxfp8", emulate=True, head=True))
    assert isinstance(emulated, partial) and emulated.func is RoundedProducts
    assert emulated.keywords == {"recipe": Recipe("mxfp8", hybrid=False)}
    fused = head_products(FP8Config(recipe="current", head=True))
    assert isinstance(fused, partial) and fused.func is FusedFP8Products
