"""Environments of the package verifiers by name: `verifiers:NAME?key=value`.

NAME is that of an installed environment: a module with a function `load_environment`, which takes the keys. Making an
environment runs its code and sets signal handlers, so its rows are read by a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrl.config.reasoning_tasks import parse_settings
from mrl.packages import pip_install_extra

PREFIX = "verifiers:"
SPLITS = ("train", "eval")  # the first is the default
LOAD_TIMEOUT_S = 600.0


def is_environment(name: str) -> bool:
    """Returns True for the name of an environment, in place of a path."""
    return name.startswith(PREFIX)


def name_problem(name: str) -> str | None:
    """Returns why no environment has this name, as far as that is known without running its code; None if one may."""
    try:
        environment, _ = _parsed(name)
        if find_spec("verifiers") is None:
            return f"the package verifiers is not installed: {pip_install_extra('verifiers')}"
        if find_spec(_module(environment)) is None:
            return f"there is no module {_module(environment)}: install the package of the environment {environment!r}"
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def module_file(name: str) -> str:
    """Returns the file of an environment's module; empty if there is none."""
    found = find_spec(_module(_parsed(name)[0]))
    return found.origin or "" if found is not None else ""


def load(name: str) -> Any:
    """Returns the environment, a `verifiers.Environment`. For a process of its own. Raises ValueError, which says why
    it cannot be used.
    """
    if problem := name_problem(name):
        raise ValueError(problem)
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
    import verifiers

    environment, settings = _parsed(name)
    try:
        return verifiers.load_environment(environment, **settings)
    except Exception as error:  # from its code
        cause = error.__cause__ or error
        raise ValueError(f"load_environment failed: {type(cause).__name__}: {cause}") from error


@cache
def rows(name: str, split: str | None) -> list[dict[str, Any]]:
    """Returns the rows of the environment's own data set. Raises ValueError, which says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-P", "-m", __name__, name, split or SPLITS[0], str(file)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the environment was not loaded within {LOAD_TIMEOUT_S:g} s") from None
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise ValueError(lines[-1] if lines else f"its process ended with exit code {done.returncode}")
        return [json.loads(line) for line in file.read_bytes().splitlines()]


def main() -> None:
    """Writes the rows of an environment as JSON lines: NAME SPLIT FILE."""
    name, split, file = sys.argv[1:]
    try:
        with open(file, "w") as out:
            out.writelines(f"{json.dumps(row)}\n" for row in _data_set(load(name), split))
    except (ValueError, TypeError) as error:
        sys.exit(" ".join(str(error).split()))
    os._exit(0)  # without the environment's own clean-up, which may wait for services


def _data_set(environment: Any, split: str) -> Any:
    if split == "train":
        return environment.get_dataset()
    if environment.build_eval_dataset() is None:  # get_eval_dataset would return the training rows
        raise ValueError("the environment has no eval data: validate on other rows, or on none")
    return environment.get_eval_dataset()


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    environment, _, query = name.removeprefix(PREFIX).partition("?")
    if not environment.rpartition("/")[2].replace("-", "_").isidentifier():
        raise ValueError(f"{environment!r} is not the name of an environment: write {PREFIX}NAME?key=value")
    return environment, parse_settings(query)


def _module(environment: str) -> str:
    return environment.rpartition("/")[2].replace("-", "_")


if __name__ == "__main__":
    main()
