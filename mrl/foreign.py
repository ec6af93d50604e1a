"""Reads files of foreign origin in bounded time, and never from outside of their directory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.strict_json import unique_keys

MAX_JSON_BYTES = 256 << 20
NAMED_WEIGHTS = 5  # missing weights named at most
TEMPLATES = "additional_chat_templates"  # the one folder that belongs to a model's own files


class MalformedFile(ValueError):
    """A file of foreign origin does not have the expected form, or is not a regular file of its directory."""


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file.

    Raises OSError, or MalformedFile in one line that names the file: not JSON, too large, nested too deeply, a
    duplicate key, or not a regular file (a pipe would block).
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise MalformedFile(f"{file} is not a regular file")
    if found.st_size > MAX_JSON_BYTES:
        raise MalformedFile(f"{file} has {found.st_size} bytes; mrl reads JSON files of at most {MAX_JSON_BYTES}")
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise MalformedFile(f"{file} cannot be read as JSON: {error}") from error


def parse_json(text: bytes) -> Any:
    """Returns the parsed JSON. Raises ValueError in the cases of `read_json`."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte 0x{text[error.start]:02x} at position {error.start + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def complete(loaded: tuple[Any, Mapping[str, Any]], folder: str | Path) -> Any:
    """Returns the model that diffusers or transformers loaded with its `output_loading_info`.

    Raises ValueError if files of the folder lack weights, which the libraries would leave at their initial values.
    """
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        named = ", ".join(missing[:NAMED_WEIGHTS]) + (", ..." if len(missing) > NAMED_WEIGHTS else "")
        raise ValueError(f"{folder} lacks {len(missing)} weights of a {type(model).__name__}: {named}")
    return model


def own_file(directory: Path, name: str | Path) -> Path:
    """Returns directory / name. Raises ValueError if that is a link out of the directory.

    Links of a Hugging Face cache are allowed: snapshots/COMMIT/name -> blobs/HASH of the same model.
    """
    file, root = directory / name, Path(os.path.realpath(directory))
    real = Path(os.path.realpath(file))
    in_cache = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not (in_cache or real.is_relative_to(root)):
        raise MalformedFile(f"{file} is a link to {real}, outside of the directory: copy the file itself there")
    return file


def check_links(directory: Path) -> None:
    """Raises ValueError if a file of a model's directory is a link out of it."""
    for file in [*directory.iterdir(), *directory.glob(f"{TEMPLATES}/*")]:
        if not file.is_dir():
            own_file(directory, file.relative_to(directory))
