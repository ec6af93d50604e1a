"""Run directory, metrics, samples, progress display and report of a run."""

# ruff: noqa: F401 - other packages take the names from here

from mrl.observe import trackers
from mrl.observe.files import (
    ENGINES,
    LEFT_OUT,
    NONFINITE,
    PLAN,
    RANKS,
    STRAGGLERS,
    UnreadableFile,
    WriteFailed,
    append_jsonl,
    write_guarded,
)
from mrl.observe.follow import follow_run
from mrl.observe.lock import RunLocked
from mrl.observe.metrics import read_metrics
from mrl.observe.recorder import Recorder, SilentRecorder
from mrl.observe.report import write_report
from mrl.observe.rewind import rewind
from mrl.observe.run_dir import (
    RunDir,
    RunExists,
    is_of_this_launch,
    move_aside,
    record_launch,
    refuse_existing,
    written_files,
)
from mrl.observe.samples import before_after_table, sample_row, save_pictures, save_samples
