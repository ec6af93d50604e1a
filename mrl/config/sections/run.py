"""The run itself: its processes, checkpoints, what it does about faults."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import FilePath, NonNegativeInt, PositiveFloat, PositiveInt, Section, Seed

TrackerName = Literal[
    "tensorboard",
    "wandb",
    "mlflow",
]


class WandbConfig(Section):
    """What Weights & Biases is told. The key is WANDB_API_KEY's, or that of `wandb login`."""

    project: str = "mrl"  # that the run is listed in
    entity: str | None = None  # team or user; the key's own when null
    name: str | None = None  # of the run there; run.name when null
    group: str | None = None  # of runs that belong together
    tags: tuple[str, ...] = ()  # words to find it by
    mode: Literal["online", "offline"] = "online"  # offline: files in RUN_DIR/wandb, which `wandb sync` sends


class MlflowConfig(Section):
    """What MLflow is told. User and password are MLFLOW_TRACKING_USERNAME's and MLFLOW_TRACKING_PASSWORD's."""

    uri: FilePath | None = None  # server or local store; when null MLFLOW_TRACKING_URI, else the folder ROOT/mlruns
    experiment: str = "mrl"  # that the run is listed in, made where it is not there
    name: str | None = None  # of the run there; run.name when null
    tags: dict[str, str] = {}  # name -> value, to find it by


class ProfileConfig(Section):
    """Steps that torch's profiler looks at, which take longer then. For each and each rank, RUN_DIR/profile gets a
    trace (for chrome://tracing or Perfetto) and a table of the ten largest operations."""

    steps: tuple[PositiveInt, ...]  # numbers of steps, from 1; the first ones are slower than the others
    ranks: tuple[NonNegativeInt, ...] = (0,)  # whose
    alone: bool = False  # the run ends after the last of these steps, and leaves neither checkpoints nor weights


class RunConfig(Section):
    """The run itself: where it is written, how long it is, its processes."""

    name: str  # of the run directory, ROOT/NAME
    root: FilePath = "runs"  # directory of run directories
    existing: Literal["refuse", "move_aside"] = "refuse"  # what a run left there that has no checkpoint to go on from
    seed: Seed = 1  # of weights from scratch, prompts and samples
    # on GPUs: the same bits from the same run again, where a fixed order of sums can be had; slower. CPUs: always so
    deterministic: bool = False
    steps: PositiveInt = 100  # of the whole run, those before a resume included
    # processes on each machine; when null, the smallest world of the layout, and of several machines one a GPU
    nproc: PositiveInt | None = None
    # machines that the run is made for, nproc processes on each; null: as many as it is started on
    nodes: PositiveInt | None = None
    trackers: tuple[TrackerName, ...] = ("tensorboard",)  # where metrics go besides RUN_DIR/metrics.jsonl
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    profile: ProfileConfig | None = None
    timeout_s: PositiveFloat = 600.0  # seconds of every collective
    launcher: Literal["mrl", "torchrun", "ft"] = "mrl"  # who starts this machine's processes; ft restarts failed ones
    max_restarts: NonNegativeInt = 3  # of all ranks, each after a failure; launcher ft only
    max_nonfinite_steps: PositiveInt = 3  # steps in a row with an update skipped for a NaN or infinity: the run stops

    @property
    def is_for_profile(self) -> bool:
        return self.profile is not None and self.profile.alone

    @property
    def last_step(self) -> int:
        """That is made."""
        if self.profile is None or not self.profile.alone:
            return self.steps
        return min(self.steps, max(self.profile.steps, default=self.steps))


class CheckpointConfig(Section):
    """What is kept on disk, to go on from or to use."""

    every_steps: PositiveInt | None = None  # steps between two of them; null: none are written
    keep_last: PositiveInt = 2  # newest ones that stay
    keep_every_steps: PositiveInt | None = None  # those of steps n, 2n, ... stay for good, besides the last ones
    asynchronous: bool = True  # written while training goes on, from a copy in host memory; false: waited for, no copy
    # when a checkpoint, metrics or samples cannot be written: end the run, or go on
    on_error: Literal["stop", "warn"] = "stop"
    writers: Literal["every_rank", "one_node", "one_rank"] = "every_rank"  # who writes at once; the others take turns
    timeout_s: PositiveFloat = 1800.0  # seconds to write one; the next one waits as long
    # steps between two exports of the actor alone, never removed: RUN_DIR/hf_step_N, or adapter_step_N where it has
    # adapters
    weights_every_steps: PositiveInt | None = None
    # write RUN_DIR/hf, a complete Hugging Face directory, at the end; an actor's adapters are merged into it, and are
    # alone in RUN_DIR/adapter
    export_hf: bool = False
    accept_changes: tuple[str, ...] = ()  # keys that may differ from those a checkpoint was made with (resume)


class SectionTimeouts(Section):
    """Seconds a rank may stay in one part of the run, with launcher ft. After them it counts as hung, and all ranks are
    restarted."""

    setup: PositiveFloat = 1800.0  # everything before the first step
    rollout: PositiveFloat = 3600.0  # sampling and validation, rewards included
    reward: PositiveFloat = 1200.0  # what is still to be scored when sampling has ended
    update: PositiveFloat = 1800.0  # log-probs, advantages and the optimizer's steps
    sync: PositiveFloat = 900.0  # a push of weights to the engines
    checkpoint: PositiveFloat = 1800.0  # saving, as far as training waits for it
    out_of_section: PositiveFloat = 900.0  # between these parts


class ResilienceConfig(Section):
    """What a run does about hung and slow ranks, and about a scheduler's warning."""

    timeouts_s: SectionTimeouts = SectionTimeouts()
    # seconds to end the step and save, after SIGTERM or SIGUSR1; less than the scheduler gives, and no less than a step
    # takes (mrl plan says so)
    save_deadline_s: PositiveFloat = 60.0
    straggler_every_steps: PositiveInt = 10  # steps between two comparisons of the ranks' times
    straggler_ratio: PositiveFloat = 2.0  # a rank that needs this many times its peers' median is named
