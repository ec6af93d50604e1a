"""The gated delta rule and its convolution over packed sequences, against one token at a time in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels.gated_delta import EPS, Chunks, causal_conv, gated_delta_rule

CHUNK = 16
LENGTHS = (1, CHUNK - 1, 0, CHUNK, CHUNK + 1, 7, 2 * CHUNK + 3, 5)
KEY_HEADS, HEADS, KEY, VALUE, KERNEL = 2, 4, 6, 5, 4
CPU = torch.device("cpu")


def starts(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def inputs(tokens: int = sum(LENGTHS)) -> list[Tensor]:
    """Returns query, key, value, decay, beta."""
    g = torch.Generator().manual_seed(0)
    shapes = (KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)
    drawn = [torch.randn(tokens, *shape, generator=g, dtype=torch.float64) for shape in shapes]
    drawn[3], drawn[4] = -0.1 * drawn[3].exp(), drawn[4].sigmoid()
    return [x.requires_grad_() for x in drawn]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Computes the rule by its definition for one sequence."""
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()).repeat_interleave(HEADS // KEY_HEADS, 1)
        for x in (query, key)
    )
    state, outputs = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        told = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - told))
        outputs.append(torch.einsum("hk,hkv->hv", q, state) * KEY**-0.5)
    return torch.stack(outputs) if outputs else value


def test_the_rule_is_its_definition_with_every_gradient() -> None:
    given = inputs()
    out = gated_delta_rule(*given, Chunks.make(starts(), CHUNK, CPU))
    wanted = torch.cat([one_by_one(*parts) for parts in zip(*(x.split(LENGTHS) for x in given), strict=True)])
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad((x * weights).sum(), given) for x in (out, wanted)), strict=True)
    for found, right in pairs:
        assert torch.allclose(found, right, rtol=0, atol=1e-10) and right.abs().max() > 1e-3


def test_the_convolution_is_torch_s_of_each_sequence() -> None:
    g = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((sum(LENGTHS), 6), (6, 1, KERNEL)))
    found = causal_conv(x, weight, Chunks.make(starts(), CHUNK, CPU))
    for part, right in zip(found.split(LENGTHS), x.split(LENGTHS), strict=True):
        if len(part):
            wanted = F.conv1d(right.T[None], weight, padding=KERNEL - 1, groups=6)[0, :, : len(part)].T
            assert torch.allclose(part, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_no_bit_of_another_sequence_changes(changed: int, dtype: torch.dtype, value: float) -> None:
    """Results and gradients stay bitwise equal if another sequence changes or is NaN."""
    chunks, other = (
        Chunks.make(starts(), CHUNK, CPU),
        torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    )
    weight = torch.randn(HEADS * VALUE, 1, KERNEL, generator=torch.Generator().manual_seed(1)).to(dtype)

    def results(scale: float) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in inputs()]
        scales = torch.where(other == changed, scale, 1.0).to(dtype)
        query, key, v, decay, beta = (x * scales.view(-1, *[1] * (x.dim() - 1)) for x in given)
        v = causal_conv(v.flatten(1), weight, chunks).view_as(v)
        out = gated_delta_rule(query, key, v, decay, beta, chunks)
        return [out, *torch.autograd.grad(out.float().sum(), given)]

    pairs = list(zip(results(1.0), results(value), strict=True))
    assert all(before[other != changed].equal(after[other != changed]) for before, after in pairs)
    before, after = pairs[0]
    assert not LENGTHS[changed] or not before[other == changed].equal(after[other == changed])
