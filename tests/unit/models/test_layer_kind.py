"""`layers`: the kinds that the machine has, those that the weights' dtype allows, and errors before a start."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mrl import platform
from mrl.config.checks import models as checks
from mrl.config.derived import Machine
from mrl.config.schema import ModelConfig, SFTConfig, TrainConfig
from mrl.core import PackedBatch
from mrl.families import UnsupportedModel, load_arch
from mrl.models.batch import ModelBatch
from mrl.models.layer_kind import layer_kind
from tests.conftest import TinyModels

ABSENT = "ImportError: no such thing"
ARCH = SimpleNamespace(family="llama")


@pytest.mark.parametrize(
    ("wanted", "dtype", "problem", "kind"),
    [
        ("auto", torch.bfloat16, None, "transformer_engine"),
        ("auto", torch.bfloat16, ABSENT, "local"),
        ("auto", torch.float32, None, "local"),
        ("local", torch.bfloat16, None, "local"),
        ("transformer_engine", torch.bfloat16, None, "transformer_engine"),
    ],
)
def test_the_kind_of_layers(
    wanted: str, dtype: torch.dtype, problem: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "transformer_engine_problem", lambda: problem)
    assert layer_kind(wanted, dtype, ARCH) == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "says"), [(torch.bfloat16, ABSENT), (torch.float32, "TF32")])
def test_layers_that_cannot_be_had_are_an_error(dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ABSENT if dtype == torch.bfloat16 else None
    monkeypatch.setattr(platform, "transformer_engine_problem", lambda: problem)
    with pytest.raises(UnsupportedModel, match=says):
        layer_kind("transformer_engine", dtype, ARCH)


@pytest.mark.parametrize(
    ("dtype", "layers", "gpus", "says"),
    [
        ("float32", "transformer_engine", 8, "TF32.*use local or auto, or dtype bfloat16"),
        ("bfloat16", "transformer_engine", 0, "this machine has none"),
        ("bfloat16", "transformer_engine", 8, None),
        ("float32", "auto", 8, None),
        ("float32", "local", 0, None),
    ],
)
def test_contradictions_are_told_before_the_start(dtype: str, layers: str, gpus: int, says: str | None) -> None:
    cfg = SFTConfig.model_construct(
        model=ModelConfig(path="m", dtype=dtype),
        actor=TrainConfig(layers=layers),  # type: ignore[arg-type]
    )
    found = [str(problem) for problem in checks.check_layers(cfg, {}, Machine(1, 1, gpus))]
    assert len(found) == (says is not None)
    assert says is None or re.search(rf"^actor.layers.*{says}", found[0])


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v3", "olmo2", "olmo3", "smollm3"])
def test_families_that_it_has_no_layers_for_are_local(
    family: str, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "transformer_engine_problem", lambda: None)
    arch = load_arch(tiny_models(family, weights=False))
    assert layer_kind("auto", torch.bfloat16, arch) == "local"
    with pytest.raises(UnsupportedModel, match=f"{family} needs"):
        layer_kind("transformer_engine", torch.bfloat16, arch)
    cfg = SFTConfig.model_construct(model=ModelConfig(path="m"), actor=TrainConfig(layers="transformer_engine"))
    (problem,) = checks.check_layers(cfg, {"actor": arch}, Machine(1, 1))
    assert f"no layers for {family}" in str(problem)


def test_a_batch_has_what_either_attention_wants() -> None:
    packed = PackedBatch(
        tokens=torch.zeros(1, 6, dtype=torch.int64),
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]),
        output_positions=torch.arange(6),
        labels=torch.zeros(6, dtype=torch.int64),
        response_indices=torch.arange(6),
        cu_seqlens=torch.tensor([0, 4, 6], dtype=torch.int32),
        max_seqlen=4,
    )
    made = ModelBatch.make(packed, SimpleNamespace(cp=1, cp_rank=0), 1.0, "log_probs")  # type: ignore[arg-type]
    assert made.plan is made.plan and made.thd is made.thd, "made once for all layers"
    assert made.qkv_format != "thd" and made.thd.qkv_format == "thd" and made.thd.max_seqlen_q == 4
    assert made.thd.cu_seqlens_q.tolist() == [0, 4, 6] and made.thd.cu_seqlens_q.dtype == torch.int32
    assert made.plan.query_slot.numel() == 6
