"""The groups of `python -m tools.bench`. Each group's first implementation is its limit.

Other libraries are left out if they are not installed. The module must not be named `kernels`: programs in this folder
import transformers, which would import it instead of the package of that name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.algo import FlatBatch, advantages, policy_loss
from mrl.data.balance import balance
from mrl.kernels.head_products import has_bfloat16
from mrl.kernels.linear_logprob import LossGradients, linear_log_prob
from mrl.models.attention import packed_attention
from mrl.models.attention_plan import AttentionPlan
from mrl.platform.kept_memory import keep_memory
from tools.bench.sync_group import weight_sync

Forms = dict[str, Callable[[], Any]]
GAE_SHAPE = (1024, 8192)
HEAD_ROWS, HEAD_WIDTH, HEAD_VOCAB = 512, 896, 151_936
HEAD_CHUNK_BYTES = 1024  # of one column of a chunk of logits


def measure(group: str, rounds: int) -> dict[str, dict[str, float]]:
    """Times the implementations of a group and prints a table. Freed memory is kept as in a rank's process.

    Returns:
        For each implementation the minimum and median seconds of processor time, and the minimum relative to the
        limit's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()
    forms = GROUPS[group]()
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, run in forms.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    limit = min(next(iter(seconds.values())))
    results = {
        name: {"minimum": min(times), "median": statistics.median(times), "of_limit": round(min(times) / limit, 3)}
        for name, times in seconds.items()
    }
    print(f"\n{group}: {(GROUPS[group].__doc__ or '').splitlines()[0]}")
    for name, form in results.items():
        print(f"  {name:42}{form['minimum']:10.4f} s{form['median']:10.4f} s{form['of_limit']:9.2f}")
    return results


def head_float32() -> Forms:
    """Hidden states to PPO's loss and gradients, 512 rows, hidden size 896, vocabulary of 151,936, float32."""
    return _head(torch.float32)


def head_bfloat16() -> Forms:
    """The same in bfloat16; the limit is float32's GEMMs if this processor has no bfloat16 instructions."""
    return _head(torch.bfloat16)


def _head(dtype: torch.dtype) -> Forms:
    hidden = torch.randn(HEAD_ROWS, HEAD_WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(HEAD_VOCAB, HEAD_WIDTH) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(0, HEAD_VOCAB, (HEAD_ROWS,))
    old, advantage = torch.full((HEAD_ROWS,), -12.0), torch.randn(HEAD_ROWS) / HEAD_ROWS

    def loss(log_probs: Tensor, rows: slice = slice(None)) -> Tensor:
        ratio, a = (log_probs - old[rows]).exp(), advantage[rows]
        return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28)).sum()

    def loss_gradient(log_probs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, None]:
        with torch.enable_grad():
            log_probs = log_probs.clone().requires_grad_()
            return torch.autograd.grad(loss(log_probs, rows), log_probs)[0], None

    def mrl(loss_gradients: LossGradients | None) -> None:
        log_probs, *_ = linear_log_prob(hidden, weight, labels, 1.0, 0, HEAD_VOCAB, loss_gradients=loss_gradients)
        torch.autograd.grad(loss(log_probs), (hidden, weight))

    def naive() -> None:
        log_probs = (hidden @ weight.T).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
        torch.autograd.grad(loss(log_probs), (hidden, weight))

    limit = dtype if has_bfloat16() else torch.float32
    forms: Forms = {
        "limit: three products": _three_products(hidden.detach().to(limit), weight.detach().to(limit)),
        "mrl, gradients formed in the forward": lambda: mrl(LossGradients(loss_gradient)),
        "mrl, logits computed again": lambda: mrl(None),
    }
    return {**forms, "log_softmax": naive} if dtype == limit else forms


def _three_products(hidden: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Returns the three GEMMs of the loss head, forward and backward, in chunks of its size."""
    chunk = HEAD_CHUNK_BYTES // hidden.itemsize
    block, d_hidden = hidden.new_empty(chunk, HEAD_VOCAB), torch.empty_like(hidden)

    def run() -> Tensor:
        d_weight = None
        for start in range(0, HEAD_ROWS, chunk):
            rows = slice(start, start + chunk)
            torch.mm(hidden[rows], weight.T, out=block)
            torch.mm(block, weight, out=d_hidden[rows])
            d_weight = block.T @ hidden[rows] if d_weight is None else d_weight.addmm_(block.T, hidden[rows])
        assert d_weight is not None
        return d_weight

    return run


def gae() -> Forms:
    """GAE with whitening for 1,024 responses of up to 8,192 tokens."""
    rewards, values = torch.randn(2, *GAE_SHAPE)
    lengths = torch.randint(GAE_SHAPE[1] // 2, GAE_SHAPE[1] + 1, (GAE_SHAPE[0], 1))
    mask = torch.arange(GAE_SHAPE[1]) < lengths
    group, out = torch.arange(GAE_SHAPE[0]), torch.empty(2, *GAE_SHAPE)

    def limit() -> None:
        out[0].copy_(rewards), out[1].copy_(values)

    def mrl() -> None:
        advantages.compute(
            "gae", token_rewards=rewards, response_mask=mask, group=group, values=values, gamma=0.99, lam=0.95
        )

    forms: Forms = {"limit: two copies": limit, "mrl": mrl}
    if (verl := _verl()) is not None:
        float_mask = mask.float()
        forms["verl"] = lambda: verl.compute_gae_advantage_return(rewards, values, float_mask, 0.99, 0.95)
    return forms


def grpo() -> Forms:
    """GRPO's advantages for 8,192 responses of 512 tokens in groups of 8."""
    rewards, mask = torch.zeros(8192, 512), torch.ones(8192, 512, dtype=torch.bool)
    rewards[:, -1] = torch.randn(8192)
    group, out = torch.arange(8192) // 8, torch.empty(8192, 512)

    def mrl() -> None:
        advantages.compute("grpo", token_rewards=rewards, response_mask=mask, group=group)

    forms: Forms = {"limit: one copy": lambda: out.copy_(rewards), "mrl": mrl}
    if (verl := _verl()) is not None:
        names, float_mask = group.numpy().astype(str), mask.float()
        forms["verl"] = lambda: verl.compute_grpo_outcome_advantage(rewards, float_mask, names)
    return forms


def loss() -> Forms:
    """PPO's loss with metrics, forward and backward, for 1,024 responses of 8,192 tokens."""
    old, advantage = torch.randn(2, *GAE_SHAPE)
    new = (old + 0.1 * torch.randn(GAE_SHAPE)).requires_grad_()
    mask = torch.ones(GAE_SHAPE, dtype=torch.bool)
    batch = FlatBatch.of_mask(mask, "token-mean")
    flat, inputs = batch.flat(old_log_probs=old, advantages=advantage), batch.inputs
    log_probs, out = new.detach().flatten().requires_grad_(), torch.empty(GAE_SHAPE)

    def mrl() -> None:
        value, _ = policy_loss.compute("vanilla", log_probs=log_probs, **flat, **inputs)
        torch.autograd.grad(value, log_probs)

    forms: Forms = {"limit: one copy": lambda: out.copy_(old), "mrl": mrl}
    if (verl := _verl()) is not None:
        float_mask = mask.float()

        def peer() -> None:
            value = verl.compute_policy_loss(old, new, advantage, float_mask, 0.2, 0.2, 0.2)
            torch.autograd.grad(value[0], new)

        forms["verl"] = peer
    return forms


def attention() -> Forms:
    """Attention, forward and backward, of 16 sequences of 16 to 1,024 tokens; 8 heads of size 64, 2 key-value heads."""
    lengths = np.random.default_rng(0).lognormal(5.0, 0.9, 16).clip(16, 1024).astype(int).tolist()
    q, k, v = (torch.randn(sum(lengths), heads, 64).requires_grad_() for heads in (8, 2, 2))
    grad, starts = torch.randn(sum(lengths), 8, 64), torch.tensor([0, *lengths]).cumsum(0)

    def mrl() -> None:
        plan = AttentionPlan.make(starts, 1, 0, torch.device("cpu"))
        torch.autograd.grad(packed_attention(q, k, v, plan, 0.125), (q, k, v), grad)

    def one_at_a_time() -> None:
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
        out = [F.scaled_dot_product_attention(*part, is_causal=True, scale=0.125, enable_gqa=True) for part in parts]
        torch.autograd.grad(torch.cat(out, 1).transpose(0, 1), (q, k, v), grad)

    def limit() -> None:
        for length in lengths:  # products of half of the queries with all keys: two forward, three backward
            queries, keys, scores = q[: length // 2, 0], k[:length, 0], torch.empty(length // 2, length)
            for _ in range(8):
                torch.mm(queries, keys.T, out=scores), torch.mm(queries, keys.T, out=scores)
                scores @ keys, scores @ keys, scores.T @ queries

    return {"limit: five products": torch.no_grad()(limit), "mrl": mrl, "torch, one sequence at a time": one_at_a_time}


def balancing() -> Forms:
    """Balancing of 8,192 sequences of log-normal length over 64 ranks."""
    sizes = np.random.default_rng(0).lognormal(6.5, 0.8, 8192).clip(16, 8192).astype(int)
    order = np.argsort(-sizes, kind="stable")
    forms: Forms = {
        "limit: one sort": lambda: np.sort(sizes),
        "mrl": lambda: balance(sizes.tolist(), order.tolist(), 64),
    }
    try:
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
    except ImportError:
        return forms
    return {**forms, "verl": lambda: get_seqlen_balanced_partitions(sizes.tolist(), 64, False)}


def _verl() -> Any:
    """Returns verl's module of algorithms, or None if verl is not installed."""
    try:
        from verl.trainer.ppo import core_algos
    except ImportError:
        return None
    return core_algos


GROUPS: Mapping[str, Callable[[], Forms]] = {
    "head": head_float32,
    "head_bf16": head_bfloat16,
    "advantages": gae,
    "grpo": grpo,
    "loss": loss,
    "attention": attention,
    "balance": balancing,
    "sync": weight_sync,
}
