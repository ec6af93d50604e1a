"""Code paths that are faster on GPUs give the same results; tested without a GPU."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform

platform.install()

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.families.arch import ExpertArch, LayerArch  # noqa: E402
from mrl.families.table import padded_vocab_size  # noqa: E402
from mrl.kernels import head_products, linear_logprob, triton_support  # noqa: E402
from mrl.kernels.head_chunks import chunk_rows, waiting_rows  # noqa: E402
from mrl.learner.optimizer import sums_overlap  # noqa: E402
from mrl.models import attention, transformer_config  # noqa: E402
from mrl.models.gpt import vocab_align  # noqa: E402
from mrl.parallel.stages import StaticShapeCommunicator, arrival_order  # noqa: E402
from mrl.platform import fused, process, transfers  # noqa: E402
from mrl.weights.model import load  # noqa: E402
from tests.helpers.second_device import DEVICE  # noqa: E402
from tests.unit.weights.test_weights_table import small_arch  # noqa: E402


def tensors() -> list[Tensor]:
    """Returns tensors of several dtypes and shapes: one empty, one scalar, one with gaps, one longer than a buffer."""
    numbers = torch.Generator().manual_seed(0)
    return [
        torch.arange(7),
        torch.randn(3, 5, generator=numbers).bfloat16(),
        torch.randn(0, 4),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(40, 6, generator=numbers)[:, ::2],
        torch.randn(9, 11, generator=numbers) > 0,
        torch.randn(1000, generator=numbers),
    ]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("slot_bytes", [64, 1000, 1 << 20])
def test_copies_through_two_buffers_are_the_tensors(slot_bytes: int) -> None:
    here = tensors()
    found = transfers.copy_through_buffers(here, slot_bytes)
    assert same(found, here)
    assert not {tensor.data_ptr() for tensor in found if tensor.numel()} & {tensor.data_ptr() for tensor in here}


def test_what_is_sent_together_arrives_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = tensors()
    assert all(a is b for a, b in zip(platform.to_device(here, torch.device("cpu")), here, strict=True))
    there = platform.to_device(here, DEVICE)
    assert [(t.shape, t.dtype, t.device) for t in there] == [(t.shape, t.dtype, DEVICE) for t in here]
    assert len({t.untyped_storage()._cdata for t in there}) == 1, "one block is copied"
    starts, total = transfers._places(here)
    block = torch.zeros(total, dtype=torch.uint8)
    for start, tensor in zip(starts, here, strict=True):
        transfers._view(block, start, tensor).copy_(tensor)
    assert same([transfers._view(block, start, tensor) for start, tensor in zip(starts, here, strict=True)], here)


@pytest.mark.parametrize("cp", [1, 2])
def test_attention_with_keys_of_their_own_is_the_same(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with repeated keys gives the same result. CUDA needs it with a mask or in float32, where grouped keys
    would store all scores."""
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.tensor([8, 136, 64])
    plan = attention.AttentionPlan.make(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), cp, 0,
                                        torch.device("cpu"))  # fmt: skip
    total = int(lengths.sum())
    q = torch.randn(total // cp, 4, 16, generator=numbers, requires_grad=True)
    k, v = (torch.randn(total, 2, 16, generator=numbers, requires_grad=True) for _ in range(2))
    found = []
    for own in (False, True):
        monkeypatch.setattr(attention, "_needs_own_keys", lambda query, mask, own=own: own)
        out = attention.packed_attention(q, k, v, plan, 0.25)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_only_flash_attention_shares_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(dtype: torch.dtype, is_cuda: bool = True) -> Any:
        return SimpleNamespace(dtype=dtype, is_cuda=is_cuda)

    mask = torch.ones(1, dtype=torch.bool)
    assert attention._needs_own_keys(query(torch.float32), None)
    assert attention._needs_own_keys(query(torch.bfloat16), mask)
    assert not attention._needs_own_keys(query(torch.bfloat16), None)
    assert not attention._needs_own_keys(query(torch.float32, is_cuda=False), mask)


def test_wide_products_spare_the_logits_and_the_weight_s_gradient_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide products save one rounding of the logits and of the weight's gradient. They imitate `out_dtype` on CUDA:
    bfloat16 factors, float32 sums."""
    numbers = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 32, generator=numbers), torch.randn(96, 32, generator=numbers)
    labels = torch.randint(0, 96, (64,), generator=numbers)

    def errors(dtype: torch.dtype, products: head_products.Products) -> tuple[Tensor, Tensor]:
        h, w = (x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight))
        log_probs, *_ = linear_logprob.linear_log_prob(h, w, labels, 1.0, 0, 96, chunk=16, products=products)
        return log_probs.detach(), torch.autograd.grad(log_probs.sum(), w)[0].float()

    exact, rounded = (errors(dtype, head_products.PlainProducts) for dtype in (torch.float32, torch.bfloat16))
    wide = errors(torch.bfloat16, head_products.WidenedProducts)
    for a, b, want in zip(wide, rounded, exact, strict=True):
        assert (a - want).norm() < 0.7 * (b - want).norm()


def test_chunks_are_larger_where_kernels_are_launched() -> None:
    columns = 151_936 // 8
    assert [chunk_rows(columns, itemsize, on_gpu=False) for itemsize in (4, 2)] == [256, 512]
    assert chunk_rows(columns, 4, on_gpu=True) == 7040  # whole blocks of fp8
    assert chunk_rows(151_936, 4, on_gpu=True) == 1024


@pytest.mark.parametrize(
    ("rows", "hidden", "at_once"),
    [
        (500, 4096, 500),  # less than a chunk
        (8192, 4096, 8192),  # all rows, in the memory of one float32 sum
        (8193, 4096, 3072),  # 1 GiB, in whole chunks
        (3500, 1024, 3500),  # all fit into 1 GiB
        (8192, 1024, 3072),
    ],
)
def test_rows_are_multiplied_together_as_far_as_memory_goes(rows: int, hidden: int, at_once: int) -> None:
    assert waiting_rows(rows, 151_936, hidden, 2, 1024) == at_once
    assert waiting_rows(2, 1 << 30, 1, 2, 1024) == 2  # a vocabulary of which no row fits


@pytest.mark.parametrize(("where", "rows"), [("cpu", [8, 16]), ("cuda", [128, 256])])
def test_the_vocabulary_fills_whole_tiles_of_a_gpu(
    where: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device(where))
    assert [padded_vocab_size(small_arch(), tp, vocab_align()) for tp in (1, 2)] == rows


@pytest.mark.parametrize(
    ("fused_layers", "experts", "modules"),
    [(False, True, ["mlp", "core_attn"]), (True, False, ["mlp"]), (True, True, ["mlp", "moe_act"])],
)
def test_selective_recomputation_is_of_what_the_layers_keep(
    fused_layers: bool, experts: bool, modules: list[str]
) -> None:
    asked = transformer_config._recompute(TrainConfig(recompute="selective"), fused_layers, experts=experts)
    assert asked["recompute_modules"] == modules


@pytest.mark.parametrize(("compiler", "usable"), [("/bin/true", True), ("/nowhere", False)])
def test_triton_s_kernels_need_its_compiler(
    compiler: str, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", compiler)
    for cached in (fused.triton_usable, triton_support.problem):
        cached.cache_clear()
    assert platform.triton_usable() == usable
    for cached in (fused.triton_usable, triton_support.problem):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("fused_layers", "usable", "permuted"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_experts_are_permuted_by_a_kernel_that_can_be_compiled(
    fused_layers: bool, usable: bool, permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "triton_usable", lambda: usable)
    arch: Any = SimpleNamespace(
        experts=ExpertArch(4, 2, normalize_topk=True),
        expert_width=8,
        layers=(LayerArch(8, experts=True),),
        layers_differ=False,
    )
    asked = transformer_config._experts(arch, fused_layers)
    assert asked["moe_permute_fusion"] == permuted and asked["moe_grouped_gemm"] == fused_layers


@pytest.mark.parametrize(
    ("backend", "dp", "cp", "overlap"),
    [("nccl", 2, 1, True), ("nccl", 1, 2, True), ("nccl", 1, 1, False), ("gloo", 4, 1, False)],
)
def test_sums_overlap_where_there_is_somebody_to_sum_with(
    backend: str, dp: int, cp: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "backend", lambda: backend)
    assert sums_overlap(SimpleNamespace(dp=dp, cp=cp)) == overlap  # type: ignore[arg-type]


def test_a_vocabulary_that_is_in_one_place_is_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary in one place is not read back; only several stages need a comparison of copies."""
    monkeypatch.setattr(load, "_digest", lambda tensor: pytest.fail("read back"))
    item: Any = SimpleNamespace(name="embedding", parameter=None, row=SimpleNamespace(kind="vocab", copy_of=None))
    assert load._tied_problems([item], SimpleNamespace(pp=1)) == []  # type: ignore[arg-type]


def test_groups_are_made_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups are created on first use. NCCL creates all at the start if the default group has a device."""
    asked: list[dict[str, Any]] = []
    chosen: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: asked.append(kwargs))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(process, "device", lambda: torch.device("cuda:3"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process.init_process_group(10.0, "nccl")
    assert chosen == [torch.device("cuda:3")] and "device_id" not in asked[0]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns stage(rank of two, tokens of the micro-batches, sequence parallelism)."""
    monkeypatch.setattr(P2PCommunicator, "__init__", lambda self, group, config: None)

    def make(rank: int, tokens: list[int], sequence: bool = False) -> StaticShapeCommunicator:
        ends = {"is_first_stage": rank == 0, "is_last_stage": rank == 1}
        mesh: Any = SimpleNamespace(pp=2, vpp=None, tp=2, pp_group=None, **ends)
        return StaticShapeCommunicator(mesh, SimpleNamespace(sequence_parallel=sequence, hidden_size=8), tokens)

    return make


def test_shapes_come_in_the_order_of_the_schedule(stage: Any) -> None:
    assert arrival_order(4, 1, 2) == ([0, 1, 2, 3], [])
    assert arrival_order(4, 2, 2) == ([0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3])
    last = stage(1, [6, 4], sequence=True)
    assert [last._communicate_shapes(None, None, True, False) for _ in range(2)] == [
        ((3, 1, 8), None),
        ((2, 1, 8), None),
    ]
    with pytest.raises(StopIteration):
        last._communicate_shapes(None, None, False, True)
    first = stage(0, [6, 4])
    assert first._communicate_shapes(None, None, False, True) == (None, (6, 1, 8))
