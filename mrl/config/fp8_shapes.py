"""Size requirements of fp8 products: dimensions of a model's matrices on one rank, and tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.config.sections.models import ParallelConfig
from mrl.config.sections.precision import FP8Recipe
from mrl.families import ModelArch

# recipe -> number that every dimension of every product must be a multiple of
BLOCK = {"current": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}
ENGINE_BLOCK = BLOCK["blockwise"]  # side of a block with one scale in an engine's fp8 weights (rollout.quantization)
_ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")


def is_engine_fp8(name: str, shape: Sequence[int]) -> bool:
    """True if an fp8 engine holds the tensor with this Hugging Face name in fp8: layers' matrices, except routers."""
    is_matrix = ".layers." in name and name.endswith("_proj.weight") or ".experts." in name
    return is_matrix and len(shape) == 2 and not name.endswith(_ROUTERS)


def token_unit(layout: ParallelConfig, recipe: FP8Recipe) -> int:
    """Returns the number of tokens that a micro-batch is padded to a multiple of, before context parallelism splits it.

    With fp8, the tokens of each rank must be whole blocks, also after sequence parallelism splits them: tokens are the
    inner dimension of the product for a weight gradient.
    """
    return layout.context * layout.tensor * BLOCK.get(recipe, 1)


def widths(arch: ModelArch, layout: ParallelConfig) -> dict[str, tuple[int, int]]:
    """Returns name -> (total size, ranks that share it) for every dimension of the matrices of a layer."""
    tp, experts_tp = layout.tensor, layout.expert_tensor_size
    found = {
        "hidden size": (arch.hidden_size, 1),
        "queries, keys and values": ((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim, tp),
        "attention's output": (arch.num_heads * arch.head_dim, tp),
    }
    if arch.dense_width is not None:
        found["feed-forward width"] = (arch.dense_width, tp)
    if arch.shared_width is not None:
        found["shared experts' width"] = (arch.shared_width, tp)
    if arch.expert_width is not None:
        found["experts' feed-forward width"] = (arch.expert_width, experts_tp)
    return found
