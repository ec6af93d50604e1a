"""Sections `run`, `checkpoint` and `resilience`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.options.base import FilePath, NonNegativeInt, PositiveFloat, PositiveInt, Section, Seed

TrackerName = Literal[
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "swanlab",
]


class WandbConfig(Section):
    """Weights & Biases. The API key is read from WANDB_API_KEY or `wandb login`."""

    project: str = "mrl"  # project of the run
    entity: str | None = None  # team or user; null: that of the API key
    name: str | None = None  # name of the run in wandb; null: run.name
    group: str | None = None  # group of runs
    tags: tuple[str, ...] = ()  # tags of the run
    mode: Literal["online", "offline"] = "online"  # offline: files in RUN_DIR/wandb, to upload with `wandb sync`


class MlflowConfig(Section):
    """MLflow. User and password are read from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    uri: FilePath | None = None  # server or local store; null: MLFLOW_TRACKING_URI if set, else the folder ROOT/mlruns
    experiment: str = "mrl"  # experiment of the run, created if it does not exist
    name: str | None = None  # name of the run in MLflow; null: run.name
    tags: dict[str, str] = {}  # tags of the run: name -> value


class TrackioConfig(Section):
    """trackio: a local database (TRACKIO_DIR), or a Space of the Hugging Face hub, whose token is that of HF_TOKEN."""

    project: str = "mrl"  # project of the run
    name: str | None = None  # beginning of the run's name in trackio; null: run.name
    group: str | None = None  # group of runs
    space: str | None = None  # Space to send metrics to (OWNER/NAME), created as a private one; null: local files


class SwanLabConfig(Section):
    """SwanLab. The API key is read from SWANLAB_API_KEY or `swanlab login`."""

    project: str = "mrl"  # project of the run
    workspace: str | None = None  # team or user; null: that of the API key
    name: str | None = None  # name of the run in SwanLab; null: run.name
    group: str | None = None  # group of runs
    tags: tuple[str, ...] = ()  # tags of the run
    mode: Literal["online", "offline"] = "online"  # offline: files in RUN_DIR/swanlab, to upload with `swanlab sync`


class ProfileConfig(Section):
    """Steps to run under a profiler, which slows them down. Ranges name the phases of a step.

    - torch: for each step and rank, RUN_DIR/profile gets a trace (for chrome://tracing or Perfetto) and a table of the
      ten largest operations
    - nsys: the ranks run under NVIDIA Nsight Systems; RUN_DIR/logs gets a report of each step and rank
    """

    tool: Literal["torch", "nsys"] = "torch"  # the profiler; nsys needs launcher mrl, on one machine

    steps: tuple[PositiveInt, ...]  # steps to profile, counted from 1; the first steps are slower than the others
    ranks: tuple[NonNegativeInt, ...] = (0,)  # ranks to profile
    alone: bool = False  # end the run after the last of these steps, and write neither checkpoints nor weights


class MemoryHistoryConfig(Section):
    """Record of the GPU's allocations with their stacks, written as snapshots for https://pytorch.org/memory_viz to
    RUN_DIR/profile. Slows allocations down a little."""

    steps: tuple[PositiveInt, ...] = ()  # steps after which a snapshot is written, counted from 1
    on_out_of_memory: bool = True  # also write a snapshot where the memory of the GPU does not suffice
    ranks: tuple[NonNegativeInt, ...] = (0,)  # ranks that record
    max_entries: PositiveInt = 100000  # newest allocations and releases that are kept


class RunConfig(Section):
    """The run: its directory, length and processes."""

    name: str  # name of the run directory, ROOT/NAME
    root: FilePath = "runs"  # directory of run directories
    # if the run directory has files of an earlier run without a checkpoint: refuse to start, or move the files to
    # RUN_DIR/earlier_N
    existing: Literal["refuse", "move_aside"] = "refuse"
    seed: Seed = 1  # seed of weights from scratch, prompts and samples
    # reproduce results bit for bit on GPUs, wherever operations with a fixed order of sums exist; slower. Runs on CPUs
    # are always reproducible
    deterministic: bool = False
    steps: PositiveInt = 100  # steps of the whole run, including those before a resume
    # processes on each machine; null: the fewest that the layout needs, or with several machines one per GPU
    nproc: PositiveInt | None = None
    # number of machines, with nproc processes on each; null: the machines that the run is started on
    nodes: PositiveInt | None = None
    trackers: tuple[TrackerName, ...] = ("tensorboard",)  # where metrics go besides RUN_DIR/metrics.jsonl
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    swanlab: SwanLabConfig = SwanLabConfig()
    profile: ProfileConfig | None = None
    memory_history: MemoryHistoryConfig | None = None
    timeout_s: PositiveFloat = 600.0  # timeout of collectives, in seconds
    # launcher of the processes of this machine; ft also restarts all ranks after a failure
    launcher: Literal["mrl", "torchrun", "ft"] = "mrl"
    max_restarts: NonNegativeInt = 3  # restarts of all ranks after failures; launcher ft only
    # end the run after this many consecutive steps with skipped updates (NaN or inf)
    max_nonfinite_steps: PositiveInt = 3

    @property
    def is_for_profile(self) -> bool:
        return self.profile is not None and self.profile.alone

    @property
    def last_step(self) -> int:
        """The last step that is made, which `profile` may bring forward."""
        if self.profile is None or not self.profile.alone:
            return self.steps
        return min(self.steps, max(self.profile.steps, default=self.steps))


class CheckpointConfig(Section):
    """Checkpoints to resume from, and exports to use."""

    every_steps: PositiveInt | None = None  # steps between checkpoints; null: none are written
    keep_last: PositiveInt = 2  # newest checkpoints to keep
    keep_every_steps: PositiveInt | None = None  # also keep the checkpoints of steps n, 2n, ... forever
    asynchronous: bool = True  # write in the background from a copy in host memory; false: wait, without a copy
    # if a checkpoint, metrics or samples cannot be written: end the run, or continue
    on_error: Literal["stop", "warn"] = "stop"
    # ranks that write at the same time: all, those of one node, or one; the others wait for their turn
    writers: Literal["every_rank", "one_node", "one_rank"] = "every_rank"
    # maximum seconds to write a checkpoint, for which the next save waits as long, and of an upload to the hub
    timeout_s: PositiveFloat = 1800.0
    # steps between exports of the actor, which are never removed: RUN_DIR/hf_step_N, or adapter_step_N with LoRA
    weights_every_steps: PositiveInt | None = None
    # write RUN_DIR/hf, a complete Hugging Face directory, at the end; with LoRA, the adapters are merged into it and
    # also written to RUN_DIR/adapter
    export_hf: bool = False
    # repository of the Hugging Face hub (OWNER/NAME) to which RUN_DIR/hf is uploaded at the end, with its model card;
    # created if it does not exist; null: no upload. The token is read from HF_TOKEN or `hf auth login`
    push_to_hub: str | None = None
    hub_private: bool = True  # create the repository as a private one; one that exists keeps its visibility
    accept_changes: tuple[str, ...] = ()  # keys that may differ from the checkpoint's configuration on resume


class SectionTimeouts(Section):
    """Maximum seconds of a rank in one part of the run, with launcher ft.

    After that time the rank counts as hung, and all ranks are restarted.
    """

    setup: PositiveFloat = 1800.0  # everything before the first step
    rollout: PositiveFloat = 3600.0  # generation and validation, including rewards
    reward: PositiveFloat = 1200.0  # scoring that remains after generation
    update: PositiveFloat = 1800.0  # log-probs, advantages and optimizer steps
    sync: PositiveFloat = 900.0  # a weight sync to the engines
    checkpoint: PositiveFloat = 1800.0  # saving, as far as training waits for it
    out_of_section: PositiveFloat = 900.0  # between these parts


class ResilienceConfig(Section):
    """Fault tolerance: hung ranks, slow ranks, and signals of a scheduler."""

    timeouts_s: SectionTimeouts = SectionTimeouts()
    # seconds to end the step and save after SIGTERM or SIGUSR1; set it below the scheduler's notice, and above the time
    # of a step (mrl plan warns)
    save_deadline_s: PositiveFloat = 60.0
    straggler_every_steps: PositiveInt = 10  # steps between comparisons of the ranks' times
    straggler_ratio: Annotated[float, Field(gt=1)] = 2.0  # report a rank that takes this many times its peers' median
