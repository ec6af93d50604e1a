"""Provides the one SGLang model that is served. If it is not found, SGLang imports all of its models as usual."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

MODELS = "sglang.srt.models"


def served(command: list[str]) -> list[Any]:
    """The class for what config.json of `--model-path` calls its architecture, from the one file that defines it."""
    if "--model-path" not in command:
        return []
    config = json.loads(Path(command[command.index("--model-path") + 1], "config.json").read_text())
    return [found for name in config["architectures"] for found in _classes(name)]


def _classes(name: str) -> list[Any]:
    spec = importlib.util.find_spec(MODELS)
    folders = spec.submodule_search_locations if spec is not None else ()
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.py"))]
    defined = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE)
    modules = [importlib.import_module(f"{MODELS}.{file.stem}") for file in files if defined.search(file.read_text())]
    entries = [getattr(module, "EntryClass", []) for module in modules]
    classes = [found for entry in entries for found in (entry if isinstance(entry, list) else [entry])]
    return [found for found in classes if found.__name__ == name]


EntryClass = served(sys.argv)
