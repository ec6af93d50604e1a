"""The lm_head in emulated fp8 in a complete run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers import zygote
from tests.helpers.tiny import make_tiny

SFT = """\
trainer: sft
run: {name: one, steps: 2, nproc: 1}
model: {path: tiny, dtype: float32}
actor: {precision: {fp8: {recipe: current, emulate: true, head: true}}}
data: {train: train.jsonl, max_prompt_tokens: 64}
batch: {samples_per_step: 4}
"""


def test_a_run_reports_the_error_of_its_head_with_every_step(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", "qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.05)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sft.yaml").write_text(SFT)
    made = zygote.run("mrl", "train", "sft.yaml", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    steps = [json.loads(line) for line in (tmp_path / "runs" / "one" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert 1e-3 < step["actor/head_error_mean"] < step["actor/head_error_max"] < 0.5
