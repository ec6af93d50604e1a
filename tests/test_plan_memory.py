"""The plan's bytes against the real thing: every rank of small layouts, and large models without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl import platform

platform.install()

from mrl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.data.packing import pack  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.families.table import VOCAB_ALIGN_GPU, Role  # noqa: E402
from mrl.learner.optimizer import build_optimizer, wrap_ddp  # noqa: E402
from mrl.models import gpt  # noqa: E402
from mrl.models.batch import ModelBatch  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Mesh  # noqa: E402
from mrl.plan.activations import Tokens, saved_bytes  # noqa: E402
from mrl.plan.grid import Grid, chunk_layers  # noqa: E402
from mrl.plan.parameters import chunks, held  # noqa: E402
from mrl.plan.proof import build  # noqa: E402

MODELS = Path(__file__).parent.parent / "yaml_configs" / "models"


@dataclass(frozen=True)
class Case:
    family: str
    world: int
    layout: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.family, *(f"{k[:2]}{v}" for k, v in (self.layout | self.model).items()), f"of{self.world}"]
        return "-".join(words)


LAYOUTS = [
    Case("llama", 1, {}),
    Case("qwen2", 3, {}, {"vocab_size": 301}),
    Case("llama", 4, {"context": 2}, {"tied": True}),
    Case("qwen2", 8, {"tensor": 2, "pipeline": 2}),
    Case("qwen2", 8, {"tensor": 2, "pipeline": 2}, {"tied": True}),
    Case("qwen3", 8, {"pipeline": 2, "virtual_pipeline": 2, "context": 2}, {"tied": True}),
    Case("mistral", 6, {"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1}),
    Case("qwen3", 4, {"tensor": 4}),
    Case("llama", 4, {"pipeline": 2, "virtual_pipeline": 2}),
    Case("mixtral", 6, {"tensor": 2}),
    Case("mixtral", 8, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    Case("qwen3_moe", 8, {"tensor": 2, "pipeline": 2, "expert": 2}),
    Case("qwen3_moe", 8, {"context": 2, "expert": 4}),
]
TinyModels = Callable[..., Path]


@pytest.fixture(autouse=True)
def padded_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan is made for."""
    monkeypatch.setattr(gpt, "VOCAB_ALIGN", VOCAB_ALIGN_GPU)


def directory(case: Case, tiny_models: TinyModels) -> Path:
    return tiny_models(case.family, weights=False, num_hidden_layers=4, num_key_value_heads=4, **case.model)


# critics where they differ: with what is tied otherwise, cut into stages, with experts
ROLED = [*((case, "policy") for case in LAYOUTS), *((case, "critic") for case in LAYOUTS[2:6] + LAYOUTS[-2:-1])]


@pytest.mark.parametrize(("case", "role"), ROLED, ids=str)
def test_every_rank_holds_what_the_plan_says(case: Case, role: Role, tiny_models: TinyModels) -> None:
    """Parameters in their order, Megatron's padded buffers, and the optimizer's shard of them."""
    path = directory(case, tiny_models)
    arch, train = load_arch(path), TrainConfig(parallel=ParallelConfig(**case.layout))
    grid = Grid(train.parallel, case.world)
    for seat in grid.seats:
        built = build(arch, str(path), role, train, seat.rank, case.world, torch.bfloat16)
        planned = chunks(arch, role, train.parallel, seat)
        assert [[numel for _, numel in chunk] for chunk in built.names] == [
            [p.numel for p in chunk] for chunk in planned
        ]
        assert built.held == held(arch, role, grid, seat), seat


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_measured_bytes_of_a_trained_model(case: Case, dtype: torch.dtype, tiny_models: TinyModels) -> None:
    path, rank = directory(case, tiny_models), case.world // 2
    arch, train = load_arch(path), TrainConfig(parallel=ParallelConfig(**case.layout))
    with platform.imagined_rank(rank, case.world, "cpu"), (mesh := Mesh(train.parallel)).active():
        models = build_model(arch, str(path), train, mesh, dtype, "policy", seed=None)
        wrapped = wrap_ddp(models)
        optimizer, _ = build_optimizer(OptimizerConfig(), wrapped, dtype)
        platform.prime_adam(optimizer)
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    gradients = {
        g.untyped_storage().data_ptr(): g.untyped_storage().nbytes()
        for g in (p.main_grad for m in models for p in m.parameters())
    }
    mains = [p for part in optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]]
    states = [s for part in optimizer.chained_optimizers for s in part.optimizer.state.values()]
    adam = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    own = {p.untyped_storage().data_ptr(): p.nbytes for p in mains if p.untyped_storage().data_ptr() not in weights}
    grid = Grid(train.parallel, case.world)
    plan = held(arch, "policy", grid, grid.seat(rank))
    assert sum(weights.values()) == plan.weight_bytes(dtype.itemsize, trained=True)
    assert sum(gradients.values()) == plan.gradient_bytes()
    assert adam + sum(own.values()) == plan.optimizer_bytes(dtype.itemsize)


@pytest.mark.parametrize("overlap", [False, True], ids=["at_once", "overlapped"])
@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        ("Llama-3.1-70B", {"tensor": 8, "pipeline": 4}, 64),
        ("Llama-3.1-70B", {"tensor": 8, "pipeline": 2, "context": 2}, 64),
        ("Qwen3-32B", {"tensor": 8}, 24),
        ("Qwen3-30B-A3B", {"tensor": 2, "expert": 8}, 32),
        ("Qwen2.5-7B", {"tensor": 4}, 8),
        ("Qwen3-0.6B", {"pipeline": 2, "virtual_pipeline": 2}, 6),
    ],
)
def test_every_distinct_rank_of_a_large_model(model: str, layout: dict[str, int], world: int, overlap: bool) -> None:
    """With overlapped sums each bucket of the first stage is padded to what data parallelism divides."""
    arch, train = load_arch(MODELS / model), TrainConfig(parallel=ParallelConfig(**layout))
    grid = Grid(train.parallel, world)
    distinct = {held(arch, "policy", grid, seat, overlap): seat for seat in reversed(grid.seats)}
    path = str(MODELS / model)
    for planned, seat in distinct.items():
        built = build(arch, path, "policy", train, seat.rank, world, torch.bfloat16, overlap=overlap)
        assert built.held == planned


ACTIVATIONS = [
    (Case("qwen2", 1, {}), "none", torch.float32),
    (Case("qwen3", 1, {}), "none", torch.bfloat16),
    (Case("llama", 2, {"tensor": 2}), "none", torch.float32),
    (Case("llama", 2, {"tensor": 2}, {"num_key_value_heads": 2}), "none", torch.bfloat16),
    (Case("llama", 4, {"tensor": 2, "pipeline": 2}), "none", torch.bfloat16),
    (Case("qwen3", 2, {"context": 2}), "none", torch.float32),
    (Case("llama", 4, {"context": 2, "tensor": 2}), "none", torch.bfloat16),
    (Case("qwen2", 1, {}), "full", torch.float32),
    (Case("qwen3_moe", 2, {"tensor": 2}), "full", torch.bfloat16),
    (Case("qwen2", 2, {"tensor": 2}), "selective", torch.float32),
    (Case("qwen3", 2, {"context": 2}), "selective", torch.bfloat16),
    (Case("mixtral", 1, {}), "none", torch.float32),
    (Case("mixtral", 2, {"tensor": 2}), "none", torch.bfloat16),
    (Case("qwen3_moe", 2, {"expert": 2}), "none", torch.float32),
    (Case("qwen3_moe", 4, {"tensor": 2, "expert": 2}), "none", torch.bfloat16),
]


HEADED = [(*row, "policy") for row in ACTIVATIONS] + [(*row, "critic") for row in ACTIVATIONS[::4]]


@pytest.mark.parametrize(("case", "recompute", "dtype", "role"), HEADED, ids=str)
def test_saved_activations(case: Case, recompute: Any, dtype: torch.dtype, role: Role, tiny_models: TinyModels) -> None:
    path = tiny_models(case.family, weights=False, **{"num_hidden_layers": 4, "num_key_value_heads": 4} | case.model)
    arch, train = load_arch(path), TrainConfig(parallel=ParallelConfig(**case.layout), recompute=recompute)
    grid, rank = Grid(train.parallel, case.world), case.world - 1
    saved, tokens = measured(str(path), role, train, rank, case.world, dtype)
    layers = chunk_layers(train.parallel, arch.num_layers, grid.seat(rank).pp)[0]
    planned = saved_bytes(arch, role, train, layers, dtype.itemsize, "local", tokens)
    assert planned == pytest.approx(saved, rel=0.1)


def measured(
    path: str, role: Role, train: TrainConfig, rank: int, world: int, dtype: torch.dtype
) -> tuple[int, Tokens]:
    """Bytes that autograd keeps after a forward pass of the rank's stage, its parameters left out."""
    arch, g = load_arch(path), torch.Generator().manual_seed(1)
    lengths = [
        56,
        58,
        60,
        64,
    ] * 3  # ascending inside a bucket of attention: no sequence stands where it would be padded
    rollout = Rollout.of(
        0, [[5, 6]] * len(lengths), [torch.randint(300, (n - 2,), generator=g).tolist() for n in lengths]
    )
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with platform.imagined_rank(rank, world, "cpu"), (mesh := Mesh(train.parallel)).active():
        (model,) = build_model(arch, path, train, mesh, dtype, role, seed=1)
        batch = pack(rollout, range(len(lengths)), mesh.cp, mesh.cp_rank, align_total=mesh.cp * mesh.tp)
        made = ModelBatch.make(batch, mesh, 1.0, "log_probs" if role == "policy" else "values")
        if not mesh.is_first_stage:
            rows = batch.tokens.size(1) // mesh.tp
            model.set_input_tensor(torch.randn(rows, 1, arch.hidden_size, dtype=dtype, requires_grad=True))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = model(batch.tokens, batch.position_ids, None, packed_seq_params=made)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in own)
    assert output.requires_grad
    cp = mesh.cp
    return saved, Tokens(batch.tokens.numel() * cp, batch.rows.numel() * cp, sum(lengths) // len(lengths))
