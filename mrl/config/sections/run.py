"""The run itself: its processes, checkpoints, what it does about faults."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class RunConfig(Section):
    name: str
    root: str = "runs"  # the run directory is ROOT/NAME
    seed: NonNegativeInt = 1
    steps: PositiveInt = 100
    nproc: PositiveInt | None = None  # processes on this machine; the smallest world of the layout when null
    tensorboard: bool = True
    timeout_s: PositiveFloat = 600.0  # of every collective
    launcher: Literal["mrl", "torchrun", "ft"] = "mrl"  # who starts this machine's processes; ft restarts failed ones
    max_restarts: NonNegativeInt = 3  # of all ranks, each after a failure; launcher ft only
    max_nonfinite_steps: PositiveInt = 3  # steps in a row with an update skipped for a NaN or infinity: the run stops


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None  # null: none
    keep_last: PositiveInt = 2
    keep_every_steps: PositiveInt | None = None  # those of steps n, 2n, ... stay for good, besides the last ones
    asynchronous: bool = True  # written while training goes on, from a copy in host memory; false: waited for, no copy
    on_error: Literal["stop", "warn"] = "stop"  # when one cannot be written (disk full): end the run, or go on without
    writers: Literal["every_rank", "one_node", "one_rank"] = "every_rank"  # who writes at once; the others take turns
    timeout_s: PositiveFloat = 1800.0  # to write one; the next one waits as long
    weights_every_steps: PositiveInt | None = None  # the actor alone, for an engine: RUN_DIR/hf_step_N, never removed
    export_hf: bool = False  # write RUN_DIR/hf (a complete Hugging Face directory) at the end
    accept_changes: tuple[str, ...] = ()  # keys that may differ from those a checkpoint was made with (resume)


class SectionTimeouts(Section):
    """Seconds a rank may stay in one part of the run; after them it counts as hung, and all ranks are restarted."""

    setup: PositiveFloat = 1800.0
    rollout: PositiveFloat = 3600.0  # rewards included
    reward: PositiveFloat = 1200.0  # what is still to be scored when sampling has ended
    update: PositiveFloat = 1800.0
    sync: PositiveFloat = 900.0
    checkpoint: PositiveFloat = 1800.0
    out_of_section: PositiveFloat = 900.0


class ResilienceConfig(Section):
    timeouts_s: SectionTimeouts = SectionTimeouts()  # launcher ft only
    save_deadline_s: PositiveFloat = 60.0  # to end the step and save, after SIGTERM or SIGUSR1
    straggler_every_steps: PositiveInt = 10  # ranks compare the time that they needed
    straggler_ratio: PositiveFloat = 2.0  # a rank that needs this many times its peers' median is named
