"""The arguments of an engine server, and the command and environment that start it.

An engine of another kind is a function of a ServerSpec, named in `mrl.config.engines.ENGINES`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.placement import engine_gpus, shared_gpus
from mrl.config.schema import RLConfig, RolloutConfig
from mrl.families import ModelArch, engine_arch
from mrl.families.adapters import adapted_parts
from mrl.families.flops import num_parameters
from mrl.inference.delta import LOADER
from mrl.inference.routed import ASK
from mrl.ports import HERE

# Variables of whoever launched the ranks
LAUNCHER = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR"),
        *("MASTER_PORT", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    )
)

VISIBLE = "CUDA_VISIBLE_DEVICES"
# glibc's: the logits of a batch are large blocks, wanted again for the next token; by itself it returns them each time
KEPT_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(1 << 30))
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
CPU = Machine(1, 1, gpus=0)  # a world of one
SMALL_MODEL = 20_000_000  # parameters; engines of smaller models on CPUs have one thread


@dataclass(frozen=True)
class Part:
    """Part of an engine over several nodes: its number among `nodes`, of which number 0 answers requests, and the
    rendezvous address HOST:PORT at part 0."""

    nodes: int
    number: int
    meeting: str


@dataclass(frozen=True)
class ServerSpec:
    """Specification of a server to start."""

    cfg: RolloutConfig
    model_path: str  # Hugging Face directory; without safetensors the weights are random until the first weight sync
    dtype: str  # "float32" or "bfloat16"
    port: int
    index: int  # among the `cfg.servers` of its node
    seed: int  # for random numbers without a seed of the sample; the same for all servers of a node
    machine: Machine  # this machine; without GPUs the server runs on the CPU
    folder: Path  # private folder, removed when the engine ends
    api_key: str | None = field(default=None, repr=False)  # that every request must carry; None: no key is needed
    host: str = HERE  # the only address to listen on; the machine's own if other nodes must reach it
    part: Part | None = None  # None if the whole engine is on this node

    @property
    def arch(self) -> ModelArch:
        return engine_arch(self.model_path)

    @property
    def gpu(self) -> bool:
        """True if it runs on GPUs: the first ones of its `environment`."""
        return bool(self.machine.gpus)

    @property
    def shares_gpus(self) -> bool:
        """True if a rank of the trainer is on one of its GPUs."""
        return not set(self._gpus).isdisjoint(shared_gpus(self.cfg, self.machine, self._nodes))

    @property
    def _nodes(self) -> int:
        return self.part.nodes if self.part is not None else 1

    @property
    def _gpus(self) -> tuple[int, ...]:
        here = self.cfg.tensor // self._nodes
        return engine_gpus(self.cfg, self.machine, self._nodes)[self.index * here : (self.index + 1) * here]

    def environment(self) -> dict[str, str]:
        """Returns the server's environment. Its own GPUs come first; the others stay visible, since CUDA IPC can only
        read from visible GPUs. On a CPU, malloc keeps freed memory."""
        env = environment()
        if not self.gpu:
            env = KEPT_MEMORY | env
        else:
            names = env[VISIBLE].split(",") if env.get(VISIBLE) else list(map(str, range(self.machine.gpus or 0)))
            order = [*self._gpus, *(gpu for gpu in range(self.machine.gpus or 0) if gpu not in self._gpus)]
            env[VISIBLE] = ",".join(names[gpu].strip() for gpu in order)
        return env

    @property
    def threads(self) -> int:
        """OpenMP threads of each process of this engine on a CPU."""
        return cpu_threads(self.cfg, self.arch, self.machine)


@dataclass(frozen=True)
class Launch:
    """Command that starts an engine."""

    command: list[str]
    env: dict[str, str] = field(repr=False)  # the whole environment, which may hold the API key
    kind: str | None = None  # name of the fork server that may start it


def keep_memory() -> None:
    """Applies KEPT_MEMORY to this process, since glibc reads the variables only when a program starts."""
    for name, value in KEPT_MEMORY.items():
        ctypes.CDLL(None).mallopt(_MALLOPT[name], int(os.environ.get(name, value)))


def cpu_threads(cfg: RolloutConfig, arch: ModelArch, machine: Machine) -> int:
    """Returns the OpenMP threads of each process of an engine on a CPU: cfg.threads, else the cores, shared among the
    machine's engines. The machine's ranks keep a core each if they train while engines sample."""
    if cfg.threads is not None:
        return cfg.threads
    if cfg.tensor > 1 or num_parameters(arch) < SMALL_MODEL:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    training = machine.local_world_size if cfg.max_staleness or cfg.early_passes is not None else 0
    return max(1, (cores - training) // cfg.servers)


def launcher(engine: str) -> Callable[[ServerSpec], Launch]:
    """Returns the function that starts servers of an engine in the table. The function raises EngineUnavailable where
    that is impossible."""
    module, _, name = ENGINES[engine].launch.partition(":")
    found: Callable[[ServerSpec], Launch] = getattr(importlib.import_module(module), name)
    return found


def environment() -> dict[str, str]:
    """Returns this process's environment without torchrun's variables, since engines make their own process groups."""
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER and not k.startswith("TORCHELASTIC_")}


def started_with(cfg: RLConfig) -> RolloutConfig:
    """Returns the run's rollout settings, with SGLang's arguments for adapters, deltas and routed experts."""
    rollout, words = cfg.engines()[0], list[str]()
    if cfg.sync.delta is not None and "server_args" not in ENGINES[cfg.rollout.engine].ignores:
        words += ["--custom-weight-loader", LOADER]
    if cfg.actor.routing_replay == "engine" and "server_args" not in ENGINES[cfg.rollout.engine].ignores:
        words.append(ASK)
    if cfg.sync.lora == "adapter":
        loras = [each.actor.lora for each in cfg.policies if each.actor.lora is not None]
        arch, rank = engine_arch(cfg.model.path), max(lora.rank for lora in loras)
        parts = dict.fromkeys(part for lora in loras for part in adapted_parts(arch, lora.spec))
        # in memory at once: each current adapter, and none
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras-per-batch", str(1 + len(loras))]
        words += ["--lora-target-modules", *parts]
    return rollout.model_copy(update={"server_args": (*words, *rollout.server_args)})
