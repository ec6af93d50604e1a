"""Upload of an export to the Hugging Face hub, by huggingface_hub's own command.

The command runs in a process of its own: it can be ended after a time-out, and its threads stay out of the trainer.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mrl.config.problems import printable, shortened
from mrl.config.schema import CheckpointConfig

LOG = "hub.log"  # in RUN_DIR/logs
POLL_S = 1.0
ERROR = "Error"  # in the line of the log that has the reason
ENVIRONMENT = {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_COLOR": "1"}


def push_to_hub(export: Path, cfg: CheckpointConfig, on_wait: Callable[[], None]) -> str:
    """Uploads an export with its model card; creates the repository if it does not exist.

    Args:
        export: Hugging Face directory, which stays as it is.
        cfg: has the repository, and the maximum seconds of the upload.
        on_wait: called about once a second.

    Returns:
        A note for the user. A failure does not raise: the note has its reason, and the command that repeats the upload.
    """
    assert cfg.push_to_hub is not None
    private = ["--private"] if cfg.hub_private else []
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", "upload", cfg.push_to_hub, str(export), ".", *private]
    log = export.parent / "logs" / LOG
    try:
        problem = _run(command, log, cfg.timeout_s, on_wait)
    except OSError as error:
        problem = str(error)
    if problem is None:
        return f"uploaded {export} to {cfg.push_to_hub} on the Hugging Face hub"
    return (
        f"{export} is complete, but not uploaded to {cfg.push_to_hub}: {problem}; see {log}. Repeat the upload with: "
        f"{shlex.join(command)}"
    )


def _run(command: list[str], log: Path, timeout_s: float, on_wait: Callable[[], None]) -> str | None:
    """Returns why the command failed; None if it succeeded."""
    end, environment = time.monotonic() + timeout_s, {**os.environ, **ENVIRONMENT}
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                return f"not finished within {timeout_s:g} s (checkpoint.timeout_s)"
            on_wait()
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode == 0:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if ERROR in line]
    return printable(shortened(lines[-1].strip(), most=300)) if lines else f"exit code {process.returncode}"
