"""Runs a command with one invalid input and returns its one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl import cli
from tests.helpers.bad_inputs import GOOD_ROW

RUN = """\
trainer: rl
run: {{name: never}}
model: {{path: {model}, from_scratch: true}}
data: {{train: rows.jsonl, max_prompt_tokens: 64, chat_template: {chat}}}
batch: {{prompts_per_step: 2}}
rollout: {{engine: transformers, sampling: {{max_new_tokens: 4}}}}
reward: {{function: {function}}}
algorithm: {{adv_estimator: reinforce_plus_plus}}
"""


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """Returns the one-line error that the user sees. For a configuration, it follows the heading."""
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    if code == cli.CONFIG_ERROR:
        assert lines.pop(0) == "1 problem in c.yaml:", err
    assert len(lines) == 1 and "Traceback" not in out + err, err
    assert err.isascii() or err.encode(), "cannot be shown"
    assert len(lines[0]) < 1000 and not Path("runs").exists()
    return lines[0]


def write_run(model: Path, rows: bytes = GOOD_ROW.encode(), function: str = "arithmetic", chat: bool = False) -> None:
    Path("c.yaml").write_text(RUN.format(model=model, function=function, chat=str(chat).lower()))
    Path("rows.jsonl").write_bytes(rows)
