"""Packing and balancing: no token is lost or duplicated, and the result equals a slow reference's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from mrl.core import PackedBatch, Rollout
from mrl.data.balance import costs_of, plan_micro_batches
from mrl.data.packing import pack, sequence_align
from mrl.families.flops import ForwardFlops


def make_rollout(lens: list[tuple[int, int]], seed: int = 0, holes: bool = False) -> Rollout:
    """Makes a rollout. lens: (prompt, response) tokens; holes: half of the responses' tokens are the environment's"""
    generator = torch.Generator().manual_seed(seed)
    prompt_lens = torch.tensor([p for p, _ in lens])
    seq_lens = torch.tensor([p + r for p, r in lens])
    drawn = None
    if holes:
        drawn = torch.cat([torch.arange(n) >= p for n, p in zip(seq_lens, prompt_lens, strict=True)])
        drawn &= torch.rand(drawn.numel(), generator=generator) < 0.5
    response_tokens = int((seq_lens - prompt_lens).sum() if drawn is None else drawn.sum())
    return Rollout(
        step=0,
        tokens=torch.randint(1, 1000, (int(seq_lens.sum()),), generator=generator),
        seq_lens=seq_lens,
        prompt_lens=prompt_lens,
        group=torch.arange(len(lens)),
        scores=torch.zeros(len(lens)),
        rollout_log_probs=torch.zeros(response_tokens),
        action_mask=drawn,
    )


def slow_pack(rollout: Rollout, ids: list[int], cp: int, cp_rank: int, align_total: int) -> dict[str, list[int]]:
    """Packs with plain loops, one token at a time."""
    align = 2 * cp if cp > 1 else 1
    everything = [o >= p for n, p in zip(rollout.seq_lens, rollout.prompt_lens, strict=True) for o in range(n)]
    drawn = everything if rollout.action_mask is None else rollout.action_mask.tolist()
    sequences = []  # lists of (token, position, label, dest); label -1 if the next token is no response token
    for i in ids:
        start = int(rollout.seq_lens[:i].sum())
        length = int(rollout.seq_lens[i])
        sequence = []
        for o in range(length):
            predicts = o + 1 < length and drawn[start + o + 1]
            label = int(rollout.tokens[start + o + 1]) if predicts else -1
            sequence.append((int(rollout.tokens[start + o]), o, label, sum(drawn[: start + o + 1])))
        while len(sequence) % align:
            sequence.append((0, len(sequence), -1, -1))
        sequences.append(sequence)
    unit = math.lcm(align, align_total)
    missing = -sum(map(len, sequences)) % unit if ids else unit
    if missing:
        sequences.append([(0, o, -1, -1) for o in range(missing)])
    local = []
    for sequence in sequences:
        if cp == 1:
            local += sequence
            continue
        chunk = len(sequence) // (2 * cp)
        for c in (cp_rank, 2 * cp - 1 - cp_rank):
            local += sequence[c * chunk : (c + 1) * chunk]
    rows = [j for j, entry in enumerate(local) if entry[2] >= 0]
    return {
        "tokens": [e[0] for e in local],
        "position_ids": [e[1] for e in local],
        "output_positions": rows,
        "labels": [local[j][2] for j in rows],
        "response_indices": [local[j][3] for j in rows],
        "cu_seqlens": [0, *np.cumsum([len(s) for s in sequences]).tolist()],
    }


LENS = [(3, 5), (1, 1), (7, 0), (2, 13), (16, 16), (5, 4), (1, 30), (9, 2)]


@pytest.mark.parametrize("cp,tp", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 4)])
@pytest.mark.parametrize("ids", [[], [1], [2], [0, 3, 6], [7, 1, 4, 2], list(range(8))], ids=str)
@pytest.mark.parametrize("holes", [False, True])
def test_pack_equals_a_slow_reference(cp: int, tp: int, ids: list[int], holes: bool) -> None:
    rollout = make_rollout(LENS, holes=holes)
    for cp_rank in range(cp):
        batch = pack(rollout, ids, cp, cp_rank, cp * tp)
        expected = slow_pack(rollout, ids, cp, cp_rank, cp * tp)
        assert batch.tokens.tolist() == [expected["tokens"]]
        assert batch.position_ids.tolist() == [expected["position_ids"]]
        for name in ("output_positions", "labels", "response_indices", "cu_seqlens"):
            assert getattr(batch, name).tolist() == expected[name], name
        assert batch.max_seqlen == max(np.diff(expected["cu_seqlens"]))
        assert (
            batch.tokens.dtype
            == batch.output_positions.dtype
            == batch.labels.dtype
            == batch.response_indices.dtype
            == torch.int64
        )
        assert batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("cp,tp", [(1, 2), (2, 2), (4, 1)])
def test_every_response_token_is_predicted_once_over_all_ranks(cp: int, tp: int) -> None:
    rollout = make_rollout(LENS)
    plan = plan_micro_batches(rollout.seq_lens, 2, 40, sequence_align(cp))
    batches = [pack(rollout, ids, cp, r, cp * tp) for rank in plan for ids in rank for r in range(cp)]
    dest = torch.cat([b.response_indices for b in batches])
    assert dest.sort().values.tolist() == list(range(rollout.num_response_tokens))
    labels = torch.empty(rollout.num_response_tokens, dtype=torch.int64)
    labels[dest] = torch.cat([b.labels for b in batches])
    starts = rollout.seq_lens.cumsum(0) - rollout.seq_lens
    responses = [
        rollout.tokens[s + p : s + n] for s, p, n in zip(starts, rollout.prompt_lens, rollout.seq_lens, strict=True)
    ]
    assert torch.equal(labels, torch.cat(responses))
    assert all(b.tokens.numel() % tp == 0 for b in batches)


def zig_zag_inverse(parts: list[PackedBatch]) -> list[int]:
    """Returns the packed sequence before it was split, from the tokens of all context-parallel ranks."""
    cp = len(parts)
    out: list[int] = []
    bounds = parts[0].cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        chunk = (end - start) // (2 * cp)
        local = [p.tokens[0, start // cp : end // cp].tolist() for p in parts]
        out += [t for r in range(cp) for t in local[r][:chunk]]
        out += [t for r in reversed(range(cp)) for t in local[r][chunk:]]
    return out


def test_zig_zag_parts_reassemble_to_the_uncut_batch() -> None:
    rollout = make_rollout([(8, 8), (4, 12), (3, 5)])  # multiples of 8, so the split adds no padding
    uncut = pack(rollout, [0, 1, 2], 1, 0, 8)
    parts = [pack(rollout, [0, 1, 2], 4, r, 8) for r in range(4)]
    assert zig_zag_inverse(parts) == uncut.tokens[0].tolist()
    assert sum(p.output_positions.numel() for p in parts) == uncut.output_positions.numel()


def test_an_empty_micro_batch_is_one_dummy_sequence() -> None:
    batch = pack(make_rollout(LENS), [], 2, 1, 8)
    assert batch.tokens.tolist() == [[0, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.output_positions.numel() == batch.labels.numel() == batch.response_indices.numel() == 0


def test_pack_refuses_what_it_cannot_predict() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] have an empty prompt"):
        pack(make_rollout([(2, 3), (0, 3)]), [0, 1], 1, 0, 1)
    with pytest.raises(ValueError, match="rank 2 is not in 0..1"):
        pack(make_rollout(LENS), [0], 2, 2, 4)


def tokens_of(ids: list[int], lens: list[int], align: int = 1) -> int:
    return sum(-(-lens[i] // align) * align for i in ids)


@pytest.mark.parametrize("seed", range(40))
def test_plan_holds_its_promises_on_random_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, 130, rng.integers(0, 80)).tolist()
    dp, align, multiple = int(rng.choice([1, 2, 3, 5])), int(rng.choice([1, 4])), int(rng.choice([1, 2, 4]))
    plan = plan_micro_batches(lens, dp, 100, align, multiple)
    assert sorted(i for rank in plan for ids in rank for i in ids) == list(range(len(lens)))
    assert len(plan) == dp
    assert {len(rank) for rank in plan} == {len(plan[0])}
    assert len(plan[0]) >= 1 and len(plan[0]) % multiple == 0
    for ids in (ids for rank in plan for ids in rank):
        assert len(ids) < 2 or tokens_of(ids, lens, align) <= 100
    assert plan == plan_micro_batches(torch.tensor(lens, dtype=torch.int64), dp, 100, align, multiple)


def test_alignment_counts_against_the_bound() -> None:
    assert len(plan_micro_batches([5] * 20, 1, 100)[0]) == 1
    assert len(plan_micro_batches([5] * 20, 1, 100, align=8)[0]) == 2


@pytest.mark.parametrize(
    "lens,max_tokens,expected",
    [
        ([60] * 10, 100, 10),  # no two fit together
        ([70, 30, 60, 40, 50, 50, 100], 100, 4),  # a perfect fit exists
        ([500, 10, 10], 100, 2),  # too long: gets a bin of its own
        ([], 100, 1),
        ([32, 21, 36, 24, 39, 43, 54, 49, 51, 33], 100, 4),  # longest-first alone needs 5 bins
    ],
)
def test_as_few_micro_batches_as_possible(lens: list[int], max_tokens: int, expected: int) -> None:
    plan = plan_micro_batches(lens, 1, max_tokens)
    assert len(plan[0]) == expected


def test_a_sequence_over_the_bound_is_alone() -> None:
    plan = plan_micro_batches([500, 10, 10, 30], 2, 100)
    assert [0] in plan[0] + plan[1]


@pytest.mark.parametrize("shape", ["uniform", "lognormal"])
def test_balance_of_a_large_batch(shape: str) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(50, 8192, 8192) if shape == "uniform" else rng.lognormal(7, 1, 8192).clip(10, 32768)
    lens = raw.astype(np.int64).tolist()
    plan = plan_micro_batches(lens, 64, 2**20)
    loads = [sum(tokens_of(ids, lens) for ids in rank) for rank in plan]
    mean = sum(loads) / 64
    assert (max(loads) - mean) / mean <= 1e-5
    several = plan_micro_batches(lens, 8, 65536)
    sizes = [[tokens_of(ids, lens) for ids in rank] for rank in several]
    assert max(map(sum, sizes)) / (sum(lens) / 8) <= 1 + 1e-4
    assert max(map(max, sizes)) / min(map(min, sizes)) <= 1.02


def test_ranks_share_the_cost_of_attention_too() -> None:
    """Ranks share the cost of attention as well: in this two-layer model a sequence of 8,192 tokens costs more than two
    of 4,096. The limit on tokens still holds, though costs ignore it."""
    rng = np.random.default_rng(1)
    lens = torch.from_numpy(rng.lognormal(7, 1, 2048).clip(10, 8192).astype(np.int64))
    costs = costs_of(ForwardFlops(per_token=10**6, per_pair=10**3, per_output=0), lens, lens)
    assert int(costs[lens == 8192][0]) == 64 * 8192 + -(-8192 * 8193 // 2 * 64 // 1000)
    for max_tokens in (2**20, 16384):
        plan = plan_micro_batches(lens, 8, max_tokens, costs=costs)
        loads = [sum(int(costs[ids].sum()) for ids in rank) for rank in plan]
        assert max(loads) / (sum(loads) / 8) <= 1 + 1e-3, max_tokens
        assert all(len(ids) < 2 or int(lens[ids].sum()) <= max_tokens for rank in plan for ids in rank)
        assert sorted(i for rank in plan for ids in rank for i in ids) == list(range(2048))
    with pytest.raises(ValueError, match="3 costs for 2 sequences"):
        plan_micro_batches([1, 2], 1, 10, costs=[1, 2, 3])


def test_plan_refuses_sizes_below_one() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        plan_micro_batches([1, 2], 1, 0)
