"""`mrl verify`: the comparison of a Hugging Face directory with a Megatron checkpoint, and its display."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mrl.directories import size_text
from mrl.families import load_arch
from mrl.families.table import Role
from mrl.parallel import Meshes
from mrl.weights.compare.logits import BOUND, LogitsDifference, compare_logits
from mrl.weights.compare.tensors import Comparison, TensorGroup, compare_tensors
from mrl.weights.disk.megatron_dirs import open_megatron
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.stored_names import stored_names
from mrl.weights.errors import WeightError

MAX_LISTED = 12
WIDTH = 160  # where there is no terminal


@dataclass(frozen=True)
class Verdict:
    """Result of `mrl verify`. logits: None if logits were skipped, or if the tensors differ."""

    hf: Path
    megatron: Path
    tensors: Comparison
    logits: LogitsDifference | None

    @property
    def same(self) -> bool:
        return self.tensors.equal and (self.logits is None or self.logits.close)

    def as_dict(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "hf": str(self.hf),
            "megatron": str(self.megatron),
            "groups": [{**asdict(group), "dtypes": sorted(group.dtypes)} for group in self.tensors.groups],
            "problems": list(self.tensors.problems),
            "logits": asdict(self.logits) if self.logits else None,
        }

    def show(self) -> None:
        """Prints a table, the differences, and the verdict to the terminal."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        table = Table(title=f"{self.hf} = {self.megatron}?", title_justify="left")
        for column in ("Megatron", "Hugging Face", "shape", "dtype", "bits"):
            table.add_column(column, overflow="fold")
        for group in self.tensors.groups:
            table.add_row(*_cells(group))
        console.print(table)
        wrong = [*self.tensors.problems, *(text for group in self.tensors.groups for text in group.different)]
        for text in wrong[:MAX_LISTED]:
            console.print(f"[red]{text}[/red]", highlight=False)
        if len(wrong) > MAX_LISTED:
            console.print(f"[red]and {len(wrong) - MAX_LISTED} more[/red]")
        console.print(self._line(), highlight=False)

    def _line(self) -> str:
        count = sum(group.tensors for group in self.tensors.groups)
        nbytes = sum(group.nbytes for group in self.tensors.groups)
        logits = "logits not compared"
        if self.logits is not None:
            how = "within" if self.logits.close else "[red]beyond[/red]"
            scale, error = self.logits.scale, self.logits.error
            logits = f"logits differ by {error:.1e}, {how} {BOUND:g} x their scale {scale:.3g}"
        head = "[green]the same model[/green]" if self.same else "[red]NOT the same model[/red]"
        return f"{head}: {count} tensors, {size_text(nbytes)}; {logits}"


def compare_models(
    hf: Path,
    megatron: Path,
    meshes: Meshes,
    *,
    part: str | None = None,
    model_files: Path | None = None,
    role: Role | None = None,
    allow_pickle: bool = False,
    skip_logits: bool = False,
) -> Verdict:
    """Compares tensors, then logits if the tensors are equal. Raises WeightError for unreadable models."""
    with open_megatron(megatron, part, model_files, role) as model:
        here = load_arch(hf)
        if (here.family, here.vocab_size) != (model.arch.family, model.arch.vocab_size):
            raise WeightError(f"{hf} is a {here.family} of {here.vocab_size} tokens, {megatron} a {model.arch.family} "
                              f"of {model.arch.vocab_size}")  # fmt: skip
        names = model.names if model.names.keys else stored_names(model.arch, str(hf), model.role, meshes)
        with HFCheckpoint(hf, allow_pickle) as checkpoint:
            tensors = compare_tensors(checkpoint, model, names, allow_pickle)
        logits = None
        if tensors.equal and not skip_logits:
            casts = [getattr(torch, name) for name in tensors.cast_to]
            logits = compare_logits(hf, model, meshes, casts[0] if casts else None)
        return Verdict(hf, megatron, tensors, logits)


def _cells(group: TensorGroup) -> tuple[str, ...]:
    shape = " ".join("x".join(map(str, s)) for s in dict.fromkeys(group.shapes))
    casts = ", ".join(a if a == b else f"{b} (of {a})" for a, b in sorted(group.dtypes))
    bits = f"[green]{group.tensors} equal[/green]"
    if not group.tensors:
        bits = "[red]not compared[/red]"
    elif group.different:
        bits = f"[red]{len(group.different)} of {group.tensors} differ[/red]"
    return group.name, "\n".join(group.hf), shape, casts, bits
