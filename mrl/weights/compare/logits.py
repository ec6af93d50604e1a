"""Does Megatron compute with a checkpoint what transformers computes with its Hugging Face directory?

The checkpoint is read by Megatron's own loader, so that what is compared shares no code with the converter.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mrl.config.schema import ParallelConfig, TrainConfig
from mrl.core import PackedBatch
from mrl.directories import size_text
from mrl.families.table import weight_table
from mrl.models.batch import ModelBatch, on_device
from mrl.models.build import build_model
from mrl.parallel import Meshes
from mrl.weights.disk.megatron_dirs import MegatronModel
from mrl.weights.disk.stored_names import stored_key
from mrl.weights.disk.torch_dist_files import load_metadata
from mrl.weights.disk.torch_dist_load import load
from mrl.weights.errors import WeightError
from mrl.weights.model.state import fill, wanted

LENGTHS = (3, 17, 64)  # of the fixed prompts
BOUND = 1e-4  # of the largest |logit|


@dataclass(frozen=True)
class Logits:
    """Largest difference and largest value, over all logits of the prompts; a critic's values instead."""

    error: float
    scale: float

    @property
    def close(self) -> bool:
        return self.error <= BOUND * self.scale


def compare_logits(hf: Path, model: MegatronModel, meshes: Meshes, cast_to: torch.dtype | None) -> Logits:
    """In float32, one model after the other. `cast_to`: what Hugging Face's weights are rounded to before.

    Raises WeightError if the memory does not suffice, or Megatron cannot load the checkpoint.
    """
    _require_memory(model)
    length = model.arch.max_positions
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.arch.vocab_size, (min(n, length),), generator=generator) for n in LENGTHS]
    want = _of_transformers(hf, model, prompts, cast_to)
    got = _of_megatron(model, prompts, meshes)
    return Logits(float((got - want).abs().max()), float(want.abs().max()))


def _require_memory(model: MegatronModel) -> None:
    rows = weight_table(model.arch, model.role).values()
    values = sum(torch.Size(shape).numel() for row in rows if row.copy_of is None for shape in row.shapes)
    needed, free = 5 * values, psutil.virtual_memory().available  # four bytes each, and room to load them
    if needed > free:
        raise WeightError(
            f"comparing logits needs {size_text(needed)} of memory, {size_text(free)} are free: use --skip-logits"
        )


@torch.no_grad()
def _of_transformers(hf: Path, model: MegatronModel, prompts: list[Tensor], cast_to: torch.dtype | None) -> Tensor:
    """Logits [tokens, vocabulary]; of a critic the values [prompts, 1] of the last tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    loader: Any = AutoModelForCausalLM if model.role == "policy" else AutoModelForSequenceClassification
    more = {} if model.role == "policy" else {"num_labels": 1}
    theirs, info = loader.from_pretrained(
        hf, dtype=torch.float32, trust_remote_code=False, local_files_only=True, output_loading_info=True, **more
    )
    theirs.eval()
    if any(name.startswith("score.") for name in info["missing_keys"]):
        theirs.score.weight.zero_()
    for parameter in theirs.parameters() if cast_to else ():
        parameter.copy_(parameter.to(cast_to))
    outputs = [theirs(prompt[None]).logits for prompt in prompts]
    return torch.cat([output if output.dim() == 2 else output[0] for output in outputs])


@torch.no_grad()
def _of_megatron(model: MegatronModel, prompts: list[Tensor], meshes: Meshes) -> Tensor:
    mesh = meshes.get(ParallelConfig())
    with mesh.active():
        chunk = build_model(
            model.arch, str(model.model_files), TrainConfig(), mesh, torch.float32, model.role, seed=None
        )[0]
        metadata = load_metadata(model.weights)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp_group})
        for entry in state.values():
            entry.key = stored_key(entry.key, metadata.state_dict_metadata)
        asked = {"model": wanted(state, metadata.state_dict_metadata)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, at every use that Megatron makes of it
            try:
                loaded = load(asked, model.weights, metadata)
            except CheckpointException as error:  # no Exception; its text has the ranks' tracebacks
                reasons = [str(reason) for reason, _ in error.failures.values()]
                raise WeightError("; ".join(reasons)) from error
        fill(chunk, loaded["model"])
        chunk.eval()
        batch = on_device(_packed(prompts))
        made = ModelBatch.make(batch, mesh, 1.0, "logits" if model.role == "policy" else "values")
        out = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=made).cpu()
    if model.role == "critic":
        ends = batch.cu_seqlens[1:].long() - 1
        return out[0, ends][:, None]
    return out[:, : model.arch.vocab_size]


def _packed(prompts: list[Tensor]) -> PackedBatch:
    lengths = [len(prompt) for prompt in prompts]
    every = torch.arange(sum(lengths))
    return PackedBatch(
        tokens=torch.cat(prompts)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        rows=every,
        labels=torch.cat(prompts),
        dest=every,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
    )
