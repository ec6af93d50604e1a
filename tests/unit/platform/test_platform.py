"""The platform package: adaptations, features, process and optimizer-state helpers."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from mrl import platform
from mrl.platform import adaptations


def test_unknown_name_in_off_switch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptations, "_installed", False)
    monkeypatch.setenv("MRL_PLATFORM_OFF", "streams,nonsense")
    with pytest.raises(ValueError, match="nonsense.*known: all, .*streams"):
        platform.install()


def test_unknown_kernels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptations, "_installed", False)
    monkeypatch.setenv("MRL_KERNELS", "troch")
    with pytest.raises(ValueError, match="MRL_KERNELS is 'troch'; known: torch"):
        platform.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins apply only without CUDA")
def test_install_twice_applies_once() -> None:
    platform.install()
    first = platform.applied()
    platform.install()
    assert platform.applied() == first
    assert len(set(first)) == len(first) and "rng" in first
    assert torch.zeros(2, device="cuda").device.type == "cpu"


def test_every_adaptation_says_why() -> None:
    platform.install()
    assert all(len(a.why) > 20 for a in platform.REGISTRY.values())


def test_absent_parts_have_no_version() -> None:
    by_name = {f.part: f for f in platform.features()}
    assert by_name["torch"].version == torch.__version__
    assert all(f.used_for and f.without for f in by_name.values())
    assert by_name["apex"].usable == platform.apex_usable()


def adam() -> tuple[torch.optim.AdamW, SimpleNamespace]:
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3)) for _ in range(4)], lr=0.1)
    return inner, SimpleNamespace(optimizer=inner)


def step(inner: torch.optim.AdamW) -> None:
    for p in inner.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    inner.step()


def test_unshared_steps_count_once_a_parameter() -> None:
    inner, wrapper = adam()
    step(inner)
    shared = torch.tensor(1.0)
    for state in inner.state.values():
        state["step"] = shared
    platform.separate_step_tensors(wrapper)
    step(inner)
    assert [float(s["step"]) for s in inner.state.values()] == [2.0] * 4


def test_primed_adam_trains_like_a_fresh_one() -> None:
    primed, wrapper = adam()
    platform.prime_adam(SimpleNamespace(chained_optimizers=[wrapper]))
    assert len(primed.state) == 4
    fresh, _ = adam()
    for _ in range(2):
        step(primed)
        step(fresh)
    for a, b in zip(primed.param_groups[0]["params"], fresh.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


def test_peak_memory_sees_an_allocation() -> None:
    platform.reset_peak_memory()
    before = platform.peak_memory_bytes()
    fresh = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)  # the heap may reuse memory
    block = fresh.to(platform.device()).fill_(1)
    assert platform.peak_memory_bytes() - before > 32 << 20
    del block
