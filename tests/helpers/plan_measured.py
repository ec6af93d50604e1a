"""Measured memory of a rank of a small layout on a CPU, next to the planned one. Used by `test_plan_memory` and by
`tools/plan_table.py`, which writes the tables of docs/benchmarks/planning.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl import platform

platform.install()

from mrl.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.data.packing import pack  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.families.table import VOCAB_ALIGN_GPU, Role  # noqa: E402
from mrl.kernels import native  # noqa: E402
from mrl.learner.optimizer import build_optimizer, wrap_ddp  # noqa: E402
from mrl.models import gpt  # noqa: E402
from mrl.models.batch import ModelBatch  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.parallel import Mesh  # noqa: E402
from mrl.plan.activations import Tokens, saved_bytes  # noqa: E402
from mrl.plan.grid import Grid, chunk_layers  # noqa: E402
from mrl.plan.parameters import model_elements  # noqa: E402
from tests.helpers.tiny import HAS_DELTA_NETS  # noqa: E402

TinyModels = Callable[..., Path]
Bytes = tuple[int, int, int]  # weights, gradients, main weights with Adam's moments


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
    Case("glm4_moe", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    Case("gemma3_text", 4, {"tensor": 2, "pipeline": 2}),
    Case("deepseek_v3", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    Case("qwen2_moe", 2, {"tensor": 2}, {"mlp_only_layers": [1]}),
    Case("olmo2", 2, {"tensor": 2}),
    Case("phi3", 2, {"tensor": 2}),
    Case("gpt_oss", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
]
if HAS_DELTA_NETS:
    LAYOUTS += [
        Case("qwen3_next", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
        Case("qwen3_5_text", 4, {"tensor": 2, "context": 2}),
    ]


# critics where their memory differs from the policy's: a tied head, pipeline stages, experts
ROLED = [*((case, "policy") for case in LAYOUTS), *((case, "critic") for case in LAYOUTS[2:6] + LAYOUTS[14:15])]
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
    (Case("glm4_moe", 2, {"tensor": 2}), "none", torch.float32),
    (Case("gemma3_text", 2, {"tensor": 2}), "none", torch.float32),
    (Case("deepseek_v3", 2, {"tensor": 2}), "none", torch.float32),
    (Case("qwen2_moe", 2, {"tensor": 2}), "none", torch.float32),
    (Case("olmo2", 2, {"tensor": 2}), "none", torch.float32),
    (Case("gpt_oss", 2, {"tensor": 2, "expert": 2}), "none", torch.float32),
    (Case("gpt_oss", 2, {"context": 2, "expert": 2}), "selective", torch.bfloat16),
]
if HAS_DELTA_NETS:
    ACTIVATIONS += [
        (Case("qwen3_5_text", 2, {"tensor": 2}), "none", torch.float32),
        (Case("qwen3_5_text", 2, {"context": 2}), "selective", torch.bfloat16),
        (Case("qwen3_next", 2, {"tensor": 2, "expert": 2}), "none", torch.float32),
    ]


HEADED = [(*row, "policy") for row in ACTIVATIONS] + [(*row, "critic") for row in ACTIVATIONS[::4]]


@contextmanager
def padded_as_on_gpus() -> Iterator[None]:
    """Pads vocabularies as on GPUs, as the planner assumes."""
    before, gpt.VOCAB_ALIGN = gpt.VOCAB_ALIGN, VOCAB_ALIGN_GPU
    try:
        yield
    finally:
        gpt.VOCAB_ALIGN = before


def directory(case: Case, tiny_models: TinyModels) -> Path:
    wide = {"num_hidden_layers": 4, "num_key_value_heads": 4} | case.model
    return tiny_models(case.family, weights=False, **wide)


def state_bytes(case: Case, dtype: torch.dtype, tiny_models: TinyModels) -> tuple[Bytes, Bytes]:
    """Returns (measured, planned) bytes of the rank in the middle of the world, with the optimizer state allocated."""
    path, rank = directory(case, tiny_models), case.world // 2
    arch, train = load_arch(path), TrainConfig(parallel=ParallelConfig(**case.layout))
    with platform.fake_rank(rank, case.world, "cpu"), (mesh := Mesh(train.parallel)).active():
        models = build_model(arch, str(path), train, mesh, dtype, "policy", seed=None)
        wrapped = wrap_ddp(models)
        optimizer, _ = build_optimizer(OptimizerConfig(), wrapped, dtype)
        platform.prime_adam(optimizer)
    trained = [p for m in models for p in m.parameters() if p.requires_grad]
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trained}
    gradients = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in (p.main_grad for p in trained)}
    mains = [p for part in optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]]
    states = [s for part in optimizer.chained_optimizers for s in part.optimizer.state.values()]
    adam = sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    own = {p.untyped_storage().data_ptr(): p.nbytes for p in mains if p.untyped_storage().data_ptr() not in weights}
    grid = Grid(train.parallel, case.world)
    plan = model_elements(arch, "policy", grid, grid.coordinates(rank))
    planned = (
        plan.weight_bytes(dtype.itemsize, trained=True),
        plan.gradient_bytes(),
        plan.optimizer_bytes(dtype.itemsize),
    )
    return (sum(weights.values()), sum(gradients.values()), adam + sum(own.values())), planned


def saved_activations(
    case: Case,
    recompute: Any,
    dtype: torch.dtype,
    role: Role,
    tiny_models: TinyModels,
    precision: PrecisionConfig | None = None,
    in_c: bool = False,
) -> tuple[int, float]:
    """Returns (measured, planned) bytes of activations on the last rank after a forward pass. in_c: with the kernels in
    C, else with those in torch, as on GPUs"""
    path = directory(case, tiny_models)
    parallel = ParallelConfig(**case.layout)
    arch, train = (
        load_arch(path),
        TrainConfig(parallel=parallel, recompute=recompute, precision=precision or PrecisionConfig()),
    )
    grid, rank = Grid(train.parallel, case.world), case.world - 1
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(native, "supports_tensors", lambda *tensors: False)
        saved, tokens = measured(str(path), role, train, rank, case.world, dtype)
    layers = chunk_layers(train.parallel, arch.num_layers, grid.coordinates(rank).pp)[0]
    return saved, saved_bytes(arch, role, train, layers, dtype.itemsize, "local", tokens)


def measured(
    path: str, role: Role, train: TrainConfig, rank: int, world: int, dtype: torch.dtype
) -> tuple[int, Tokens]:
    """Returns the bytes that autograd keeps after a forward pass, without parameters, and the token counts."""
    arch, g = load_arch(path), torch.Generator().manual_seed(1)
    lengths = [
        56,
        58,
        60,
        64,
    ] * 3  # in ascending order, so that no sequence in a bucket of attention is padded
    rollout = Rollout.of(
        0, [[5, 6]] * len(lengths), [torch.randint(300, (n - 2,), generator=g).tolist() for n in lengths]
    )
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with platform.fake_rank(rank, world, "cpu"), (mesh := Mesh(train.parallel)).active():
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
    return saved, Tokens(batch.tokens.numel() * cp, batch.output_positions.numel() * cp, sum(lengths) // len(lengths))
