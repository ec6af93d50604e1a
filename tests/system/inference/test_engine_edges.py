"""SGLang in corner cases: stop strings after a weight sync by disk, and a context filled to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TinyModels
from tests.helpers.train_tools import Train, write_config

PROMPT, NEW = 8, 12


@pytest.mark.slow
def test_stop_strings_survive_a_push_by_disk_and_responses_fill_the_context(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """The engine's tokenizer survives a sync by disk. A response may fill the context, of which SGLang reserves a few
    tokens for itself."""
    config = write_config(
        tmp_path,
        tiny_models("llama"),
        data={"max_prompt_tokens": PROMPT, "truncation": "left"},
        rollout={
            "sampling": {"max_new_tokens": NEW, "stop": ["no such text"]},
            "max_context_tokens": PROMPT + NEW,
            "mismatch": {"stop_sample": None, "exact_sample": None},
        },
        sync={"transport": "disk"},
    )
    with Train(tmp_path, config, "run.steps=1") as run:
        assert run.wait(240) == 0, run.terminal[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_1.jsonl").open()]
    cut = [row["tokens"] for row in rows if row["finish_reason"] == "length"]
    assert len(rows) == 8 and cut and set(cut) == {NEW}
