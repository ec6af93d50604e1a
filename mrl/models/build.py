"""Construction of this rank's model chunks from a Hugging Face directory's config and a layout."""

from __future__ import annotations

from functools import partial

import torch

from mrl import platform
from mrl.config.schema import TrainConfig
from mrl.families import ModelArch
from mrl.families.table import Role
from mrl.models.critic import Critic
from mrl.models.initialise import initialise
from mrl.models.mcore import MegatronModule
from mrl.models.policy import Policy
from mrl.models.rope import inverse_frequencies
from mrl.models.transformer_config import transformer_config
from mrl.models.vision import attach_vision_tower
from mrl.parallel import Mesh

_CLASSES: dict[Role, type[Policy | Critic]] = {"policy": Policy, "critic": Critic}


def build_model(
    arch: ModelArch,
    hf_path: str,
    train: TrainConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    role: Role,
    seed: int | None,
    *,
    trains_vision: bool = False,
) -> list[MegatronModule]:
    """Builds one chunk a virtual pipeline stage, on this rank's device, unwrapped. Collective; call inside
    `mesh.active()`.

    The weights depend on `seed` alone, whatever the layout; None leaves them undefined, for a checkpoint to fill
    (the critic's value head is zero in any case). Only config.json of `hf_path` is read. A vision tower is frozen
    unless `trains_vision`. Raises UnsupportedModel, also for a first chunk without the layers that take deep features.
    """
    config = transformer_config(arch, train, mesh, dtype)
    inv_freq = inverse_frequencies(hf_path, arch)
    stages = range(mesh.vpp) if mesh.vpp is not None else [None]
    made = partial(_CLASSES[role], arch, config, inv_freq, tied=arch.tied_embeddings, precision=train.precision.fp8)
    chunks = []
    for stage in stages:
        chunk = made(vp_stage=stage)
        if arch.vision is not None:
            attach_vision_tower(chunk, arch, hf_path, train.parallel, trains=trains_vision)
        chunk = chunk.to(platform.device())
        if seed is not None:
            initialise(chunk, arch, mesh, role, seed)
        chunks.append(chunk)
    return chunks


def build_skeleton(arch: ModelArch, hf_path: str, mesh: Mesh, role: Role) -> MegatronModule:
    """Builds a single-process model on the meta device, whose matrices have shapes and names but no memory.

    It uses Megatron's own layers on every machine, as checkpoint names do not depend on the kind of layer. Call inside
    `mesh.active()`.
    """
    train = TrainConfig()
    config = transformer_config(arch, train, mesh, torch.float32)
    config.transformer_impl, config.use_cpu_initialization, config.moe_grouped_gemm = "local", True, False
    inv_freq = inverse_frequencies(hf_path, arch)
    with torch.device("meta"):
        made = _CLASSES[role](
            arch, config, inv_freq, tied=arch.tied_embeddings, vp_stage=None, precision=train.precision.fp8
        )
        if arch.vision is not None:
            attach_vision_tower(made, arch, hf_path, train.parallel, trains=False)
    return made
