"""TensorBoard files in RUN_DIR/tensorboard: the metrics of every step as scalars."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import ClassVar

from mrl.config.schema import AnyConfig
from mrl.core import StepStats
from mrl.observe.files import append
from mrl.observe.metrics import flatten
from mrl.observe.remote_tracker import Outcome


class TensorboardWriter:
    """Writes scalars to RUN_DIR/tensorboard, each step whole or not at all (OSError), in the calling thread.

    tensorboard's own writer uses a thread that ends for good, with a traceback, when a disk is full.
    """

    package: ClassVar[str] = "tensorboard"

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        self._file = run_dir / "tensorboard" / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"

    def write(self, stats: StepStats) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        now, step = time.time(), stats.step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in flatten(stats).items()]
        events = [Event(wall_time=now, step=step, summary=Summary(value=values))]
        if not self._file.exists() or not self._file.stat().st_size:  # hides an earlier attempt at these steps
            start = Event(wall_time=now, step=step, session_log=SessionLog(status=SessionLog.START))
            events = [Event(wall_time=now, file_version="brain.Event:2"), start, *events]
        content = io.BytesIO()
        records = RecordWriter(content)
        for event in events:
            records.write(event.SerializeToString())
        self._file.parent.mkdir(exist_ok=True)
        append(self._file, content.getvalue())

    def close(self, outcome: Outcome) -> None:
        """Does nothing: every step is in the file already."""
