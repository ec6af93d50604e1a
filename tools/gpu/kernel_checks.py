"""Checks of the kernels in the stage `speed`: each kernel's time on one GPU, next to the limit of that GPU."""

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
from tools.gpu.timing import copied_bytes_per_s, device_us, random, rounds_of, seconds

HEAD_ERROR = 2e-5  # relative error of log-probs and entropies against the torch form; of bfloat16 gradients 2^-7
TOKEN_ERROR = 1e-5  # relative error of advantages, a loss and its gradient against the torch form


def head(setting: Setting) -> Numbers:
    """Times the loss head, hidden states to log-probs and entropies and back, against the three GEMMs it must contain.

    Two losses: one per token, one over whole responses.
    """
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
    """This machine's kernels compute what the torch form does. Returns the torch form's times."""
    rows, hidden, vocabulary = (32, 64, 500) if setting.rehearsal else (512, 1024, 32000)
    x, weight = random(rows, hidden).requires_grad_(), random(vocabulary, hidden, scale=0.02).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=x.device)

    def results() -> list[Tensor]:
        log_probs, entropy, _ = linear_log_prob(x, weight, labels, 0.7, 0, vocabulary, chunk=rows // 4)
        return [log_probs, entropy, *torch.autograd.grad((log_probs - 0.1 * entropy).sum(), (x, weight))]

    got = results()
    with by_torch():
        errors = [(float((a - b).detach().norm() / b.detach().norm()), b.dtype) for a, b in zip(got, results())]
        if wrong := [error for error, dtype in errors if error > (HEAD_ERROR if dtype == torch.float32 else 2.0**-7)]:
            raise Failed(f"this machine's loss head differs from the torch form by {wrong}, relative")
        return head(setting) | {"apart": max(error for error, _ in errors)}


@contextmanager
def by_torch() -> Iterator[None]:
    """Selects the torch form of every kernel."""
    before = os.environ.get("MRL_KERNELS")
    os.environ["MRL_KERNELS"] = "torch"
    try:
        yield
    finally:
        os.environ.pop("MRL_KERNELS")
        os.environ.update({} if before is None else {"MRL_KERNELS": before})


def token_kernels(setting: Setting) -> Numbers:
    """Times GAE with whitening, and PPO's loss with metrics, forward and backward; compares both with the torch forms.

    The limit is the time to read and write the inputs and outputs once.
    """
    rows, length = (8, 64) if setting.rehearsal else (1024, 8192)
    rewards, values, old = torch.randn(3, rows, length, device=platform.device())
    mask, group = torch.ones_like(rewards, dtype=torch.bool), torch.arange(rows, device=rewards.device)
    mask[1::2, length // 2 :] = False
    batch = FlatBatch.of_mask(torch.ones_like(mask), "token-mean")
    flat, new = batch.flat(old_log_probs=old, advantages=rewards), (old + 0.1 * values).flatten().requires_grad_()

    def gae() -> list[Tensor]:
        inputs = {"token_rewards": rewards, "values": values, "response_mask": mask, "group": group}
        return list(advantages.compute("gae", **inputs, gamma=0.99, lam=0.95))

    def loss() -> list[Tensor]:
        value, _ = policy_loss.compute("vanilla", log_probs=new, **flat, **batch.inputs)
        return [value.detach(), *torch.autograd.grad(value, new)]

    got = [*gae(), *loss()]
    with by_torch():
        want = [*gae(), *loss()]
    error = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(got, want, strict=True))
    rounds, copy = rounds_of(setting), rewards.nbytes / copied_bytes_per_s(setting)
    times = {"GAE us": seconds(gae, rounds) * 1e6, "loss us": seconds(loss, rounds) * 1e6}
    times |= {"GAE's kernels us": device_us(gae), "loss's kernels us": device_us(loss)}
    limits = {"two copies us": 2e6 * copy, "three copies us": 3e6 * copy}
    return require(times | limits | {"apart": error}, apart=TOKEN_ERROR)
