"""Planned bytes against measured ones: every rank of small layouts, and large models without allocated memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import ParallelConfig, TrainConfig
from mrl.families import load_arch
from mrl.families.table import Role
from mrl.plan.activations import Tokens
from mrl.plan.built_model import build
from mrl.plan.grid import Grid
from mrl.plan.memory import update_peak
from mrl.plan.parameters import chunks, model_elements
from mrl.plan.workload import PlannedModel
from tests.helpers.plan_measured import (
    HEADED,
    LAYOUTS,
    ROLED,
    Case,
    TinyModels,
    directory,
    padded_as_on_gpus,
    saved_activations,
    state_bytes,
)

MODELS = Path(__file__).parents[3] / "yaml_configs" / "models"


@pytest.fixture(autouse=True)
def _padded() -> Iterator[None]:
    with padded_as_on_gpus():
        yield


@pytest.mark.parametrize(("case", "role"), ROLED, ids=str)
def test_every_rank_holds_what_the_plan_says(case: Case, role: Role, tiny_models: TinyModels) -> None:
    """The plan has the rank's parameters in order, Megatron's padded buffers, and the optimizer's shard of them."""
    path = directory(case, tiny_models)
    arch, train = load_arch(path), TrainConfig(parallel=ParallelConfig(**case.layout))
    grid = Grid(train.parallel, case.world)
    for coords in grid.all_coordinates:
        built = build(arch, str(path), role, train, coords.rank, case.world, torch.bfloat16)
        planned = chunks(arch, role, train.parallel, coords)
        assert [[numel for _, numel in chunk] for chunk in built.names] == [
            [p.numel for p in chunk] for chunk in planned
        ]
        assert built.held == model_elements(arch, role, grid, coords), coords


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_measured_bytes_of_a_trained_model(case: Case, dtype: torch.dtype, tiny_models: TinyModels) -> None:
    measured, planned = state_bytes(case, dtype, tiny_models)
    assert measured == planned


@pytest.mark.parametrize("overlap", [False, True], ids=["at_once", "overlapped"])
@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        pytest.param("Llama-3.1-70B", {"tensor": 8, "pipeline": 4}, 64, marks=pytest.mark.slow),
        ("Llama-3.1-70B", {"tensor": 8, "pipeline": 2, "context": 2}, 64),
        pytest.param("Qwen3-32B", {"tensor": 8}, 24, marks=pytest.mark.slow),
        ("Qwen3-30B-A3B", {"tensor": 2, "expert": 8}, 32),
        ("Qwen2.5-7B", {"tensor": 4}, 8),
        ("Qwen3-0.6B", {"pipeline": 2, "virtual_pipeline": 2}, 6),
    ],
)
def test_every_distinct_rank_of_a_large_model(model: str, layout: dict[str, int], world: int, overlap: bool) -> None:
    """The plan matches every distinct rank of a large model. With overlapped gradient reduction each bucket of the
    first stage is padded for data parallelism."""
    arch, train = load_arch(MODELS / model), TrainConfig(parallel=ParallelConfig(**layout))
    grid = Grid(train.parallel, world)
    distinct = {
        model_elements(arch, "policy", grid, coords, overlap): coords for coords in reversed(grid.all_coordinates)
    }
    path = str(MODELS / model)
    for planned, coords in distinct.items():
        built = build(arch, path, "policy", train, coords.rank, world, torch.bfloat16, overlap=overlap)
        assert built.held == planned


@pytest.mark.parametrize(("case", "recompute", "dtype", "role"), HEADED, ids=str)
def test_saved_activations(case: Case, recompute: Any, dtype: torch.dtype, role: Role, tiny_models: TinyModels) -> None:
    saved, planned = saved_activations(case, recompute, dtype, role, tiny_models)
    assert planned == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("layout", [{"context": 2}, {"tensor": 2}], ids=str)
def test_kernels_in_c_keep_no_more(layout: dict[str, int], tiny_models: TinyModels) -> None:
    """C kernels keep no more activations than planned; they need no gathered keys under context parallelism."""
    case = Case("qwen3", 2, layout)
    saved, planned = saved_activations(case, "none", torch.float32, "policy", tiny_models, in_c=True)
    assert 0.7 * planned < saved < 1.05 * planned


@pytest.mark.parametrize(
    ("response", "waiting", "gradient"),
    [(8192, 3072, 8), (3500, 3500, 2), (1024, 1024, 2)],  # 1 GiB of logits; one product needs no sum
)
def test_what_the_head_s_gradients_wait_in(response: int, waiting: int, gradient: int) -> None:
    """The planned memory of the head is the sum of its parts, for Qwen3-0.6B in bfloat16 with 16,384 packed tokens:
    rows and their gradients, a chunk of logits in float32, waiting gradients, two work blocks, and the gradient of the
    matrix."""
    path = str(MODELS / "Qwen3-0.6B")
    arch, grid = load_arch(path), Grid(ParallelConfig(), 1)
    model = PlannedModel("actor", path, arch, "policy", TrainConfig(), True, grid, 2, "local", True)
    (coords,) = grid.all_coordinates
    (head,) = (i for i in update_peak(model, coords, Tokens(16384, response, 1024), 1) if i.what == "head")
    chunk, words, hidden = 1024, 151_936, 1024
    rows, logits = (2 * response + 16384) * hidden * 2, words * (min(chunk, response) * 4 + waiting * 2)
    assert head.nbytes == rows + logits + 2 * (1 << 23) * 4 + words * hidden * gradient
