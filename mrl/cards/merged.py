"""Card of a model with merged adapters, made from the two directories alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mrl.cards.base_model import base_model, export_kind, tokenizer_facts
from mrl.cards.portable import last_part
from mrl.cards.text import STALE_DRAFTS, table, usage
from mrl.cards.write import CARD, sealed, without_card
from mrl.packages import versions
from mrl.weights.disk.digest import file_digests, weight_files, whole_digest


def merged_card(base: Path, adapter: Path, export: Path, target: Path, layers: int, rounding: float) -> str:
    """Writes README.md into `export`, which will become `target`; returns the reason if that fails, else "".

    layers: number with adapters; rounding: relative error that rounding causes in the adapters' contribution
    """
    try:
        text = _text(base, adapter, export, target, layers, rounding)
        (export / CARD).write_text(sealed(text), encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return without_card(export, target, error)
    return ""


def _text(base: Path, adapter: Path, export: Path, target: Path, layers: int, rounding: float) -> str:
    origin, kind, name = base_model(base), export_kind(export), last_part(str(adapter.resolve()))
    terms: dict[str, Any] = dict(origin.license)
    data = ModelCardData(
        base_model=origin.name,
        base_model_relation="merge",
        library_name="transformers",
        pipeline_tag=kind.task,
        tags=["mrl", "lora", "merge"],
        **terms,
    )
    weights = {
        "architecture": f"`{kind.architecture}`",
        "SHA-256": _digest(export),
        "base": f"`{origin.name}`" + (f", revision {origin.revision}" if origin.revision else ""),
        "SHA-256 of the base": _digest(base),
        "SHA-256 of the adapters": _digest(adapter),
        **tokenizer_facts(export),
    }
    made = {
        "merged": f"the adapters of {layers} layers, in float32, rounded once",
        "rounding": f"changed the adapters' contribution by {rounding:.1%} of its norm",
        "versions": ", ".join(f"{name} {version}" for name, version in versions("mrl", "torch").items()),
    }
    known = [] if origin.license else ["- The base model's directory states no license."]
    known += [f"- {STALE_DRAFTS}"] if kind.has_drafts else []
    parts = [
        f"---\n{data.to_yaml().strip()}\n---",
        f"# {target.resolve().name}",
        f"`{origin.name}` with the adapters `{name}` merged into its weights; see the adapters' own card.",
        "\n".join(usage(kind)),
        table("Weights", ("", ""), list(weights.items())),
        table("How it was made", ("", ""), list(made.items())),
        "\n".join(["## Known limits\n", *known]) if known else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _digest(directory: Path) -> str:
    files = weight_files(directory)
    how = " (of the output of `sha256sum *.safetensors`)" if len(files) > 1 else ""
    return f"`{whole_digest(file_digests(files))}`{how}"
