"""`mrl merge`: a Hugging Face directory with adapters merged into its weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.directories import Staging
from mrl.families import load_arch
from mrl.families.peft import PREFIX
from mrl.families.table import HF_OUTPUT, HF_VALUE_HEAD, VALUE_HEAD, Role, weight_table
from mrl.weights.disk.adapter_files import CONFIG, WEIGHTS, AdapterConfig, read_config
from mrl.weights.disk.base_digest import joined, tensor_digest
from mrl.weights.disk.draft_layers import is_draft
from mrl.weights.disk.model_files import CHAT_TEMPLATE, GENERATION, copy_model_files
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.errors import WeightError
from mrl.weights.meta import TensorMeta
from mrl.weights.model.export import plan_files, write_index

_PARTS = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector": "magnitude"}


@dataclass
class MergeReport:
    """Result of a merge.

    layers: number with adapters; tensors: number in total; is_checked: the weights are known to be the adapters' base
    lost: sum of squares of the rounding error in the weights' dtype; added: sum of squares of the adapters' deltas
    """

    layers: int
    tensors: int = 0
    is_checked: bool = False
    lost: float = 0.0
    added: float = 0.0

    @property
    def rounding(self) -> float:
        """Relative error (in L2 norm) that rounding causes in the adapters' deltas."""
        return math.sqrt(self.lost / self.added) if self.added else 0.0

    def lines(self, target: Path) -> Iterator[str]:
        """Yields the lines for the user."""
        yield f"{target}: merged the adapters of {self.layers} layers into {self.tensors} tensors"
        yield f"rounding changed the adapters' contribution by {self.rounding:.1%}"
        if not self.is_checked:
            yield "not checked that BASE is what the adapters were trained on: mrl did not write them"


@dataclass(frozen=True)
class AdapterFile:
    """Adapters of one directory. layers: A, B and magnitude by the hub's name of the linear layer; whole: tensors that
    replace those of the same name.
    """

    config: AdapterConfig
    layers: Mapping[str, dict[str, Tensor]]
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    def merged(self, name: str, weight: Tensor, into: MergeReport) -> Tensor:
        """Returns the tensor `name` with its adapter merged, in its own dtype, and adds the rounding error to `into`. A
        replaced tensor has the dtype of its replacement.
        """
        if name in self.whole:
            return self.whole[name]
        parts = self.layers.get(name.removesuffix(".weight"))
        if parts is None:
            return weight
        plain = weight.float()
        exact = plain + self.config.scale * (parts["B"].float() @ parts["A"].float())
        if self.config.dora:
            exact *= (parts["magnitude"].float().flatten() / exact.norm(dim=1))[:, None]
        rounded = exact.to(weight.dtype)
        into.lost += float((rounded.float() - exact).double().square().sum())
        into.added += float((exact - plain).double().square().sum())
        return rounded


def merge(
    base: Path,
    adapter: Path,
    target: Path,
    max_file_bytes: int,
    *,
    allow_pickle: bool = False,
    describe: Callable[[Path, MergeReport], None] | None = None,
) -> MergeReport:
    """Writes `target`, a complete Hugging Face directory, all or nothing. Each tensor is merged in float32 and rounded
    once to the base's dtype. A classifier's score head comes from the adapters.

    describe: writes the model's description into the directory, before that is renamed to `target`
    Raises WeightError if the weights are not the adapters' base, if the base lacks an adapted layer, and for adapters
    of a kind that PEFT would compute differently.
    """
    file, arch = read_adapter(adapter), load_arch(base)
    if file.whole:
        arch = replace(arch, score_heads=file.whole[HF_VALUE_HEAD].size(0), scores_steps=file.config.scores_steps)
        row, head = weight_table(arch, "critic")[VALUE_HEAD], file.whole[HF_VALUE_HEAD]
        file = replace(file, whole={**file.whole, **{name: head.new_zeros(shape) for name, shape in row.zeros}})
    result = MergeReport(len(file.layers))
    with closing(HFCheckpoint(base, allow_pickle)) as checkpoint:
        metas = [m for m in _metas(checkpoint, file, adapter) if not (file.whole and is_draft(arch, m.name))]
        staging = Staging(target, sum(meta.nbytes for meta in metas))
        staging.begin()
        try:
            _write(checkpoint, file, metas, max_file_bytes, staging.directory, result, base)
            role: Role = "critic" if file.whole else "policy"
            drafts = any(is_draft(arch, meta.name) for meta in metas)
            copy_model_files(base, staging.directory, metas[0].dtype, arch, role, drafts=drafts)
            for name in (CHAT_TEMPLATE, GENERATION):  # the adapters were trained with these
                if (adapter / name).is_file():
                    shutil.copyfile(adapter / name, staging.directory / name)
            if describe is not None:
                describe(staging.directory, result)
            staging.commit()
        finally:
            staging.end()
    return result


def read_adapter(directory: Path) -> AdapterFile:
    """Reads a directory of adapters. Raises WeightError for an incomplete file, or for names that no adapter has."""
    found, file = read_config(directory), directory / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{file} cannot be read: {error}") from error
    layers: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    unknown: list[str] = []
    carried: list[str] = []
    for name, tensor in tensors.items():
        own = name.removeprefix(PREFIX)
        ending = next((end for end in _PARTS if own.endswith(f".{end}")), None)
        if ending is not None:
            layers.setdefault(own.removesuffix(f".{ending}"), {})[_PARTS[ending]] = tensor
        elif own == HF_VALUE_HEAD:
            whole[own] = tensor
        elif own.endswith((".weight", ".bias")) or ".lora_embedding_" in own:
            carried.append(own)
        else:
            unknown.append(name)
    if carried:
        raise WeightError(
            f"{file}: has other weights than adapters of linear layers: {', '.join(carried[:4])}. PEFT saves these for "
            "resized or adapted embeddings (save_embedding_layers) and for modules_to_save, and mrl would drop them: "
            "merge with PEFT's merge_and_unload"
        )
    wanted = {"A", "B"} | ({"magnitude"} if found.dora else set())
    unknown += [layer for layer, parts in layers.items() if parts.keys() != wanted]
    if unknown or not layers:
        raise WeightError(f"{file}: its tensors do not match {CONFIG}: {', '.join(unknown[:4]) or 'none'}")
    return AdapterFile(found, layers, whole)


def _metas(checkpoint: HFCheckpoint, file: AdapterFile, adapter: Path) -> list[TensorMeta]:
    """Returns the metas of the tensors to write, by name. A classifier has no output layer, but its base may have
    one.
    """
    problems, metas = [], []
    for layer, parts in file.layers.items():
        if f"{layer}.weight" not in checkpoint:
            problems.append(f"{checkpoint.path} has no {layer}.weight")
            continue
        here = checkpoint.source(f"{layer}.weight").shape
        problems += (f"{layer}: {misfit}" for misfit in _misfits(parts, file.config.rank, here))
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 4 else []
        raise WeightError(f"{adapter} does not fit the base weights: {'; '.join(problems[:4] + more)}")
    for name in checkpoint:
        if name not in file.whole and not (name == HF_OUTPUT and file.whole):
            source = checkpoint.source(name)
            metas.append(TensorMeta(name, source.shape, source.dtype, 0))
    return metas + [TensorMeta(name, tuple(whole.shape), whole.dtype, 0) for name, whole in file.whole.items()]


def _misfits(parts: Mapping[str, Tensor], rank: int, weight: tuple[int, ...]) -> Iterator[str]:
    """Yields mismatches between a layer's adapters and its weight [out, in]."""
    if len(weight) != 2:
        yield f"its weight {list(weight)} is not a linear layer's"
        return
    wanted = {"A": (rank, weight[1]), "B": (weight[0], rank), "magnitude": (weight[0],)}
    for part, tensor in parts.items():
        found = tuple((tensor.flatten() if part == "magnitude" else tensor).shape)
        if found != wanted[part]:
            yield f"{part} is {list(found)} instead of {list(wanted[part])}, for a weight {list(weight)} and r {rank}"


def _write(
    checkpoint: HFCheckpoint,
    file: AdapterFile,
    metas: list[TensorMeta],
    max_file_bytes: int,
    directory: Path,
    result: MergeReport,
    base: Path,
) -> None:
    digests: list[tuple[str, str]] = []
    files = plan_files(metas, max_file_bytes)
    for each in files:
        tensors = {}
        for meta in each.tensors:
            if meta.name in checkpoint:
                weight = checkpoint.source(meta.name)[:]
                digests.append((meta.name, tensor_digest(weight)))
            else:
                weight = torch.empty(0, dtype=meta.dtype)
            tensors[meta.name] = file.merged(meta.name, weight, result).contiguous()
            result.tensors += 1
        try:
            save_file(tensors, directory / each.name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{directory / each.name} cannot be written: {error}") from error
    if len(files) > 1:
        write_index(files, directory)
    left = [name for name in checkpoint if name not in {meta.name for meta in metas}]
    digests += [(name, tensor_digest(checkpoint.source(name)[:])) for name in left]
    if file.config.base_digest is not None and joined(digests) != file.config.base_digest:
        raise WeightError(
            f"{base} is not the base model of the adapters: its weights have the digest {joined(digests)[:12]}, and "
            f"the adapters were trained on {file.config.base_digest[:12]}: name their base model"
        )
    result.is_checked = file.config.base_digest is not None
