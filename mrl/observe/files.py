"""Files of a run directory: JSON lines and the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from mrl import strict_json
from mrl.files import write_atomically

PLAN, RANKS = "plan.json", "ranks.svg"  # the run's plan, and a diagram of its ranks
METRICS = "metrics.jsonl"  # one line a step, like the next ones
ENGINES = "engines.jsonl"  # load of each engine
STRAGGLERS = "stragglers.jsonl"  # the ranks' times
NONFINITE = "nonfinite.jsonl"  # the samples of skipped updates
LEFT_OUT = "left_out.jsonl"  # agent samples left out (agent.on_error), with tracebacks
BY_STEP = (METRICS, ENGINES, STRAGGLERS, NONFINITE, LEFT_OUT)
DATA_NOTES = "data_notes.json"  # rows left out or cut, one sentence each
_SECTIONS = ("run", "model", "data", "batch", "algorithm")  # sections read here


class WriteFailed(OSError):
    """A file of the run could not be written; no partial content is left."""


class UnreadableFile(ValueError):
    """A file of a run directory does not have the format that runs write."""


def read_data_notes(run_dir: Path) -> list[str]:
    """Returns the run's notes on its rows; empty if the file is missing or malformed."""
    try:
        found = json.loads((run_dir / DATA_NOTES).read_bytes())
    except (OSError, ValueError):
        return []
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def write_guarded(what: str, write: Callable[[], object], on_error: str, note: Callable[[str], None]) -> None:
    """Calls `write`. If that fails (disk full), raises WriteFailed, or notes it with checkpoint.on_error: warn."""
    try:
        write()
    except OSError as error:
        text = f"{what} cannot be written: {error.strerror or error}"
        if on_error == "stop":
            raise WriteFailed(f"{text} (checkpoint.on_error: warn would continue without it)") from error
        note(f"{text}; training continues (checkpoint.on_error: warn)")


def write_jsonl(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one line a row. NaN and infinities become text, since JSON has no numbers for them."""
    lines = (strict_json.dumps(strict_json.finite(row), ensure_ascii=False, default=str) + "\n" for row in rows)
    write_atomically(file, "".join(lines))


def append_jsonl(file: Path, row: dict[str, Any]) -> None:
    """Appends one line, after removing a partial line of a killed process. NaN and infinities become text."""
    drop_torn_line(file)
    append(file, strict_json.dumps(strict_json.finite(row)) + "\n")


def append(file: Path, content: str | bytes) -> None:
    """Appends all of the content or, if that fails (disk full), nothing. Raises OSError."""
    with file.open("ab", buffering=0) as handle:
        end, data = handle.tell(), content.encode() if isinstance(content, str) else content
        try:
            while data:
                data = data[handle.write(data) or 0 :]
        except OSError:
            handle.truncate(end)
            raise


def drop_torn_line(file: Path) -> None:
    """Removes a partial last line of a killed run, so that the next line does not join it."""
    if not file.is_file():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        with file.open("r+b") as handle:
            handle.truncate(data.rfind(b"\n") + 1)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Returns all rows, without a last line that is still being written; empty without a file. Raises
    UnreadableFile."""
    if not file.is_file():
        return []
    lines = enumerate(file.read_bytes().split(b"\n")[:-1], 1)
    return [row for number, line in lines if (row := json_row(file, number, line))]


def json_row(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line; empty for an empty line. Raises UnreadableFile, which names file and line."""
    try:
        row = json.loads(line.strip() or b"{}")
    except ValueError as error:
        raise UnreadableFile(f"{file}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UnreadableFile(f"{file}:{number}: expected a JSON object")
    return row


def numbered_files(folder: Path, name: str) -> list[tuple[int, Path]]:
    """Returns (number, file), sorted by number, of the folder's files named `name` with digits in place of its `*`."""
    pattern = re.compile(re.escape(name).replace(r"\*", "([0-9]+)"))
    return sorted((int(match[1]), file) for file in folder.glob(name) if (match := pattern.fullmatch(file.name)))


def adapter_names(config: dict[str, Any]) -> list[str]:
    """Returns the names of a parsed config.yaml's `adapters`; empty if the run does not train several."""
    found = config.get("adapters")
    return [*found] if isinstance(found, dict) else []


def read_config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Returns RUN_DIR/config.yaml as text and parsed; both empty if there is none. Raises UnreadableFile."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return "", {}
    try:
        text = file.read_bytes().decode()
        config = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2020-13-45 is a ValueError
        raise UnreadableFile(f"{file}: not valid YAML of a run: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or not all(isinstance(config.get(name, {}), dict) for name in _SECTIONS):
        raise UnreadableFile(f"{file}: expected a mapping of sections such as {', '.join(_SECTIONS)}")
    return text, config
