"""The stages of `make test-gpu`: on a GPU as they are, on a CPU as a rehearsal, so that no typo waits for a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.slow import RUN_SLOW, slow_cases
from tools.gpu import run, support
from tools.gpu.stage import ROOT, STAGES, Failed, Setting, checks_of
from tools.gpu.trained import environment, run_train

pytestmark = pytest.mark.long

# test_ranks_on_one_device rehearses the stage `ranks`
REHEARSED = tuple(stage for stage in STAGES if stage != "ranks") if RUN_SLOW else ("speed",)
# what a rehearsal can only look at, and why
NOT_REHEARSED = re.compile(
    "a rehearsal (looks at one family|reads its configuration alone|has one kind of layer|has no triton)"
    "|the model is not made"
)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage(stage: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu.stage", str(tmp_path / "lines"), str(tmp_path / "work"), stage]
    found = run.run_stage(stage, command, tmp_path / "lines", run.LIMITS_S[stage])
    assert found.verdict in ("passed", "skipped"), run.summary(found)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """check -> its line, of all stages that are rehearsed, in one process that sees no GPU."""
    work = tmp_path_factory.mktemp("stages")
    lines = work / "lines"
    command = [sys.executable, "-m", "tools.gpu.stage", str(lines), str(work / "work"), "--rehearse", *REHEARSED]
    hidden = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    stage, found = "", {}
    for row in map(json.loads, lines.read_text().splitlines()):
        stage = row.get("stage", stage)
        if row.get("verdict") not in (None, "begun"):
            found[f"{stage}: {row['check']}"] = row
    yield found


def test_stages_are_rehearsed_without_a_gpu(rehearsal: dict[str, dict[str, Any]]) -> None:
    failed = {name: row for name, row in rehearsal.items() if row["verdict"] == "failed"}
    assert not failed
    skipped = {name: row["reason"] for name, row in rehearsal.items() if row["verdict"] == "skipped"}
    other = {name: why for name, why in skipped.items() if not NOT_REHEARSED.match(why)}
    assert not other
    assert {name.partition(":")[0] for name in rehearsal} == set(REHEARSED)


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"(?s)quickstart_sft ended with exit code 2.*run.steps"):
        run_train(Setting(tmp_path), "short", "quickstart_sft", ["run.steps=0"], 60.0)


@pytest.mark.parametrize(
    ("check", "number"),
    [
        *slow_cases(
            ("cuda: bfloat16 is near, local layers: qwen3_moe", "actor gradients"),
            ("cuda: the same bits again with run.deterministic", "differences"),
            ("fp8: casts are the emulation's: blockwise", "gradient"),
            ("fp8: the loss head is the emulation's: mxfp8", "log-probs"),
        ),
        ("speed: head, forward and backward", "ratio"),
        ("speed: advantages and loss of 8M tokens", "GAE us"),
        ("speed: update of a 0.6B model, local layers", "tokens/s"),
        ("speed: trainer's side of a push", "of a copy"),
    ],
)
def test_a_rehearsal_computes(check: str, number: str, rehearsal: dict[str, dict[str, Any]]) -> None:
    row = rehearsal[check]
    assert row["verdict"] == "passed" and isinstance(row["numbers"][number], float | int), row


def test_the_table_of_support_is_that_of_the_committed_results() -> None:
    page = support.PAGE.read_text()
    assert support.filled(page, support.read()) == page, "python -m tools.gpu.support writes it"


def test_a_proof_names_checks_that_there_are() -> None:
    checks = {stage: list(checks_of(stage)) for stage in STAGES}
    for row, (stage, beginnings) in support.PROOFS.items():
        for beginning in beginnings:
            assert any(name.startswith(beginning) for name in checks[stage]), row


def test_the_table_names_tests_that_there_are() -> None:
    named = set(re.findall(r"`(test_\w+)`", support.PAGE.read_text()))
    assert named and named <= {file.stem for file in (ROOT / "tests").rglob("test_*.py")}


def test_a_row_that_names_families_is_tested_when_theirs_have_passed() -> None:
    """And says what the oldest of its checks passed on."""
    of = {"card": "Old", "date": "2030-01-01", "commit": "a" * 40}
    names = [f"{kind}: {family}" for kind in ("float32 is the CPU's", "bfloat16 is near, local layers")
             for family in ("olmo2", "olmo3")]  # fmt: skip
    checks = [{"check": name, "verdict": "passed"} for name in names]
    checks[1]["of"] = of  # type: ignore[assignment]
    found = {"cuda": {"card": "New", "date": "2030-01-02", "commit": "b" * 40, "checks": checks}}
    assert support.cell("OLMo (`olmo2`, `olmo3`): norms", found) == "Old, 2030-01-01, aaaaaaaaa"
    checks[3]["verdict"] = "failed"
    assert support.cell("OLMo (`olmo2`, `olmo3`): norms", found) == "failed (2030-01-02)"


def test_tables_without_that_column_are_left_alone() -> None:
    page = support.PAGE.read_text()
    other = "\n\n| a | b | c |\n|---|---|---|\n| one | two | three |\n"
    assert support.filled(page + other, support.read()).endswith(other)


def test_a_row_is_tested_when_all_its_checks_have_passed() -> None:
    def cell(*verdicts: str) -> str:
        checks = [{"check": f"float32 is the CPU's: {i}", "verdict": verdict} for i, verdict in enumerate(verdicts)]
        other = {"check": "resume", "verdict": "failed"}
        found = {"card": "Card", "date": "2030-01-02", "commit": "0123456789abcdef", "checks": [*checks, other]}
        return support.cell("float32", {"cuda": found})

    assert cell("passed", "passed") == "Card, 2030-01-02, 012345678"
    assert cell("passed", "failed") == "failed (2030-01-02)"
    assert cell("passed", "skipped") == cell("passed", "not run") == cell() == support.NOT_YET
    assert support.cell("several machines", {}) == support.NOT_YET
    cut = {"check": "resume", "verdict": "failed", "reason": "the stage's 9 s were over"}
    assert support.cell("checkpoints, resume", {"cuda": {"date": "2030-01-02", "checks": [cut]}}) == support.NOT_YET
    page = support.PAGE.read_text()
    for row in support.PROOFS:
        with pytest.raises(ValueError, match="no row of the table"):
            support.filled(page.replace(f"| {row} |", "| gone |"), {})
