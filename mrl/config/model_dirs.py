"""Directories of converted models: what says that one is whole.

A converted model has what a Hugging Face directory has (config.json, tokenizer, ...), but its weights are Megatron's:
`latest_checkpointed_iteration.txt` names their directory, as in Megatron-LM. `complete` was written last and lists
every other file with its size. The standard library only: config checks read it before torch is imported.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from mrl.foreign import own_file, read_json

MANIFEST = "complete"
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
FORMAT, VERSION = "mrl-converted", 1


def is_converted(path: str | Path) -> bool:
    """Whether the weights of this directory are Megatron's, complete or not."""
    return (Path(path) / TRACKER).is_file() or (Path(path) / RELEASE).is_dir()


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Raises ValueError if the directory is not complete: no manifest, or a file of it that is missing or cut off."""
    marker = Path(path) / MANIFEST
    if not marker.is_file():
        raise ValueError(f"{path} is not complete: it has no file {MANIFEST!r}; convert it again")
    try:
        manifest: dict[str, Any] = read_json(marker)
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{marker} is not a list of files ({error!r})") from error
    wrong = [problem for name, size in files.items() if (problem := _problem(Path(path), name, size))]
    if wrong:
        raise ValueError(f"{path} is damaged: {'; '.join(wrong[:8])}{'; ...' if len(wrong) > 8 else ''}")
    return manifest


def read_converted(path: str | Path) -> dict[str, Any]:
    """The manifest of a converted model. Raises ValueError as `read_manifest`, and for another format or version."""
    manifest = read_manifest(path)
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} has format {found[0]} {found[1]}; this version of mrl reads {FORMAT} {VERSION}")
    keys = manifest.get("keys")
    named = isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values())
    if not named or manifest.get("role") not in ("policy", "critic"):
        raise ValueError(f"{Path(path) / MANIFEST} does not say the model's role and what its tensors are called")
    return manifest


def _problem(root: Path, name: str, size: int) -> str | None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return f"{MANIFEST} names {name!r}, outside of the directory"
    if not (root / name).is_file():
        return f"{name} is missing"
    try:
        own_file(root, name)
    except ValueError as error:
        return str(error)
    found = (root / name).stat().st_size
    return None if found == size else f"{name} has {found} bytes, {size} were written"
