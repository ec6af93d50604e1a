"""ft_launcher's configuration, made from mrl's."""

from __future__ import annotations

from pathlib import Path

import yaml

from mrl.config.schema import SectionTimeouts
from mrl.files import make_private, write_atomically
from mrl.resilience.protocol import SECTIONS

NAME = "ft.yaml"
CHECK_S = 0.5  # interval of a rank monitor's checks


def write(run_dir: Path, timeouts: SectionTimeouts) -> Path:
    """Writes RUN_DIR/ft.yaml for --ft-cfg-path and returns it.

    Heartbeats are off, since every part of a run is in a section or between two.
    """
    content = {
        "fault_tolerance": {
            "initial_rank_heartbeat_timeout": None,
            "rank_heartbeat_timeout": None,
            "rank_section_timeouts": timeouts.model_dump(include=set(SECTIONS)),
            "rank_out_of_section_timeout": timeouts.out_of_section,
            "workload_check_interval": CHECK_S,
            "rank_termination_signal": "SIGKILL",
        }
    }
    make_private(run_dir)
    file = run_dir / NAME
    write_atomically(file, yaml.safe_dump(content, sort_keys=False))
    return file
