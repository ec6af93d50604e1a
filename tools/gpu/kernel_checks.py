"""The kernels' checks of the stage `speed`: shared/performance.md's rows of one GPU, each beside its limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mrl import platform
from mrl.algo import FlatBatch, advantages, policy_loss
from mrl.kernels.linear_logprob import LossGradients, linear_log_prob
from tools.gpu.stage import Failed, Numbers, Setting, require
from tools.gpu.timing import copied_bytes, device_us, random, rounds_of, seconds

APART = 2e-5  # of log-probs and entropies from the torch form's, relative; of gradients in bfloat16 2^-7
TOKENS_APART = 1e-5  # of advantages, a loss and its gradient, from the torch form's


def head(setting: Setting) -> Numbers:
    """Hidden states -> log-probs and entropies and back, for a loss that is of each token alone and for one that is of
    whole responses, against the three products that no form can do without."""
    tokens, hidden, vocabulary = (64, 32, 512) if setting.rehearsal else (8192, 4096, 151936)
    x, weight = random(tokens, hidden), random(vocabulary, hidden, scale=0.02)
    labels = torch.randint(vocabulary, (tokens,), device=x.device)
    rounds = rounds_of(setting)

    def floor() -> None:
        logits = x @ weight.T
        _ = logits @ weight, logits.T @ x

    def forward() -> Tensor:
        return linear_log_prob(x, weight, labels, 1.0, 0, vocabulary)[0]

    def both(loss_gradients: LossGradients | None = None) -> tuple[Tensor, ...]:
        log_probs = linear_log_prob(x, weight, labels, 1.0, 0, vocabulary, loss_gradients=loss_gradients)[0]
        return torch.autograd.grad(log_probs.sum(), (x, weight))

    def of_tokens() -> tuple[Tensor, ...]:
        return both(LossGradients(lambda log_probs, entropies, rows: (torch.ones_like(log_probs), None)))

    once = seconds(forward, rounds)
    x.requires_grad_(), weight.requires_grad_()
    least = seconds(floor, rounds)
    platform.reset_peak_memory()
    of_responses, spent = seconds(both, rounds), seconds(of_tokens, rounds)
    return {
        "tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "forward ms": once * 1e3, "ms": spent * 1e3,
        "three GEMMs ms": least * 1e3, "ratio": spent / least, "of whole responses ms": of_responses * 1e3,
        "peak GB": platform.peak_memory_bytes() / 1e9, "dW GB": weight.nbytes / 1e9,
    }  # fmt: skip


def head_by_torch(setting: Setting) -> Numbers:
    """The numbers of this machine's kernels are those of the torch form, and then that one's times."""
    rows, hidden, vocabulary = (32, 64, 500) if setting.rehearsal else (512, 1024, 32000)
    x, weight = random(rows, hidden).requires_grad_(), random(vocabulary, hidden, scale=0.02).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=x.device)

    def made() -> list[Tensor]:
        log_probs, entropy, _ = linear_log_prob(x, weight, labels, 0.7, 0, vocabulary, chunk=rows // 4)
        return [log_probs, entropy, *torch.autograd.grad((log_probs - 0.1 * entropy).sum(), (x, weight))]

    got = made()
    with by_torch():
        pairs = [(float((a - b).detach().norm() / b.detach().norm()), b.dtype) for a, b in zip(got, made())]
        if wrong := [apart for apart, dtype in pairs if apart > (APART if dtype == torch.float32 else 2.0**-7)]:
            raise Failed(f"this machine's head is apart from the torch form by {wrong}")
        return head(setting) | {"apart": max(apart for apart, _ in pairs)}


@contextmanager
def by_torch() -> Iterator[None]:
    before = os.environ.get("MRL_KERNELS")
    os.environ["MRL_KERNELS"] = "torch"
    try:
        yield
    finally:
        os.environ.pop("MRL_KERNELS")
        os.environ.update({} if before is None else {"MRL_KERNELS": before})


def token_kernels(setting: Setting) -> Numbers:
    """GAE with whitening, and PPO's loss with metrics, forward and backward, held to the torch forms; the limit is that
    of what both read and write once."""
    rows, length = (8, 64) if setting.rehearsal else (1024, 8192)
    rewards, values, old = torch.randn(3, rows, length, device=platform.device())
    mask, group = torch.ones_like(rewards, dtype=torch.bool), torch.arange(rows, device=rewards.device)
    mask[1::2, length // 2 :] = False
    batch = FlatBatch.of_mask(torch.ones_like(mask), "token-mean")
    flat, new = batch.flat(old_log_probs=old, advantages=rewards), (old + 0.1 * values).flatten().requires_grad_()

    def gae() -> list[Tensor]:
        given = {"token_rewards": rewards, "values": values, "response_mask": mask, "group": group}
        return list(advantages.compute("gae", **given, gamma=0.99, lam=0.95))

    def loss() -> list[Tensor]:
        made, _ = policy_loss.compute("vanilla", log_probs=new, **flat, **batch.inputs)
        return [made.detach(), *torch.autograd.grad(made, new)]

    found = {"GAE": gae(), "loss": loss()}
    with by_torch():
        plain = {"GAE": gae(), "loss": loss()}
    pairs = [(a, b) for name, mine in found.items() for a, b in zip(mine, plain[name], strict=True)]
    apart = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    rounds, copy = rounds_of(setting), rewards.nbytes / copied_bytes(setting)
    times = {"GAE us": seconds(gae, rounds) * 1e6, "loss us": seconds(loss, rounds) * 1e6}
    times |= {"GAE's kernels us": device_us(gae), "loss's kernels us": device_us(loss)}
    limits = {"two copies us": 2e6 * copy, "three copies us": 3e6 * copy}
    return require(times | limits | {"apart": apart}, apart=TOKENS_APART)
