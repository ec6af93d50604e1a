"""Tensors are on the model's device where they must be. A second device is imitated for machines without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrl import platform
from mrl.algo import Sequences
from mrl.config.schema import KLConfig, ValueLossConfig
from mrl.config.sections.policy import policy_loss
from mrl.learner import Loss, losses
from mrl.learner.losses import PolicyTargets
from tests.helpers.second_device import DEVICE, SecondDevice
from tests.helpers.world import run_world

TOKENS = 6


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the model's outputs on the second device; the trainer's data stay on the CPU."""
    monkeypatch.setattr(platform, "device", lambda: DEVICE)


def flat() -> Tensor:
    return torch.rand(TOKENS)


def policy() -> Loss:
    targets = PolicyTargets(flat(), flat(), flat(), flat(), flat(), flat())
    return losses.policy(policy_loss(entropy_coef=0.1), KLConfig(use_in_loss=True), 0.1, targets)


def policy_of_sequences() -> Loss:
    sequences = Sequences.of_mask(torch.ones(2, TOKENS // 2))
    targets = PolicyTargets(flat(), flat(), flat(), flat(), flat(), sampling_log_probs=flat(), sequences=sequences)
    cfg = policy_loss(loss_mode="gspo", off_policy_mask_threshold=0.5)
    return losses.policy(cfg, KLConfig(), 0.1, targets)


LOSSES: dict[str, Callable[[], Loss]] = {
    "policy": policy,
    "policy, of sequences": policy_of_sequences,
    "value": lambda: losses.value(ValueLossConfig(), flat(), flat(), flat(), flat()),
    "ptx": lambda: losses.ptx(flat(), 0.5),
    "cross-entropy": lambda: losses.cross_entropy(flat()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_cpu_vectors_takes_outputs_of_the_model_s_device(name: str, elsewhere: None) -> None:
    loss = LOSSES[name]()
    output = torch.empty(2, 3, device=DEVICE, requires_grad=True)
    with SecondDevice():
        parts = loss.compute(output, torch.empty(3, dtype=torch.int64, device=DEVICE))
        parts.loss.backward()
    assert {part.device for part in (parts.loss, *parts.sums)} == {DEVICE}
    assert output.grad is not None and len(parts.sums) == len(loss.sums)


def test_a_learner_s_whole_step_runs_on_the_second_device(tiny_models: Callable[..., Path]) -> None:
    """A learner's complete step runs on the second device: log-probs, values, updates with every loss, copies and
    export. No CPU tensor is combined with the model's tensors."""
    moe = tiny_models("qwen3_moe", weights=False)
    output = run_world(1, "second_device.py", tiny_models("qwen2", tied=True, weights=False), moe)
    assert {"update, gspo", "update, sft", "update, critic", "bfloat16", "update, experts"} < set(output.splitlines())
    assert output.splitlines()[-1] == "export"


def test_the_imitation_refuses_what_cuda_refuses_and_nothing_else() -> None:
    here, there = torch.ones(4), torch.ones(4, device=DEVICE)
    index = torch.zeros(2, dtype=torch.int64)
    with SecondDevice():
        for mixed in (lambda: here + there, lambda: here[index.to(DEVICE)], lambda: torch.cat([here, there])):
            with pytest.raises(RuntimeError, match="one device"):
                mixed()
        assert (there * here.sum()).device == there[index].device == here.to(DEVICE).device == DEVICE
        there.copy_(here)


def test_the_gradient_norm_does_not_wait_for_the_device() -> None:
    """The gradient norm does not wait for the device. Reading a number from `meta` would fail."""
    platform.install()
    from megatron.core.utils import local_multi_tensor_applier

    from mrl.platform.megatron_fixes import norm_of_all

    tensors = [torch.randn(5), torch.randn(3, 4), torch.zeros(0)]
    with SecondDevice():
        there = [torch.empty_like(tensor, device=DEVICE) for tensor in tensors]
        found, _ = local_multi_tensor_applier(norm_of_all, None, [there], False)
    assert found.device == DEVICE and found.shape == (1,)
    here, theirs = (local_multi_tensor_applier(f, None, [tensors], False)[0] for f in (norm_of_all, _theirs))
    assert torch.allclose(here, theirs)


def _theirs(chunk_size: int, noop_flag: None, tensor_lists: list[list[Tensor]], *args: bool) -> tuple[Tensor, None]:
    return torch.cat([tensor.flatten() for tensor in tensor_lists[0]]).norm().view(1), None
