"""Attention, rope and initialization, tested without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mrl.families import UnsupportedModel, load_arch
from mrl.families.gpt_oss import GATE
from mrl.families.table import padded_vocab_size
from mrl.kernels import native
from mrl.kernels.layers import LIMIT, SHARPNESS, clamped_swiglu
from mrl.kernels.native import attention as native_attention
from mrl.models.attention import packed_attention
from mrl.models.attention_plan import AttentionPlan, same_length_groups
from mrl.models.initialise import _fill
from mrl.models.rope import inverse_frequencies
from tests.helpers.tiny import make_tiny

CPU = torch.device("cpu")


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = []
    repeat = q.size(1) // k.size(1)
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        ks, vs = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (ks, vs))
        out.append(F.scaled_dot_product_attention(qs.transpose(0, 1), ks, vs, is_causal=True).transpose(0, 1))
    return torch.cat(out)


def tokens_of_rank(lengths: list[int], cp: int, rank: int) -> torch.Tensor:
    """Returns the positions in the complete packed batch of the tokens that a rank holds."""
    parts = []
    for piece in torch.arange(sum(lengths)).split(lengths):
        chunks = piece.chunk(2 * cp)
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else [piece]
    return torch.cat(parts)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_attention_equals_one_sequence_at_a_time(cp: int) -> None:
    lengths = [8, 136, 64, 16, 200, 8, 144]
    g = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(total, 4, 16, generator=g)
    wanted = reference_attention(q, k, v, lengths)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), (q, k, v))

    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    places = [tokens_of_rank(lengths, cp, r) for r in range(cp)]
    everywhere = torch.cat(places)
    out = torch.zeros_like(wanted)
    for r, mine in enumerate(places):
        plan = AttentionPlan.make(cu, cp, r, CPU)
        part = packed_attention(q[mine], k[everywhere], v[everywhere], plan, 16**-0.5)
        out = out.index_copy(0, mine, part)
    assert torch.allclose(out, wanted, atol=1e-6)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for got, want in zip(grads, wanted_grads, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_a_sequence_that_is_too_long_for_the_kernel_in_c_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(40, heads, 16, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2))
    if not native.supports_float32_tensors(q):
        pytest.skip(native.problem() or "more than one thread")
    plan, made = AttentionPlan.make(torch.tensor([0, 30, 40]), 1, 0, CPU), []
    for longest in (30, 29):
        monkeypatch.setattr(native_attention, "LONG", longest * 16)
        made.append(packed_attention(q.requires_grad_(), k, v, plan, 0.25))
    assert ["NativeAttention" in type(out.grad_fn).__name__ for out in made] == [True, False]
    torch.testing.assert_close(*made, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    ("wanted", "few_ask"),
    [(range(0), True), ((7, 287, 575), True), (range(100, 130), True), (range(5, 570), False)],
    ids=["none", "ends", "some of one", "nearly all"],
)
def test_results_of_some_tokens_are_those_that_all_give(
    wanted: Iterable[int], few_ask: bool, cp: int, window: int | None
) -> None:
    """Attention for some tokens equals that of all, whether or not others have queries, and on a rank without any."""
    lengths = [8, 136, 64, 16, 200, 8, 144]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(sum(lengths), 4, 16, generator=g)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    places = [tokens_of_rank(lengths, cp, r) for r in range(cp)]
    everywhere, chosen = torch.cat(places), torch.tensor([*wanted], dtype=torch.int64)
    for r, mine in enumerate(places):
        whole, rows = AttentionPlan.make(cu, cp, r, CPU), torch.isin(mine, chosen).nonzero()[:, 0]
        part = whole.for_outputs(rows)
        if cp == 1:
            assert (part.query_tokens is not None) == few_ask
        given = [packed_attention(q[mine], k[everywhere], v[everywhere], plan, 0.25, window) for plan in (part, whole)]
        given[1] = given[1][rows]
        torch.testing.assert_close(given[0], given[1], atol=1e-6, rtol=0)
        grads = [torch.autograd.grad((out * weights[mine[rows]]).sum(), (q, k, v)) for out in given]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_sink_is_a_score_more_that_stands_for_no_token(cp: int, window: int | None) -> None:
    """A sink acts as an additional score without a token. Values and gradients, the sink's included, equal a float64
    softmax over scores and sink."""
    lengths, g = [8, 136, 16, 64], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2))
    sinks, weights = torch.randn(4, generator=g, requires_grad=True), torch.randn(sum(lengths), 4, 16, generator=g)
    parts = []
    for own in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        one, keys, values = (x.repeat_interleave(4 // x.size(1), 1).transpose(0, 1) for x in own)
        at = torch.arange(one.size(1))
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or 1000))
        scores = (one @ keys.mT * 0.25).masked_fill(~seen, -torch.inf)
        column = sinks.double()[:, None, None].expand(-1, one.size(1), 1)
        parts.append((torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values).transpose(0, 1))
    wanted = torch.cat(parts)
    cu, out = torch.tensor([0, *lengths]).cumsum(0), torch.zeros(sum(lengths), 4, 16)
    places = [tokens_of_rank(lengths, cp, r) for r in range(cp)]
    for r, mine in enumerate(places):
        plan, everywhere = AttentionPlan.make(cu, cp, r, CPU), torch.cat(places)
        part = packed_attention(q[mine], k[everywhere], v[everywhere], plan, 0.25, window, sinks)
        out = out.index_copy(0, mine, part)
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=0)
    inputs = (q, k, v, sinks)
    grads = (torch.autograd.grad((each * weights).sum(), inputs) for each in (out, wanted))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_the_clamped_activation_is_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1))
    x = torch.linspace(-12, 12, 97)
    pairs = torch.cartesian_prod(x, x).requires_grad_()  # gate, up: within the limits, at them and beyond
    weights = torch.randn(len(pairs), 1, generator=torch.Generator().manual_seed(3))
    assert GATE == {"swiglu_alpha": SHARPNESS, "swiglu_limit": LIMIT}, "what config.json may say is what is computed"
    mine, wanted = clamped_swiglu(pairs), theirs._apply_gate(pairs)
    torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-6)
    got, want = (torch.autograd.grad((each * weights).sum(), pairs)[0] for each in (mine, wanted))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_padding_of_attention_is_bounded() -> None:
    lengths = torch.randint(1, 4000, (300,), generator=torch.Generator().manual_seed(0))
    groups = same_length_groups(lengths)
    assert sorted(torch.cat(groups).tolist()) == list(range(300))
    assert len(groups) <= 14
    longest = [int(lengths[g].max()) for g in groups]
    assert sum(n * g.numel() for n, g in zip(longest, groups, strict=True)) < 1.5 * int(lengths.sum())


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, "rope_type=yarn"),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "rope_type=dynamic"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_rope_that_would_be_wrong_is_refused(tmp_path: Path, parameters: dict[str, Any], key: str) -> None:
    path = make_tiny(tmp_path / "model", "llama", weights=False, rope_parameters=parameters)
    with pytest.raises(UnsupportedModel, match=f"config.json.*{key}"):
        inverse_frequencies(str(path), load_arch(path))


def test_a_config_that_transformers_cannot_read_is_one_line(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model", "llama", weights=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"use_cache": "maybe"}))
    with pytest.raises(UnsupportedModel, match=r"config\.json: transformers cannot read it: [^\n]*use_cache[^\n]*$"):
        inverse_frequencies(str(path), load_arch(path))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_frequencies_are_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    path = make_tiny(tmp_path / "model", "llama", weights=False, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path)).inv_freq
    assert torch.equal(inverse_frequencies(str(path), load_arch(path))[""][0], theirs)


def test_a_slice_of_random_weights_is_the_slice_of_the_whole() -> None:
    whole = torch.empty(300, 48)
    _fill(whole, "some.weight", 0, 0.02, 7, 0, 48)
    rows, cols = torch.empty(90, 48), torch.empty(300, 24)
    _fill(rows, "some.weight", 117, 0.02, 7, 0, 48)
    _fill(cols, "some.weight", 0, 0.02, 7, 24, 48)
    assert torch.equal(rows, whole[117:207]) and torch.equal(cols, whole[:, 24:])
    assert abs(float(whole.std()) - 0.02) < 0.001 and abs(float(whole.mean())) < 0.001
    other = torch.empty(300, 48)
    _fill(other, "some.weight", 0, 0.02, 8, 0, 48)
    assert not torch.equal(other, whole)


def test_padded_vocabulary(tmp_path: Path) -> None:
    arch = load_arch(make_tiny(tmp_path / "model", "llama", weights=False, vocab_size=323))
    assert [padded_vocab_size(arch, tp) for tp in (1, 2, 4)] == [328, 336, 352]
