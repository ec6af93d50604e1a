"""Data sets and reward functions of a script as files of its run: RUN_DIR/inputs.

Every rank of a script writes them, whole and with the same content. Checks, previews, fingerprints and resuming then
work as for files of a user's own.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.config.problems import ConfigError, Problem
from mrl.config.tree import Source, read
from mrl.files import make_private, replacing, write_atomically
from mrl.ports import is_a_rank

Rows = str | Path | Iterable[Mapping[str, Any]]
PICKLED = '''"""A function of the script that started this run, pickled by value. Written by mrl."""

import base64
import sys

import cloudpickle

sys.path += [entry for entry in {paths!r} if entry not in sys.path]  # for what the function imports
reward_fn = cloudpickle.loads(base64.b64decode({content!r}))
'''


def overrides(
    config: Source, reward_fn: Callable[..., Any] | str | None, train: Rows | None, validation: Rows | None
) -> list[str]:
    """Writes the inputs; returns the overrides that name them. Raises ConfigError."""
    if not (reward_fn is None or isinstance(reward_fn, str) or callable(reward_fn)):
        what = f"reward_fn must be one function, or its FILE.py:NAME, got {type(reward_fn).__name__}"
        raise ConfigError("config", [Problem(("reward.function",), f"{what}; reward.recipe adds up several")])
    rows = {"data.train": train, "data.validation": validation}
    names = {key: str(value) for key, value in rows.items() if isinstance(value, str | Path)}
    made = {key: value for key, value in rows.items() if value is not None and not isinstance(value, str | Path)}
    if isinstance(reward_fn, str):
        names["reward.function"] = reward_fn
    if (made or callable(reward_fn)) and (folder := _folder(config)) is not None:
        for key, value in made.items():
            names[key] = str(write_rows(value, folder / f"{key.removeprefix('data.')}.jsonl", key))
        if callable(reward_fn):
            names["reward.function"] = reward_spec(reward_fn, folder / "reward_fn.py")
    return [f"{key}={json.dumps(name)}" for key, name in names.items()]


def _folder(config: Source) -> Path | None:
    """Returns RUN_DIR/inputs, None if the configuration names no run, as its checks will report."""
    tree, _ = read(config)
    run = tree.plain().get("run") if tree is not None else None
    if not isinstance(run, Mapping) or not isinstance(run.get("name"), str):
        return None
    return make_folder(Path(str(run.get("root", "runs"))) / run["name"])


def make_folder(run_dir: Path) -> Path:
    """Creates RUN_DIR/inputs and returns it. Raises ConfigError while another run uses the directory."""
    if not is_a_rank() and (run_dir / "lock").exists():
        from mrl.observe.lock import is_owned

        if is_owned(run_dir / "lock"):
            raise _error("run.name", f"{run_dir} is in use by another run: stop it, or choose another name")
    make_private(run_dir)
    make_private(run_dir / "inputs")  # a configuration may hold keys, and ranks run what is in the directory
    return run_dir / "inputs"


def write_rows(rows: Iterable[Mapping[str, Any]], file: Path, key: str = "data.train") -> Path:
    """Writes rows as JSON lines; returns the absolute path of the file. Raises ConfigError."""
    with replacing(file) as temporary, temporary.open("w") as lines:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise _error(key, f"row {number} must be a dict, got {type(row).__name__}")
            try:
                lines.write(json.dumps(dict(row), default=_plain, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise _error(key, f"row {number} cannot be written as JSON: {error}") from error
    return file.absolute()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy or torch
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is neither text, number, list nor dict")


def reward_spec(function: Callable[..., Any], file: Path) -> str:
    """Returns FILE.py:NAME of a function: its own module's file, or `file`, which then gets its pickle."""
    module, name = sys.modules.get(function.__module__), getattr(function, "__name__", "")
    own = getattr(module, "__file__", None)
    is_importable = function.__module__ != "__main__" and "." not in function.__module__
    if is_importable and own is not None and own.endswith(".py") and vars(module).get(name) is function:
        return f"{Path(own).absolute()}:{name}"
    import cloudpickle

    content = base64.b64encode(cloudpickle.dumps(function)).decode()
    write_atomically(file, PICKLED.format(paths=[entry for entry in sys.path if entry], content=content))
    return f"{file.absolute()}:reward_fn"


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("config", [Problem((key,), message)])
