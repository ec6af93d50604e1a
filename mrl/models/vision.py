"""Images in a Megatron GPT: transformers' own vision tower, whole on every rank of the first pipeline stage.

Its features replace the image tokens' embeddings. Qwen3-VL adds deep features after its first layers as well.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrl import platform
from mrl.config.derived import first_chunk_layers
from mrl.config.sections.models import ParallelConfig
from mrl.families import ModelArch, UnsupportedModel
from mrl.models.batch import Images, ModelBatch
from mrl.models.hub_config import hub_config


class InjectImageFeatures(torch.autograd.Function):
    """hidden [t, 1, h] with rows `at` [m] replaced by `pooled` [m, h].

    It also carries the deep features' gradients: layers take detached `leaves`, and this node, which runs after every
    layer's backward pass, passes their gradients on. Otherwise a recomputed layer would run backward through the tower,
    which works only once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, at: Tensor, pooled: Tensor, leaves: list[Tensor], *deep: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.leaves = leaves
        return hidden.index_put((at, torch.zeros_like(at)), pooled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (at,), (grad,) = ctx.saved_tensors, grads
        mine = grad[at, 0]
        rest = grad.index_put((at, torch.zeros_like(at)), torch.zeros_like(mine))
        return rest, None, mine, None, *(leaf.grad for leaf in ctx.leaves)


def attach_vision_tower(chunk: Any, arch: ModelArch, hf_path: str, layout: ParallelConfig, *, trains: bool) -> None:
    """Attaches the tower as `visual` to a chunk that begins with the embedding; frozen unless `trains`.

    Raises UnsupportedModel on every rank for a layout whose first chunk lacks layers that take deep features.
    """
    assert arch.vision is not None
    deep, first = len(arch.vision.deep), first_chunk_layers(layout, arch.num_layers)
    if first < deep:
        raise UnsupportedModel(
            f"the first {deep} layers take deep image features, and the first pipeline stage has only {first}: lower "
            "parallel.pipeline"
        )
    if not chunk.pre_process:
        return
    chunk.visual = _tower(hf_path)
    for parameter in chunk.visual.parameters():
        parameter.data = parameter.data.to(chunk.config.params_dtype)  # not the buffers: frequencies stay float32
        parameter.requires_grad_(trains)
        # each rank sees the gradient of its own tokens only
        vars(parameter)["sequence_parallel"] = chunk.config.sequence_parallel
    for layer in chunk.decoder.layers[:deep]:
        layer.register_forward_hook(_add_deep, with_kwargs=True)


def add_image_features(model: Any, hidden: Tensor, images: Images) -> Tensor:
    """Returns hidden [t, 1, h] (this rank's slice under sequence parallelism) with the image features; stores the deep
    ones in `images`.
    """
    tower: nn.Module = model.visual
    trains = next(tower.parameters()).requires_grad
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
        seen = tower(images.pixels.to(hidden.dtype), grid_thw=images.grids, return_dict=True)
    at, row = _own(model, images, hidden.size(0))
    deep = [features[row].to(hidden.dtype) for features in seen.get("deepstack_features") or ()]
    leaves = [features.detach().requires_grad_(features.requires_grad) for features in deep]
    images.deep = tuple((at, leaf) for leaf in leaves)
    out: Tensor = InjectImageFeatures.apply(hidden, at, seen.pooler_output[row].to(hidden.dtype), leaves, *deep)
    return out


def _own(model: Any, images: Images, tokens: int) -> tuple[Tensor, Tensor]:
    """(positions, features) of the tokens that this rank holds: a slice of them under sequence parallelism."""
    if not model.config.sequence_parallel:
        return images.at, images.row
    first = model.pg_collection.tp.rank() * tokens
    mine = (images.at >= first) & (images.at < first + tokens)
    return images.at[mine] - first, images.row[mine]


def _add_deep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    batch: ModelBatch = kwargs["packed_seq_params"]
    if batch.images is None:
        return None
    at, features = batch.images.deep[layer.layer_number - 1]
    hidden = output[0].index_put((at, torch.zeros_like(at)), features, accumulate=True)
    return hidden, *output[1:]


def _tower(hf_path: str) -> Any:
    from transformers import AutoModel

    with torch.device(platform.device()):
        tower = AutoModel.from_config(hub_config(hf_path).vision_config)
    tower.patch_embed.forward = MethodType(_embed_patches, tower.patch_embed)
    return tower


def _embed_patches(self: Any, patches: Tensor) -> Tensor:
    """Computes the convolution as one product, as its stride equals its width."""
    weight = self.proj.weight
    return F.linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)
