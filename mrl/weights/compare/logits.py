"""Comparison of logits: Megatron with a checkpoint against transformers with its Hugging Face directory.

Megatron's own loader reads the checkpoint, so that the comparison shares no code with the converter.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mrl import platform
from mrl.config.schema import ParallelConfig, TrainConfig
from mrl.core import PackedBatch, Rollout
from mrl.data.packing import pack
from mrl.directories import size_text
from mrl.families import ModelArch, VisionArch
from mrl.families.table import HF_VALUE_HEAD, Role, weight_table
from mrl.models.batch import Images, ModelBatch, on_device
from mrl.models.build import build_model
from mrl.parallel import Meshes
from mrl.weights.disk.megatron_dirs import MegatronModel
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.stored_names import stored_key
from mrl.weights.disk.torch_dist_files import load_metadata
from mrl.weights.disk.torch_dist_load import load
from mrl.weights.errors import WeightError
from mrl.weights.model.state import fill, requested_entries

LENGTHS = (3, 17, 64)  # of the fixed prompts
SIDES = (2, 3)  # rows and columns of features of the image in the second prompt, for a vision-language model
PLACE = 4  # position of the image in that prompt
BOUND = 1e-4  # of the largest |logit|


@dataclass(frozen=True)
class LogitsDifference:
    """Largest difference and largest value, over all logits of the prompts, or over a critic's values."""

    error: float
    scale: float

    @property
    def close(self) -> bool:
        return self.error <= BOUND * self.scale


@dataclass(frozen=True)
class Prompt:
    """One prompt: ids [n] int64; for an image its pixels [patches, patch values] and its rows and columns of
    patches.
    """

    ids: Tensor
    pixels: Tensor | None = None
    grid: tuple[int, int] = (0, 0)


def compare_logits(hf: Path, model: MegatronModel, meshes: Meshes, cast_to: torch.dtype | None) -> LogitsDifference:
    """Compares in float32, one model after the other; a vision-language model gets an image of noise.

    `cast_to`: dtype that Hugging Face's weights are rounded to first.
    Raises WeightError if the memory does not suffice, or Megatron cannot load the checkpoint.
    """
    require_memory(model.arch, model.role)
    length = model.arch.max_positions
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(model.arch.vocab_size, (min(n, length),), generator=generator) for n in LENGTHS]
    prompts = [Prompt(text) for text in texts] if model.arch.vision is None else _seen(texts, model.arch, generator)
    want = _of_transformers(hf, model, prompts, cast_to)
    got = _of_megatron(model, prompts, meshes)
    return LogitsDifference(float((got - want).abs().max()), float(want.abs().max()))


def require_memory(arch: ModelArch, role: Role) -> None:
    """Raises WeightError if there is not enough memory for `compare_logits`."""
    rows = weight_table(arch, role).values()
    values = sum(torch.Size(shape).numel() for row in rows if row.copy_of is None for shape in row.shapes)
    needed, free = 5 * values, platform.free_host_memory()  # four bytes each, and room to load them
    if needed > free:
        raise WeightError(
            f"comparing logits needs {size_text(needed)} of memory, and {size_text(free)} are free: use --skip-logits"
        )


def _seen(texts: list[Tensor], arch: ModelArch, generator: torch.Generator) -> list[Prompt]:
    """Returns the texts with an image in the second; no other token is an image token."""
    vision = arch.vision
    assert vision is not None
    other = (vision.image_token + 1) % arch.vocab_size
    plain = [text.masked_fill(text == vision.image_token, other) for text in texts]
    rows, columns = (side * vision.merge for side in SIDES)
    pixels = torch.randn(rows * columns, vision.patch_values, generator=generator)
    features = torch.full((SIDES[0] * SIDES[1],), vision.image_token)
    second = Prompt(torch.cat([plain[1][:PLACE], features, plain[1][PLACE:]]), pixels, (rows, columns))
    return [Prompt(plain[0]), second, *map(Prompt, plain[2:])]


@torch.no_grad()
def _of_transformers(hf: Path, model: MegatronModel, prompts: list[Prompt], cast_to: torch.dtype | None) -> Tensor:
    """Returns logits [tokens, vocabulary]; for a critic the values [prompts, 1] of the last tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    if model.arch.vision is not None:
        return _of_seeing_transformers(hf, model, prompts, cast_to)
    loader: Any = AutoModelForCausalLM if model.role == "policy" else AutoModelForSequenceClassification
    more = {} if model.role == "policy" else {"num_labels": model.arch.score_heads}
    theirs, info = loader.from_pretrained(
        hf, dtype=torch.float32, trust_remote_code=False, local_files_only=True, output_loading_info=True, **more
    )
    theirs.eval()
    if any(name.startswith("score.") for name in info["missing_keys"]):
        theirs.score.weight.zero_()
    for parameter in theirs.parameters() if cast_to else ():
        parameter.copy_(parameter.to(cast_to))
    outputs = [theirs(prompt.ids[None]).logits for prompt in prompts]
    return torch.cat([output if output.dim() == 2 else output[0] for output in outputs])


def _of_seeing_transformers(
    hf: Path, model: MegatronModel, prompts: list[Prompt], cast_to: torch.dtype | None
) -> Tensor:
    """Same as `_of_transformers`, which has no vision-language model with a score head: the head is applied here."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config, vision = AutoConfig.from_pretrained(hf, trust_remote_code=False, local_files_only=True), model.arch.vision
    assert vision is not None
    theirs: Any = AutoModelForImageTextToText.from_pretrained(
        hf, config=config, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    ).eval()
    head = torch.zeros(model.arch.score_heads, model.arch.hidden_size)
    with HFCheckpoint(hf) as checkpoint:
        if HF_VALUE_HEAD in checkpoint:
            head = checkpoint.source(HF_VALUE_HEAD)[:].to(cast_to or torch.float32).float()
    for parameter in theirs.parameters() if cast_to else ():
        parameter.copy_(parameter.to(cast_to))
    outputs = []
    for prompt in prompts:
        inputs = {"input_ids": prompt.ids[None], "mm_token_type_ids": (prompt.ids == vision.image_token).int()[None]}
        if prompt.pixels is not None:
            inputs |= {"pixel_values": prompt.pixels, "image_grid_thw": torch.tensor([[1, *prompt.grid]])}
        if model.role == "policy":
            outputs.append(theirs(**inputs).logits[0])
        else:
            last = theirs.model(**inputs).last_hidden_state[0, -1:]
            outputs.append(
                last @ (head.T if head is not None else last.new_zeros(last.shape[1], model.arch.score_heads))
            )
    return torch.cat(outputs)


@torch.no_grad()
def _of_megatron(model: MegatronModel, prompts: list[Prompt], meshes: Meshes) -> Tensor:
    mesh = meshes.get(ParallelConfig())
    with mesh.active():
        chunk = build_model(
            model.arch, str(model.model_files), TrainConfig(), mesh, torch.float32, model.role, seed=None
        )[0]
        metadata = load_metadata(model.weights)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp_group})
        for entry in state.values():
            entry.key = stored_key(entry.key, metadata.state_dict_metadata)
        asked = {"model": requested_entries(state, metadata.state_dict_metadata)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, at every use that Megatron makes of it
            try:
                loaded = load(asked, model.weights, metadata)
            except CheckpointException as error:  # no Exception; its text has the ranks' tracebacks
                reasons = [str(reason) for reason, _ in error.failures.values()]
                raise WeightError("; ".join(reasons)) from error
        fill(chunk, loaded["model"])
        chunk.eval()
        batch = on_device(_packed(prompts, model.arch.vision))
        pixels = [prompt.pixels for prompt in prompts if prompt.pixels is not None]
        images = Images.make(batch, torch.cat(pixels)) if pixels else None
        made = ModelBatch.make(batch, mesh, 1.0, "logits" if model.role == "policy" else "values", images=images)
        out = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=made).cpu()
    if model.role == "critic":
        ends = batch.cu_seqlens[1:].long() - 1
        return out[:, ends].T
    return out[:, : model.arch.vocab_size]


def _packed(prompts: list[Prompt], vision: VisionArch | None) -> PackedBatch:
    """Returns a batch that outputs every token."""
    seen = [prompt.grid for prompt in prompts if prompt.pixels is not None]
    rollout = Rollout.of(
        0,
        [prompt.ids[:-1].numpy() for prompt in prompts],
        [prompt.ids[-1:].numpy() for prompt in prompts],
        rows=torch.arange(len(prompts)),
        image_counts=torch.tensor([int(prompt.pixels is not None) for prompt in prompts]),
        images=torch.tensor([(*grid, 0) for grid in seen]).reshape(-1, 3),
    )
    batch = pack(rollout, range(len(prompts)), 1, 0, 1, vision)
    every = torch.arange(batch.tokens.numel())
    return replace(batch, output_positions=every, labels=batch.tokens[0], response_indices=every)
