"""Run directory, metrics, samples, progress display and report of a run."""

from mrl.observe import trackers
from mrl.observe.files import (
    ENGINES,
    LEFT_OUT,
    NONFINITE,
    PLAN,
    RANKS,
    STRAGGLERS,
    NotWritten,
    Unreadable,
    append_jsonl,
    write_down,
)
from mrl.observe.following import follow
from mrl.observe.lock import RunLocked
from mrl.observe.metrics import read_metrics
from mrl.observe.recorder import Recorder, SilentRecorder
from mrl.observe.report import write_report
from mrl.observe.rewind import rewind
from mrl.observe.run_dir import RunDir, RunExists, is_of_this_launch, move_aside, note_launch, refuse_existing, written
from mrl.observe.samples import before_after_table, sample_row, save_pictures, save_samples

__all__ = [
    "ENGINES",
    "LEFT_OUT",
    "NONFINITE",
    "PLAN",
    "RANKS",
    "STRAGGLERS",
    "NotWritten",
    "Recorder",
    "RunDir",
    "RunExists",
    "RunLocked",
    "SilentRecorder",
    "Unreadable",
    "append_jsonl",
    "before_after_table",
    "follow",
    "is_of_this_launch",
    "move_aside",
    "note_launch",
    "read_metrics",
    "refuse_existing",
    "rewind",
    "sample_row",
    "save_pictures",
    "save_samples",
    "trackers",
    "write_down",
    "write_report",
    "written",
]
