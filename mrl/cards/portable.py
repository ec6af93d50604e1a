"""Public form of a configuration: without directories of a machine, addresses, or names of owners."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from mrl.redaction import redact_tree

_PATH = re.compile(r"^(~|/|\.{1,2}/|[A-Za-z]:\\)")
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{7,40})/?$")  # path in the hub's cache
_ADDRESS = re.compile(r"^[a-zA-Z][\w+.-]*://")
# keys of a run's place, not of its method
OF_THE_MACHINE = (
    *("root", "urls", "servers", "url", "uri", "api_key_file", "wandb", "mlflow", "trackio", "swanlab", "push_to_hub"),
)
PATHS = ("path", "function", "train", "validation")  # keys of files and directories


def portable(value: Any, key: str = "") -> Any:
    """Returns `value` without passwords and addresses; a path keeps its last part, a user's `file.py:name` the file."""
    return _without(redact_tree(value), key)


def hub_name(path: str) -> tuple[str, str] | None:
    """Returns (owner/name, revision) of a directory in the hub's cache, else None."""
    found = _SNAPSHOT.search(path)
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def last_part(path: str) -> str:
    """Returns the last part of a path of any system; the model's name for a path in the hub's cache."""
    if found := hub_name(path):
        return found[0]
    return PurePosixPath(path.replace("\\", "/")).name


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {_text(name, ""): _without(inner, name) for name, inner in value.items() if name not in OF_THE_MACHINE}
    if isinstance(value, list):
        return [_without(inner, key) for inner in value]
    return _text(value, key) if isinstance(value, str) else value


def _text(text: str, key: str) -> str:
    if _ADDRESS.match(text):
        return "(an address)"
    return last_part(text) if key in PATHS or _PATH.match(text) else text
