"""Directories of converted models, and the check that one is complete.

A converted model has the files of a Hugging Face directory (config.json, tokenizer, ...) and weights in Megatron
format. `latest_checkpointed_iteration.txt` names the directory of the weights, as in Megatron-LM. Uses the standard
library only: config checks read it before torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.directories import MANIFEST, read_manifest

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
FORMAT, VERSION = "mrl-converted", 1


def is_converted(path: str | Path) -> bool:
    """True if the directory has Megatron weights, complete or not."""
    return (Path(path) / TRACKER).is_file() or (Path(path) / RELEASE).is_dir()


def read_converted(path: str | Path) -> dict[str, Any]:
    """Returns the manifest of a converted model. Raises ValueError if it is incomplete or has another format."""
    manifest = read_manifest(Path(path), remedy="convert it again", format=FORMAT, version=VERSION)
    keys = manifest.get("keys")
    named = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    if not named or manifest.get("role") not in ("policy", "critic"):
        raise ValueError(f"{Path(path) / MANIFEST} lacks the model's role or its tensor names: convert it again")
    return manifest
