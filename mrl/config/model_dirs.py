"""Directories of converted models: what says that one is whole.

A converted model has what a Hugging Face directory has (config.json, tokenizer, ...), but its weights are Megatron's:
`latest_checkpointed_iteration.txt` names their directory, as in Megatron-LM. The standard library only: config checks
read it before torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.directories import MANIFEST, read_manifest

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
FORMAT, VERSION = "mrl-converted", 1


def is_converted(path: str | Path) -> bool:
    """Whether the weights of this directory are Megatron's, complete or not."""
    return (Path(path) / TRACKER).is_file() or (Path(path) / RELEASE).is_dir()


def read_converted(path: str | Path) -> dict[str, Any]:
    """The manifest of a converted model. Raises ValueError for one that is not whole or of another format."""
    manifest = read_manifest(Path(path), remedy="convert it again", format=FORMAT, version=VERSION)
    keys = manifest.get("keys")
    named = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    if not named or manifest.get("role") not in ("policy", "critic"):
        raise ValueError(f"{Path(path) / MANIFEST} lacks the model's role or its tensor names: convert it again")
    return manifest
