"""Common prefixes of the sequences in a micro-batch are stored once, and the results do not change."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mrl.config.schema import ParallelConfig, TeacherConfig, TrainConfig
from mrl.core import PackedBatch, Rollout
from mrl.data.packing import pack
from mrl.data.prefixes import common_prefixes, family_splits
from mrl.families import ModelArch, load_arch
from mrl.kernels.gated_delta import Chunks, causal_conv
from mrl.learner.micro_batches import MicroBatchPlanner
from mrl.models.attention import packed_attention, transformer_engine_attention
from mrl.models.attention_plan import AttentionPlan
from mrl.models.batch import ModelBatch, PassOptions
from mrl.trainers.rl.distillation import states_in
from tests.helpers.tiny import make_tiny

CPU = torch.device("cpu")


def groups_of(*groups: tuple[int, list[int]], seed: int = 0, system: int = 0, vocab: int = 1000) -> Rollout:
    """groups: (prompt tokens, tokens of each response); system: number of tokens that all prompts share"""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(1, vocab, (system,), generator=g)
    prompts, responses = [], []
    for prompt, answers in groups:
        own = torch.cat([start, torch.randint(1, vocab, (prompt - system,), generator=g)]).numpy()
        for answer in answers:
            prompts.append(own)
            responses.append(torch.randint(1, vocab, (answer,), generator=g).numpy())
    return Rollout.of(0, prompts, responses)


def in_turns(rollout: Rollout, seed: int) -> Rollout:
    """Returns the rollout with a part of each response, perhaps all of it, as environment tokens."""
    after = torch.cat([torch.arange(n) >= p for n, p in zip(rollout.seq_lens, rollout.prompt_lens, strict=True)])
    drawn = after & (torch.rand(after.numel(), generator=torch.Generator().manual_seed(seed)) < 0.4)
    made = {**vars(rollout), "action_mask": drawn, "rollout_log_probs": torch.zeros(int(drawn.sum()))}
    return Rollout(**made)


def slow_common(rollout: Rollout, ids: list[int]) -> list[int]:
    """Computes the common prefixes one token at a time."""
    sequences = [x.tolist() for x in rollout.tokens.split(rollout.seq_lens.tolist())]
    drawn = (
        None
        if rollout.action_mask is None
        else [x.tolist() for x in rollout.action_mask.split(rollout.seq_lens.tolist())]
    )
    found = []
    for at, i in enumerate(ids):
        flags = [o >= rollout.prompt_lens[i] for o in range(len(sequences[i]))] if drawn is None else drawn[i]
        end = (flags.index(True) if True in flags else len(flags)) - 1
        same = 0
        while at and same < min(end, len(sequences[ids[at - 1]])):
            if sequences[i][same] != sequences[ids[at - 1]][same]:
                break
            same += 1
        found.append(same)
    return found


SOME = [
    groups_of((12, [5, 1, 30, 8]), (9, [3, 3]), (40, [2, 1, 6]), (5, [7])),
    groups_of((30, [4, 9]), (28, [2, 7, 1]), (33, [5]), seed=1, system=25),
    groups_of((6, [9] * 5), (8, [4] * 6), seed=2, vocab=3),  # with a vocabulary of three, much is equal by chance
    in_turns(groups_of((12, [25, 21, 30]), (2, [30, 20]), seed=3, vocab=3), 5),
    in_turns(groups_of((20, [1, 1, 2]), (1, [3, 30]), seed=4), 6),
]


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("order", ["as drawn", "another"])
@pytest.mark.parametrize("rollout", SOME, ids=["groups", "system prompt", "two words", "turns", "turns of nothing"])
def test_tokens_are_there_once_and_stand_for_all_that_were(rollout: Rollout, order: str, unit: int) -> None:
    ids = list(range(rollout.num_samples))
    if order == "another":
        ids = torch.randperm(len(ids), generator=torch.Generator().manual_seed(7)).tolist()
        ids = sorted(ids, key=lambda i: int(rollout.prompt_lens[i]))
    common = slow_common(rollout, ids)
    assert common_prefixes(rollout, ids).tolist() == common and sum(common) > 0
    plain, once = (pack(rollout, ids, 1, 0, unit, shares=shares) for shares in (False, True))
    assert plain.shared_index is None and once.shared_index is not None
    shared_index = once.shared_index
    there = int(rollout.seq_lens.sum()) - sum(common)
    assert once.tokens.numel() == -(-there // unit) * unit
    whole = shared_index.numel()  # with the padding, it may be longer or shorter
    real = int(rollout.seq_lens.sum())
    assert torch.equal(once.tokens[0][shared_index[:real]], plain.tokens[0][:real])
    assert torch.equal(once.position_ids[0][shared_index[:real]], plain.position_ids[0][:real])
    assert torch.equal(rollout.tokens[once.source[shared_index[:real]]], plain.tokens[0][:real])
    assert once.cu_seqlens.tolist()[: len(ids) + 1] == plain.cu_seqlens.tolist()[: len(ids) + 1]
    assert int(once.cu_seqlens[-1]) == whole
    assert torch.equal(shared_index[plain.output_positions], once.output_positions) and len(
        once.output_positions.unique()
    ) == len(once.output_positions)
    assert torch.equal(once.labels, plain.labels) and torch.equal(once.response_indices, plain.response_indices)
    before: dict[int, tuple[int, ...]] = {}  # all sequences of a shared token have the same tokens before it
    for sequence, places in zip(
        plain.tokens[0][:real].split(rollout.seq_lens[ids].tolist()),
        shared_index[:real].split(rollout.seq_lens[ids].tolist()),
        strict=True,
    ):
        for offset, place in enumerate(places.tolist()):
            history = tuple(sequence[: offset + 1].tolist())
            assert before.setdefault(place, history) == history
    assert len(before) == there


def test_what_saves_little_is_not_worth_it_and_what_is_cut_shares_nothing() -> None:
    few = groups_of((4, [40, 40]))
    assert slow_common(few, [0, 1]) == [0, 3] and common_prefixes(few, [0, 1]).tolist() == [0, 0]
    assert pack(few, [0, 1], 1, 0, 1, shares=True).shared_index is None
    assert pack(few, [], 1, 0, 4, shares=True).tokens.tolist() == [[0, 0, 0, 0]]


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("some_ask", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rollout", SOME, ids=["groups", "system prompt", "two words", "turns", "turns of nothing"])
def test_attention_of_shared_tokens_is_that_of_all(rollout: Rollout, window: int | None, some_ask: bool) -> None:
    """Attention over shared tokens equals attention over all: results, and the gradients of queries, keys and values,
    which sum over a shared token's copies. Also in the last layer, where only some rows have queries."""
    ids = list(range(rollout.num_samples))
    plain, once = (pack(rollout, ids, 1, 0, 1, shares=shares) for shares in (False, True))
    assert once.shared_index is not None
    g = torch.Generator().manual_seed(1)
    own = [torch.randn(once.tokens.numel(), heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(len(once.output_positions), 4, 16, generator=g)
    plans = [AttentionPlan.make(b.cu_seqlens, 1, 0, CPU, b.shared_index) for b in (once, plain)]
    if some_ask:
        plans = [plan.for_outputs(batch.output_positions) for plan, batch in zip(plans, (once, plain), strict=True)]
    results = [
        packed_attention(*own, plans[0], 0.25, window),
        packed_attention(*(x[once.shared_index] for x in own), plans[1], 0.25, window),
    ]
    if not some_ask:
        results = [out[batch.output_positions] for out, batch in zip(results, (once, plain), strict=True)]
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)
    grads = [torch.autograd.grad((out * weights).sum(), own) for out in results]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("prompt", [5, 60])
def test_what_is_not_finite_in_one_sequence_is_not_seen_in_others(prompt: int) -> None:
    rollout = groups_of((prompt, [9, 7, 8]), (prompt, [4, 6]))
    once = pack(rollout, range(5), 1, 0, 1, shares=True)
    assert once.shared_index is not None
    q, k, v = (
        torch.randn(once.tokens.numel(), heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)
    )
    v[once.shared_index[prompt : prompt + 9]] = torch.nan  # the first sample's response
    out = packed_attention(q, k, v, AttentionPlan.make(once.cu_seqlens, 1, 0, CPU, once.shared_index), 0.25)
    of_first = torch.zeros(len(out), dtype=torch.bool)
    of_first[once.shared_index[prompt - 1 : prompt + 9]] = True
    assert torch.equal(of_first | out.isfinite().flatten(1).all(1), torch.ones(len(out), dtype=torch.bool))
    assert not out[once.shared_index[prompt]].isfinite().all()


class WholeSequences(torch.nn.Module):
    """The used part of transformer-engine's attention: `thd` inputs, one sequence at a time."""

    def forward(self, q: Any, k: Any, v: Any, mask: None, attn_mask_type: Any, packed_seq_params: Any) -> torch.Tensor:
        lens = packed_seq_params.cu_seqlens_q.diff().tolist()
        assert packed_seq_params.max_seqlen_q >= max(lens) and sum(lens) == q.size(0)
        parts = zip(*(x.transpose(0, 1).split(lens, 1) for x in (q, k, v)), strict=True)
        out = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(out, 1).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("rollout", SOME[:2], ids=["groups", "system prompt"])
def test_transformer_engine_is_shown_whole_sequences(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.extensions.transformer_engine"
    module = ModuleType(name)
    vars(module)["TEDotProductAttention"] = WholeSequences
    monkeypatch.setitem(sys.modules, name, module)
    attention, g = transformer_engine_attention()(), torch.Generator().manual_seed(1)
    plain, once = (pack(rollout, range(rollout.num_samples), 1, 0, 4, shares=shares) for shares in (False, True))
    assert once.shared_index is not None
    own = [torch.randn(once.tokens.numel(), 1, heads, 16, generator=g, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(len(once.output_positions), 1, 64, generator=g)
    mesh: Any = SimpleNamespace(cp=1, cp_rank=0)
    results = []
    for batch, inputs in (
        (once, own),
        (plain, [F.pad(x[once.shared_index], (0,) * 6 + (0, 3))[: plain.tokens.numel()] for x in own]),
    ):
        out = attention(*inputs, None, packed_seq_params=ModelBatch.make(batch, mesh, 1.0, "log_probs"))
        assert out.shape == (batch.tokens.numel(), 1, 64)
        results.append(out[batch.output_positions])
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)
    grads = [torch.autograd.grad((out * weights).sum(), own) for out in results]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_families_are_cut_into_equal_parts_of_half_as_many_each_time() -> None:
    ways = family_splits(torch.tensor([8, 1, 3]), torch.tensor([5, 9, 9]))
    assert [way.tolist() for way in ways] == [[4, 4, 1, 3], [3, 3, 2, 1, 3], [2, 2, 2, 2, 1, 2, 1]]
    assert list(family_splits(torch.tensor([1, 1]), torch.tensor([9, 9]))) == []


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> ModelArch:
    return load_arch(
        str(make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2", tied=True, weights=False, vocab_size=1000))
    )


def planned(arch: ModelArch, rollout: Rollout, dp: int, tokens: int = 10_000, **more: Any) -> list[list[list[int]]]:
    """Returns the samples of each rank's micro-batches."""
    found = []
    for rank in range(dp):
        mesh: Any = SimpleNamespace(dp=dp, dp_rank=rank, cp=1, cp_rank=0, pp=1, vpp=None, cfg=ParallelConfig())
        split = MicroBatchPlanner(mesh, TrainConfig(max_tokens_per_microbatch=tokens), arch, "policy", shares=True)
        batches = split.micro_batches(rollout, range(rollout.num_samples), **more)
        found.append([batch.samples[batch.samples >= 0].tolist() for batch in batches])
    return found


def test_samples_that_begin_alike_meet_as_far_as_ranks_stay_busy(arch: ModelArch) -> None:
    """Samples with common prefixes share a micro-batch if that keeps the ranks busy. Three groups: whole on one rank,
    in halves on two (three groups cannot be divided evenly), one sample each on twelve."""
    rollout = groups_of((60, [20] * 4), (60, [20] * 4), (60, [20] * 4))
    assert planned(arch, rollout, 1) == [[list(range(12))]]
    for dp, size in ((2, 2), (3, 4), (6, 2), (12, 1)):
        plan = planned(arch, rollout, dp)
        assert sorted(i for rank in plan for ids in rank for i in ids) == list(range(12))
        assert all(len(ids) == 12 // dp for rank in plan for ids in rank)
        for ids in (ids for rank in plan for ids in rank):
            assert all(i // size * size + j in ids for i in ids for j in range(size)), (dp, ids)
    within = planned(arch, rollout, 1, tokens=160)  # without sharing, two samples would fit into a micro-batch
    assert [[i // 2 for i in ids] for ids in sorted(within[0])] == [[i, i] for i in range(6)]


def test_what_is_random_by_sample_is_not_shared(arch: ModelArch) -> None:
    rollout = groups_of((60, [20] * 4))
    mesh: Any = SimpleNamespace(dp=1, dp_rank=0, cp=1, cp_rank=0, pp=1, vpp=None, cfg=ParallelConfig())
    split = MicroBatchPlanner(mesh, TrainConfig(), arch, "policy", shares=True)
    for extras, shares in ((PassOptions(), True), (PassOptions(noise=5.0), False), (PassOptions(drops=True), False)):
        (batch,) = split.micro_batches(rollout, range(4), 1, extras)
        assert (batch.shared_index is not None) == shares


@pytest.mark.parametrize("teacher_shares", [True, False])
def test_a_teacher_that_takes_whole_sequences_gets_them_in_the_student_s_micro_batches(
    arch: ModelArch, teacher_shares: bool
) -> None:
    """Gated delta nets take whole sequences: shared tokens have other places than their `starts` say."""
    rollout = groups_of((60, [20] * 4), (50, [10] * 4))
    mesh: Any = SimpleNamespace(dp=1, dp_rank=0, cp=1, cp_rank=0, pp=1, vpp=None, cfg=ParallelConfig())
    limits = TrainConfig(max_tokens_per_microbatch=400)
    student = SimpleNamespace(planner=MicroBatchPlanner(mesh, limits, arch, "policy", shares=True), arch=arch)
    received: list[PackedBatch] = []

    class Teacher:
        planner = SimpleNamespace(shares=teacher_shares)
        head_for = staticmethod(lambda student: None)

        def __init__(self) -> None:
            self.arch = arch

        def hidden_states(self, part: Rollout, samples: list[int], packed: list[PackedBatch]) -> list[Any]:
            received.extend(packed)
            return []

    memory = SimpleNamespace(begin=lambda phase: None)
    run: Any = SimpleNamespace(actor=student, teachers={"teacher": Teacher()}, memory=memory)
    states_in(run, TeacherConfig(path="-"), rollout, [range(8)])
    own = student.planner.micro_batches(rollout, range(8))
    assert len(received) == len(own) > 1
    for of_teacher, of_student in zip(received, own, strict=True):
        assert of_student.shared_index is not None
        assert (of_teacher.shared_index is not None) == teacher_shares
        assert torch.equal(of_teacher.response_indices, of_student.response_indices)
        assert torch.equal(of_teacher.labels, of_student.labels)
        if not teacher_shares:
            chunks, channels = Chunks.make(of_teacher.cu_seqlens, 64, CPU), torch.ones(1, 1, 3)
            assert causal_conv(torch.ones(of_teacher.tokens.numel(), 1), channels, chunks).isfinite().all()
            with pytest.raises(RuntimeError):
                causal_conv(torch.ones(of_student.tokens.numel(), 1), channels, chunks)
