"""Files of a run: directory and lock, metrics, display, samples, report."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import socket
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mrl.cli import main
from mrl.config.schema import SFTConfig
from mrl.core import Prompt, Request, Sample, StepStats
from mrl.files import write_atomically
from mrl.observe import (
    Recorder,
    RunDir,
    RunLocked,
    SilentRecorder,
    before_after_table,
    follow_run,
    read_metrics,
    sample_row,
    save_pictures,
    save_samples,
    trackers,
    write_report,
)
from mrl.observe.curves import charts_of, draw, moving_mean, to_bytes
from mrl.observe.lock import Lock
from mrl.observe.progress import LiveDisplay, PlainDisplay, Progress, headlines
from mrl.observe.report import image_grids
from mrl.observe.samples import before_after
from mrl.observe.timeline import TimelineBar, draw_timeline, timeline_bars


def config(root: Path) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "trainer": "sft",
            "run": {"name": "one", "root": str(root), "steps": 3},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl", "answer_key": "solution"},
            "batch": {"samples_per_step": 4},
        }
    )


def test_run_dir_has_its_folders_and_the_resolved_config(tmp_path: Path) -> None:
    with RunDir.open(config(tmp_path)) as run_dir:
        assert run_dir.path == tmp_path / "one"
        assert {p.name for p in run_dir.path.iterdir()} == {"logs", "rollouts", "checkpoints", "config.yaml", "lock"}
        saved = yaml.safe_load((run_dir.path / "config.yaml").read_text())
    assert saved["data"]["answer_key"] == "solution"
    assert saved["actor"]["optimizer"]["lr"] == 1e-6
    assert not (tmp_path / "one" / "lock").exists()
    RunDir.open(config(tmp_path)).close()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    lock = Lock(file)
    owner = json.loads(file.read_text())
    lock.release()
    file.write_text(json.dumps(owner | {"born": "1"}))
    Lock(file).release()


def test_an_owner_on_another_host_lives_by_its_heartbeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lock"
    file.write_text(json.dumps({"host": "elsewhere", "pid": 7, "born": "1"}))
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            file.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunLocked, match="in use by process 7 on elsewhere"):
            Lock(file, silence_s=20)
    finally:
        stop.set()
        thread.join()
    assert "process 7 on elsewhere" in capsys.readouterr().out
    lock = Lock(file, silence_s=0.3)
    assert json.loads(file.read_text())["host"] == socket.gethostname()
    lock.release()


def test_the_lock_beats_and_leaves_a_successor_alone(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    lock = Lock(file, heartbeat_s=0.02)
    first = file.stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while file.stat().st_mtime_ns == first:
        assert time.monotonic() < deadline, "no heart-beat"
        time.sleep(0.02)
    write_atomically(file, json.dumps({"host": "elsewhere", "pid": 7, "born": "1"}))
    lock.release()
    assert json.loads(file.read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("content", [b"", bytes(120)])
def test_what_a_crash_leaves_of_a_lock_is_nobody_s(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lock"
    file.write_bytes(content)
    lock = Lock(file)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    assert f"{file} is empty, probably after a crash" in capsys.readouterr().out
    lock.release()


def test_a_foreign_file_in_the_place_of_the_lock_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    for content in (b"notes", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(RunLocked, match="not a lock file"):
            Lock(file)
        assert file.read_bytes() == content


def record(run_dir: Path, steps: int = 3) -> None:
    with Recorder(run_dir, steps, live=False) as recorder:
        for step in range(1, steps + 1):
            stats = StepStats(step, {"reward/mean": 0.1 * step, "perf/tokens_per_s": 1000.0, "actor/ppo_kl": 0.01})
            with recorder.phase("rollout", stats):
                pass
            with recorder.phase("update", stats):
                pass
            recorder.log(stats)


def record_bare(run_dir: Path, steps: int = 3) -> None:
    """Logs steps without metrics to plot."""
    with Recorder(run_dir, steps, live=False) as recorder:
        for step in range(1, steps + 1):
            recorder.log(StepStats(step))


def test_recorder_writes_a_line_a_step_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path, 2, live=False) as recorder:
        stats = StepStats(1, {"reward/mean": 0.5})
        with recorder.phase("rollout", stats):
            time.sleep(0.02)
        with recorder.phase("rollout", stats):
            time.sleep(0.02)
        recorder.log(stats)
        on_disk = json.loads((tmp_path / "metrics.jsonl").read_text())  # flushed before close
        recorder.note("[bold]a note[/bold]")
    assert on_disk["step"] == 1 and on_disk["reward/mean"] == 0.5
    assert 0.04 <= on_disk["time/rollout"] < 10
    out = capsys.readouterr().out
    assert re.search(r"step 1/2 \| reward 0\.500 \| rollout \d+\.\ds", out), out
    assert "[bold]a note[/bold]" in out


def test_not_a_number_is_null_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path, 1, live=False) as recorder:
        recorder.log(StepStats(1, {"actor/grad_norm": math.nan, "critic/loss": math.inf, "reward/mean": 1.0}))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["actor/grad_norm"] is None
    assert (
        "step 1: not finite, written as null to metrics.jsonl: actor/grad_norm, critic/loss" in capsys.readouterr().out
    )
    [row] = read_metrics(tmp_path)
    assert "actor/grad_norm" not in row and row["reward/mean"] == 1.0


def test_a_phase_that_fails_is_timed_and_the_error_passes(tmp_path: Path) -> None:
    for recorder in (Recorder(tmp_path, 1, live=False), SilentRecorder()):
        stats = StepStats(1)
        with pytest.raises(KeyError), recorder.phase("update", stats):
            raise KeyError("x")
        assert stats.seconds["update"] >= 0


def test_a_continued_run_replaces_the_abandoned_steps(tmp_path: Path) -> None:
    record(tmp_path, steps=5)
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 6, "rew')  # as if killed while writing
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with Recorder(tmp_path, 9, live=False) as recorder:
        recorder.log(StepStats(3, {"reward/mean": 9.0}))
        recorder.log(StepStats(4, {"reward/mean": 9.5}))
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["reward/mean"] for row in rows][2:] == [9.0, 9.5]


def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Recorder(tmp_path, 2, trackers.make(config(tmp_path), tmp_path), live=False) as recorder:
        for step in (1, 2):
            recorder.log(StepStats(step, {"reward/mean": step / 4}, {"rollout": 1.5}))
    loaded = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in loaded.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert loaded.Scalars("time/rollout")[0].value == 1.5


def drawn(display: LiveDisplay) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(display.render())
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_long_phase_is_told_by_the_clock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.observe.progress.PLAIN_TICK_S", 0.06)
    progress, out = Progress(3), StringIO()
    progress.enter("rollout")
    progress.expected = 96
    display = PlainDisplay(progress, Console(file=out))
    try:
        deadline = time.monotonic() + 20
        while "rollout: 0/96 after" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "rollout: 0/96 after" in out.getvalue(), "although no response has come"
    finally:
        display.close()


def test_a_step_of_rl_is_shown_with_truncation_and_without_the_loss_of_a_policy_gradient() -> None:
    shown = dict(headlines({"reward/mean": 0.5, "actor/loss": 1e-9, "actor/pg_loss": 1e-9, "response/truncated": 0.86}))
    assert shown == {"reward": "0.500", "truncated": "86%"}
    assert dict(headlines({"actor/loss": 1.5})) == {"loss": "1.5000"}


def test_live_display_shows_the_run_and_the_phase() -> None:
    progress = Progress(200)
    display = LiveDisplay(progress, Console(file=StringIO(), force_terminal=True, width=120))
    try:
        assert "step 0 of 200" in drawn(display)
        progress.step_done(
            StepStats(7, {"reward/mean": 0.4125, "critic/explained_variance": 0.5}, {"rollout": 3.0, "update": 1.0})
        )
        progress.enter("rollout")
        progress.finished, progress.expected = 130, 512
        text = drawn(display)
    finally:
        display.close()
    for part in ("step 7 of 200", "reward 0.412", "explained variance 0.50", "130/512", "rollout 3.00s (75%)"):
        assert part in text


def test_advance_counts_the_samples_of_a_phase(tmp_path: Path) -> None:
    with Recorder(tmp_path, 1, live=False) as recorder, recorder.phase("rollout"):
        recorder.expect(2001)
        for _ in range(250):
            recorder.advance(8)
        assert recorder._progress.finished == 2000


def sample(i: int, response: str, score: float) -> Sample:
    prompt = Prompt(i, (1, 2), {"solution": f"s{i}"}, text=f"<p{i}>=")
    return Sample(Request(i, i, prompt, 0), [5, 6, 7], [-1.0] * 3, "stop", "v3", response, score, {"exact": score})


def save_validations(run_dir: Path) -> None:
    (run_dir / "rollouts").mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("run: {steps: 3}\ndata: {answer_key: solution}\n")
    for step, samples in {
        0: [sample(0, "wrong", 0.0), sample(1, "half", 0.5)],
        9: [sample(0, "other", 0.0), sample(1, "other", 0.0)],
        10: [sample(1, "right", 1.0), sample(0, "<b>good</b>", 1.0)],
    }.items():
        save_samples(run_dir, f"validation_step_{step}", map(sample_row, samples))


def test_saved_samples_are_readable(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    file = save_samples(tmp_path, "step_4", map(sample_row, [sample(0, "a\nb", 0.25)]))
    assert file == tmp_path / "rollouts" / "step_4.jsonl"
    row = json.loads(file.read_text())
    assert (row["prompt"], row["response"], row["score"], row["parts"]) == ("<p0>=", "a\nb", 0.25, {"exact": 0.25})
    assert row["tokens"] == 3 and row["weight_version"] == "v3"


def test_the_page_shows_the_pictures_of_validation_prompts(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    for step in (0, 3):
        seen = sample(0, "three", 1.0)
        prompt = replace(seen.request.prompt, pictures=(b"\x89PNG first", b"\x89PNG second"))
        shown = replace(seen, request=replace(seen.request, prompt=prompt))
        save_samples(tmp_path, f"validation_step_{step}", [sample_row(shown)])
        save_pictures(tmp_path, [shown])
    found = before_after(tmp_path)[""]
    assert [file.name for file in found.rows[0].pictures] == ["0_0.png", "0_1.png"]
    text = write_report(tmp_path).read_text()
    assert text.count("data:image/png;base64,iVBORyBmaXJzdA") + text.count("data:image/png;base64,iVBORyBzZWNvbmQ") == 2
    assert "PNG" not in (tmp_path / "rollouts/validation_step_0.jsonl").read_text()


def test_before_and_after_compare_the_same_prompts(tmp_path: Path) -> None:
    assert before_after(tmp_path) == {}
    save_validations(tmp_path)
    found = before_after(tmp_path)[""]
    assert (found.first_step, found.last_step, found.mean_before, found.mean_after) == (0, 10, 0.25, 1.0)
    assert [(r.prompt, r.answer, r.before, r.after) for r in found.rows] == [
        ("<p0>=", "s0", "wrong", "<b>good</b>"),
        ("<p1>=", "s1", "half", "right"),
    ]
    console = Console(file=StringIO(), width=120)
    before_after_table(tmp_path, console=console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "0.250 → 1.000" in text and "wrong  (0.00)" in text and "right  (1.00)" in text


def test_a_run_of_several_adapters_shows_each_one(tmp_path: Path) -> None:
    """Curves, first and last values and answers of each adapter; each may have its own section `data`."""
    config = {"data": {"answer_key": "solution"}, "adapters": {"math": {}, "code": {"data": {"answer_key": "tests"}}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [{"step": step, "math/reward/mean": 0.1 * step, "code/reward/mean": 0.05 * step} for step in (1, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("math", "code"):
        (tmp_path / "adapters" / name / "rollouts").mkdir(parents=True)
        save_validations(tmp_path / "adapters" / name)
    assert [(name, len(found.rows)) for name, found in before_after(tmp_path).items()] == [("math", 2), ("code", 2)]
    assert [found.rows[0].answer for found in before_after(tmp_path).values()] == ["s0", ""]
    page = write_report(tmp_path).read_text()
    for shown in ("math: training reward", "0.100 → 1.000", "code: training reward", "0.050 → 0.500"):
        assert shown in page
    assert page.count("Validation prompts before and after training") == 2
    assert (tmp_path / "reward_curve.png").exists()


def test_no_adapter_is_missing_from_a_curve() -> None:
    """There are more lines than colors."""
    names = [f"adapter_{i}" for i in range(12)]
    rows = [{"step": step} | {f"{name}/reward/mean": i + step for i, name in enumerate(names)} for step in (1, 2)]
    figure = draw(charts_of(names)[0], rows)
    assert figure is not None and len(figure.axes[0].get_lines()) == 12


def test_a_trajectory_is_shown_turn_by_turn_with_its_environments_words_apart(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    record_bare(tmp_path, steps=2)
    for step, words in ((0, "<higher>"), (2, "lower")):
        played = sample(0, "5", 1.0)
        played.messages = [
            {"role": "assistant", "content": "2"},
            {"role": "environment", "content": words},
            {"role": "assistant", "content": "5"},
        ]
        save_samples(tmp_path, f"validation_step_{step}", [sample_row(played)])
    text = write_report(tmp_path).read_text()
    for words in ("&lt;higher&gt;", "lower"):
        turns = ("turn", "2"), ("turn told", words), ("turn", "5")
        assert "".join(f'<span class="{kind}">{said}</span>' for kind, said in turns) in text


def pictures(page: str) -> dict[str, str]:
    found = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)"', page)
    return {title: base64.b64decode(data).decode() for title, data in found}


def test_report_of_a_run_in_progress(tmp_path: Path) -> None:
    record(tmp_path, steps=2)
    save_validations(tmp_path)
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html"
    text = page.read_text()
    assert "step 2 of 3" in text
    assert "0.100 → 0.200" in text
    assert set(pictures(text)) == {"Reward", "KL divergence", "Throughput", "Step time", "Timeline"}
    assert all("<svg" in svg for svg in pictures(text).values())
    assert "&lt;b&gt;good&lt;/b&gt;" in text and "<b>good" not in text
    assert "answer_key: solution" in text
    assert not re.search(r'(src|href)="(?!data:)', text), "the page must not need other files"
    assert (tmp_path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_report_names_what_the_run_has(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {
        "actor/clipfrac": 0.1,
        "critic/explained_variance": 0.2,
        "mismatch/max_abs": 1e-5,
        "mismatch/mean_abs": 0.0,
        "response/mean_tokens": 6.0,
        "validation/mean": 0.3,
    }
    with Recorder(tmp_path, 40, live=False) as recorder:
        for step in range(40):
            recorder.log(StepStats(step, metrics | {"reward/mean": 0.1 + (math.nan if step == 3 else 0.0)}))
    shown = pictures(write_report(tmp_path).read_text())
    assert {
        "Reward",
        "Clip fraction",
        "Value explained variance",
        "Response length",
        "Train / rollout log-prob mismatch",
    } == set(shown)


PPO = """
trainer: rl
batch: {prompts_per_step: 8, samples_per_prompt: 1, samples_per_minibatch: MINIBATCH, epochs_per_step: 1}
algorithm: {adv_estimator: gae}
"""


@pytest.mark.parametrize(
    ("minibatch", "once"), [pytest.param("null", True, marks=pytest.mark.slow), ("8", True), ("4", False)]
)
def test_the_report_of_ppo_says_in_words_what_is_flat(tmp_path: Path, minibatch: str, once: bool) -> None:
    (tmp_path / "config.yaml").write_text(PPO.replace("MINIBATCH", minibatch))
    flat = {"actor/clipfrac": 0.0, "critic/clipfrac": 0.0, "actor/ppo_kl": 0.0}
    with Recorder(tmp_path, 3, live=False) as recorder:
        for step in (1, 2, 3):
            losses = {"actor/loss": 0.1 * step, "actor/pg_loss": 0.1 * step, "kl/ref": 0.01 * step}
            recorder.log(StepStats(step, flat | losses))
    text = write_report(tmp_path).read_text()
    assert set(pictures(text)) == {"Loss", "KL divergence"}, "that to the reference"
    said = re.search("<p[^>]*>(0 at every step, not drawn: .*)</p>", text)
    assert said is not None
    assert "KL divergence to the rollout policy, clip fraction of the actor, clip fraction of the critic" in said[1]
    assert ("Each step makes one on-policy update" in said[1]) == once
    assert "policy loss: only its gradient matters" in text and "cross-entropy" not in text


def test_the_report_of_sft_says_what_its_loss_is(tmp_path: Path) -> None:
    with Recorder(tmp_path, 1, live=False) as recorder:
        recorder.log(StepStats(1, {"actor/loss": 2.0}))
    text = write_report(tmp_path).read_text()
    assert "cross-entropy of the responses" in text and "not drawn" not in text


def test_report_of_an_empty_run(tmp_path: Path) -> None:
    assert "No step has been logged yet" in write_report(tmp_path).read_text()
    assert not (tmp_path / "reward_curve.png").exists()
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        write_report(tmp_path / "nowhere")


def test_pictures_of_somebody_s_own_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "images").mkdir()
    for name in ("step_10", "step_2", "step_final", "step_5_copy"):
        (tmp_path / f"images/{name}.png").write_bytes(name.encode())
    assert [file.stem for file in image_grids(tmp_path)] == ["step_2", "step_10"]
    assert "step 10" in write_report(tmp_path).read_text()


def test_a_report_names_the_picture_that_it_has_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path, 2, live=False) as recorder:
        recorder.log(StepStats(1, {"actor/loss": 0.0}))
        assert main(["report", str(tmp_path)]) == 0
        assert "reward_curve.png" not in capsys.readouterr().out
        text = (tmp_path / "report.html").read_text()
        assert "not drawn: loss of the policy" in text and "No step has been logged" not in text
        recorder.log(StepStats(2, {"actor/loss": 1.0}))
    assert main(["report", str(tmp_path)]) == 0
    assert f"picture  {tmp_path / 'reward_curve.png'}" in capsys.readouterr().out


def test_moving_mean_is_centred_and_shrinks_at_the_ends() -> None:
    import numpy as np

    assert moving_mean(np.array([1.0, 2.0, 6.0, 8.0]), 1).tolist() == [1.5, 3.0, 16 / 3, 7.0]


def test_a_followed_report_is_written_again_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, said, pages = Lock(tmp_path / "lock"), [], []
    record_bare(tmp_path, steps=1)

    def sleep(seconds: float) -> None:
        """Meanwhile the run makes a step, then another one, and then ends."""
        assert seconds == 7.0
        pages.append((tmp_path / "report.html").read_text())
        record_bare(tmp_path, steps=len(pages) + 1)
        if len(pages) == 2:
            lock.release()

    monkeypatch.setattr("mrl.observe.follow.time.sleep", sleep)
    assert follow_run(tmp_path, 7.0, said.append) == "the run is not active; last step: 3"
    assert [line.partition(":")[0] for line in said] == ["step 1", "step 2", "step 3"]
    assert all('<meta http-equiv="refresh" content="7">' in page for page in pages)
    last = (tmp_path / "report.html").read_text()
    assert "refresh" not in last and "step 3" in last and not list(tmp_path.glob("*.tmp"))


def test_ctrl_c_ends_a_followed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(tmp_path / "lock")
    record_bare(tmp_path)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mrl.observe.follow.time.sleep", interrupted)
    assert main(["report", str(tmp_path), "--follow"]) == 0
    lock.release()
    assert f"report   {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert "refresh" not in (tmp_path / "report.html").read_text()


def test_the_time_line_shows_who_worked_when() -> None:
    waits = {"step": 1, "time/rollout": 2.0, "time/update": 1.0}
    assert timeline_bars([waits]) == [
        TimelineBar(0, "rollout", 0, 2.0),
        TimelineBar(0, "update", 2.0, 1.0),
        TimelineBar(1, "generation", 0, 2.0),
    ]
    ahead = [
        {"step": n, "time/rollout": 0.5, "time/update": 2.0, "time/sync": 0.5, "perf/train_s": 2.0} for n in (1, 2)
    ]
    found = timeline_bars([row | {"perf/generate_s": 2.25} for row in ahead])
    assert [bar for bar in found if bar.row == 0] == [
        *(TimelineBar(0, "update", 0, 2.0), TimelineBar(0, "rollout", 2.0, 0.5), TimelineBar(0, "sync", 2.5, 0.5)),
        *(TimelineBar(0, "update", 3.0, 2.0), TimelineBar(0, "rollout", 5.0, 0.5), TimelineBar(0, "sync", 5.5, 0.5)),
    ]
    assert [bar for bar in found if bar.row == 1] == [TimelineBar(1, "generation", 0, 2.25)]
    figure = draw_timeline([waits])
    assert figure is not None and len(to_bytes(figure, "png")) > 1000
    assert draw_timeline([{"step": 1, "time/update": 1.0}]) is None
