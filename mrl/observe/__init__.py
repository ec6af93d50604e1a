"""What a run leaves behind and shows: run directory, metrics, samples, progress display, report."""

from mrl.observe.files import append_jsonl
from mrl.observe.lock import RunLocked
from mrl.observe.metrics import read_metrics
from mrl.observe.recorder import Recorder, SilentRecorder
from mrl.observe.report import write_report
from mrl.observe.rewind import rewind
from mrl.observe.run_dir import RunDir
from mrl.observe.samples import before_after_table, sample_row, save_samples

__all__ = [
    "Recorder",
    "RunDir",
    "RunLocked",
    "SilentRecorder",
    "append_jsonl",
    "before_after_table",
    "read_metrics",
    "rewind",
    "sample_row",
    "save_samples",
    "write_report",
]
