"""Run with one process: a learner's whole step on a second device, which torch's `meta` imitates.

Usage: second_device.py MODEL_DIR MOE_MODEL_DIR. Prints a line after each part of the step. Values that are read back
from the device are zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from gradients import make_rollout  # noqa: E402
from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

from mrl.algo import Sequences, aggregate  # noqa: E402
from mrl.config.schema import KLConfig, ParallelConfig, TrainConfig, ValueLossConfig  # noqa: E402
from mrl.config.sections.policy import policy_loss  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.learner.policy_copy import PolicyCopy  # noqa: E402
from mrl.parallel import Meshes  # noqa: E402
from mrl.platform import megatron_fixes, torch_cuda  # noqa: E402
from tests.helpers.second_device import DEVICE, SecondDevice  # noqa: E402

MODEL, MOE = sys.argv[1:]


def imitate() -> None:
    """Makes the imitated device Megatron's "cuda" and mrl's device."""
    torch_cuda.CPU = DEVICE
    megatron_fixes.grad_norm()  # the fix is in use on GPUs
    platform.device = lambda: DEVICE  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(DEVICE)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self.to(DEVICE)  # type: ignore[method-assign]
    named = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: _cuda(named(self, *args))  # type: ignore[method-assign,assignment]


def _cuda(found: Any) -> Any:
    return found.replace(".meta.", ".") if isinstance(found, str) else found


def route_evenly(rows: int) -> None:
    """Replaces the dispatcher's read of the experts' row counts from the device by an even split: two of four experts
    take each token."""

    def even(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        shares = torch.full(tensor.shape, rows // tensor.numel())
        shares.view(-1)[-1] += rows - int(shares.sum())
        return shares.numpy() if as_numpy else shares

    token_dispatcher.maybe_move_tensor_to_cpu = even


def make(role: str, dtype: torch.dtype = torch.float32, model: str = MODEL) -> Learner:
    mesh = Meshes(120).get(ParallelConfig())
    arch = load_arch(model)
    return Learner(role, arch, model, TrainConfig(), mesh, dtype=dtype, seed=1, from_scratch=True)  # type: ignore[arg-type]


def passed(what: str, part: Callable[[], Any]) -> Any:
    with SecondDevice():
        result = part()
    print(what, flush=True)
    return result


def main() -> None:
    platform.init_process_group(120.0)
    imitate()
    actor = passed("actor", lambda: make("policy"))
    critic = passed("critic", lambda: make("critic"))
    rollout = make_rollout(actor.arch.vocab_size)
    weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
    log_probs, _ = passed("log-probs", lambda: actor.log_probs(rollout, 0.7))
    passed("distribution", lambda: actor.distribution(rollout, 0.7))
    values = passed("values", lambda: critic.values(rollout))
    samples = range(rollout.num_samples)

    def update(learner: Learner, loss: losses.Loss) -> None:
        learner.backward(rollout, samples, loss, 1.0, entropy_grad=learner.role == "policy")
        learner.step()

    targets = losses.PolicyTargets(weights, weights, weights, weights, log_probs, log_probs, log_probs)
    targets = losses.PolicyTargets(**{**vars(targets), "sequences": Sequences.of_mask(rollout.response_mask)})
    for mode in ("vanilla", "gspo", "cispo"):
        cfg = policy_loss(loss_mode=mode, entropy_coef=0.1, off_policy_mask_threshold=0.5)  # type: ignore[arg-type]
        loss = losses.policy(cfg, KLConfig(use_in_loss=True), 0.1, targets)
        passed(f"update, {mode}", lambda loss=loss: update(actor, loss))
    passed("update, sft", lambda: update(actor, losses.cross_entropy(weights)))
    passed("update, critic", lambda: update(critic, losses.value(ValueLossConfig(), values, weights, weights, weights)))
    passed("log-probs of the update", lambda: actor.last_outputs.log_probs(rollout))
    kept = passed("copy", lambda: PolicyCopy(actor, offload=True))
    passed("copy follows", lambda: kept.follow(0.5))
    passed("log-probs of the copy", lambda: kept.log_probs(rollout, 1.0))
    passed("bfloat16", lambda: update(make("policy", dtype=torch.bfloat16), losses.cross_entropy(weights)))
    moe = passed("experts", lambda: make("policy", model=MOE))
    route_evenly(rollout.tokens.numel() * 2)
    passed("update, experts", lambda: update(moe, losses.cross_entropy(weights)))
    passed("export", lambda: [tensor.cpu() for _, tensor in actor.exporter.stream()])
    dist.destroy_process_group()


main()
