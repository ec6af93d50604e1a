"""Plan of a configuration on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mrl.config.checkpoint_size import bytes_a_weight, checkpoint_bytes
from mrl.config.checks.models import read_archs
from mrl.config.derived import Machine, smallest_world
from mrl.config.placement import engine_gpus
from mrl.config.sections.rollout import RolloutConfig
from mrl.config.trainers.base import AnyConfig, Config, section_of
from mrl.families import ModelArch
from mrl.fp8_chips import chip_problem
from mrl.plan import memory, timing
from mrl.plan.chips import Assumptions, Cluster
from mrl.plan.engine import EnginePlan, plan_engine
from mrl.plan.memory import MemoryItem, PhaseMemory
from mrl.plan.placement import Placement
from mrl.plan.shortage import Shortage, shortages
from mrl.plan.timing import ClusterRates, DeltaBreakEven, TimedPart
from mrl.plan.workload import StepWorkload, models_of

PER_NODE = 8  # GPUs, by default


def machine_of(cfg: AnyConfig, gpus: int | None = None, per_node: int | None = None) -> Machine:
    """Returns a machine of the planned world, which is elsewhere and has all its GPUs.

    gpus: ranks in all; None: run.nodes machines with run.nproc processes each, or a node's GPUs; without either in the
    configuration, the smallest world of the layouts. per_node: ranks of a machine; None: the configured number, or 8
    """
    run, engines = cfg.run, cfg.engines()
    per_node = per_node or (run.nproc if run.nodes is not None else None) or PER_NODE
    if gpus is not None:
        world = gpus
    else:
        world = run.nodes * (run.nproc or per_node) if run.nodes is not None else run.nproc or smallest_world(cfg)
    ranks = min(world, per_node)
    apart = engines[0].gpus if engines is not None and engines[0].gpus is not None else ()
    return Machine(world, ranks, gpus=max((ranks, *(gpu + 1 for gpu in apart))), planned=True)


@dataclass(frozen=True)
class Plan:
    """works: a step of each adapter, by its name; of a run with one policy its step, under an empty name
    engine: an engine that mrl starts; None: engines are external, or nothing is sampled
    """

    cfg: Config
    cluster: Cluster
    assumed: Assumptions
    works: Mapping[str, StepWorkload]
    engine: EnginePlan | None

    @cached_property
    def work(self) -> StepWorkload:
        """A step with the samples of all adapters."""
        return StepWorkload.together(self.works.values())

    @cached_property
    def ranks(self) -> dict[int, list[PhaseMemory]]:
        """Phases of one rank of each kind; ranks of a kind need the same in every phase."""
        kinds: dict[tuple[object, ...], int] = {}
        for rank in range(self.cluster.gpus):
            kinds.setdefault(self._kind(rank), rank)
        return {rank: self._phases(rank) for rank in kinds.values()}

    @cached_property
    def worst(self) -> dict[str, tuple[int, PhaseMemory]]:
        """Rank that needs most, for each phase."""
        found: dict[str, tuple[int, PhaseMemory]] = {}
        for rank, phases in self.ranks.items():
            for phase in phases:
                if phase.name not in found or phase.total > found[phase.name][1].total:
                    found[phase.name] = rank, phase
        return found

    @property
    def on_gpu(self) -> bool:
        return self.cluster.chip.is_gpu

    @cached_property
    def placement(self) -> Placement:
        cluster = self.cluster
        return Placement.on_gpus(self.work.models, cluster.gpus, cluster.per_node, self.engine)

    @cached_property
    def parts(self) -> list[TimedPart]:
        """Timed parts of a step; empty without GPUs."""
        if not self.on_gpu:
            return []
        found = timing.step(ClusterRates(self.cluster, self.assumed), self.works, self.engine, self._apart)
        return found + timing.overlapped(found) if self.samples_during_training else found

    @property
    def _apart(self) -> int:
        return self.engine.engines if self.engine is not None and self.cfg.engine_nodes() is not None else 0

    @property
    def delta_break_even(self) -> DeltaBreakEven | None:
        """When a delta weight sync is faster than a whole one; None without sync.delta."""
        rates = ClusterRates(self.cluster, self.assumed)
        return timing.delta_break_even(rates, self.work, self._apart) if self.work.keeps_sent else None

    @property
    def samples_during_training(self) -> bool:
        """True if engines on their own GPUs sample while the trainer trains."""
        engines = self.cfg.engines()
        alone = all(self._engine_at(rank) is None for rank in range(self.cluster.gpus))
        return engines is not None and engines[0].max_staleness > 0 and alone

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @cached_property
    def shortages(self) -> list[Shortage]:
        """Reasons why the run does not fit; empty without GPUs."""
        limit = self.cluster.chip.memory
        if not self.on_gpu:
            return []
        engine, nodes = self.engine, self.cfg.engine_nodes()
        found = [*shortages(self.work, self.worst, engine, limit)]
        chip, fp8 = self.cluster.chip, [model.train.precision.fp8 for model in self.cfg.built().values()]
        for recipe in sorted({one.recipe for one in fp8 if one.is_real}):
            if (problem := chip_problem(recipe, chip.capability, None, chip.name)) is not None:
                found.append(Shortage(f"precision.fp8.recipe: {problem}", "another recipe, or other GPUs"))
        if engine is not None and nodes is not None:
            there, wanted = self.cluster.per_node, engine.engines * engine.tensor // nodes.nodes
            if wanted > there:
                text = f"rollout: the engines of a node need {wanted} GPUs, and a node has {there}"
                found.append(Shortage(text, "fewer rollout.servers, or a larger placement.nodes_per_engine"))
        return found

    @property
    def problems(self) -> list[str]:
        """The shortages, one sentence each."""
        return [str(shortage) for shortage in self.shortages]

    def host(self, rank: int) -> list[MemoryItem]:
        """Returns the host memory of a rank's process."""
        checkpoint = self.cfg.checkpoint
        copied = checkpoint.every_steps is not None and checkpoint.asynchronous
        trained = [name for name, model in self.work.models.items() if model.is_trained and copied]
        return memory.host_items(self.work, rank, {name: bytes_a_weight(self.cfg, name) for name in trained})

    @property
    def host_of_node(self) -> float:
        """Host bytes of the first node, which has rank 0. Without GPUs this includes the models and the engines."""
        first = range(min(self.cluster.gpus, self.cluster.per_node))
        beside = sum(item.nbytes for rank in first for item in self.host(rank))
        if self.on_gpu:
            return beside
        engine, engines = self.engine, 0
        if engine is not None:
            engines = engine.engines * engine.tensor // self.cluster.nodes * (engine.weights + engine.cache)
        most = max(phase.total for _, phase in self.worst.values())
        return beside + engines + len(first) * most

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk."""
        return checkpoint_bytes(self.cfg, {name: model.arch for name, model in self.work.models.items()})

    @property
    def write_seconds(self) -> float:
        """Seconds to write a checkpoint, with all GPU nodes writing at once."""
        return self.checkpoint_bytes / (self.cluster.nodes * self.assumed.disk)

    @property
    def save_seconds(self) -> float:
        """Longest time from a stop signal to the end: a whole step and a checkpoint. 0 without checkpoints or GPUs."""
        saves = self.on_gpu and self.cfg.effective_checkpoint.every_steps is not None
        return self.seconds + self.write_seconds if saves else 0.0

    def _phases(self, rank: int) -> list[PhaseMemory]:
        """Returns each phase of the adapter that needs most in it."""
        found: dict[str, PhaseMemory] = {}
        for work in self.works.values():
            for phase in memory.phases(work, rank, self._engine_at(rank), self.assumed):
                if phase.name not in found or phase.total > found[phase.name].total:
                    found[phase.name] = phase
        return [*found.values()]

    def _kind(self, rank: int) -> tuple[object, ...]:
        found: list[object] = [self._engine_at(rank) is not None]
        for model in self.work.models.values():
            coords = model.grid.coordinates(rank)
            sends = coords.tp == coords.dp == coords.cp == 0
            found += [coords.pp, sends, memory.elements_of_model(model, coords)]
        return tuple(found)

    def _engine_at(self, rank: int) -> EnginePlan | None:
        return self.engine if self.engine is not None and self.engine.at(rank) is not None else None


def make_plan(
    cfg: Config, cluster: Cluster, archs: Mapping[str, ModelArch], assumed: Assumptions, *, fused: bool = True
) -> Plan:
    """Returns the plan. Raises ValueError for a world that a layout does not fill.

    archs: from `read_shapes`. fused: the GPUs can use transformer-engine's layers.
    """
    on_gpu = cluster.chip.is_gpu
    assumed = assumed if on_gpu else assumed.without_gpu()
    models, policies = models_of(cfg, archs, cluster.gpus, on_gpu, on_gpu and fused), cfg.adapter_configs() or {"": cfg}
    works = {}
    for name, own in policies.items():
        its = own.built()
        works[name] = StepWorkload.of(own, tuple(replace(m, train=its[m.name].train) for m in models), assumed)
    engines, work = cfg.engines(), StepWorkload.together(works.values())
    engine = _engine(cfg, engines[0], cluster, work, assumed) if engines is not None else None
    return Plan(cfg, cluster, assumed, works, engine)


def _engine(
    cfg: Config, rollout: RolloutConfig, cluster: Cluster, work: StepWorkload, assumed: Assumptions
) -> EnginePlan | None:
    if rollout.urls:
        return None
    nodes, size = cfg.engine_nodes(), cfg.nodes_per_engine()
    actor = work.models["actor"]
    gpus = _engine_gpus(rollout, cluster, size) if nodes is None else ()
    left = float(cluster.chip.memory)  # for engines on their own GPUs
    if shared := [gpu for gpu in gpus if gpu < cluster.gpus]:
        kinds = {
            tuple(memory.elements_of_model(m, m.grid.coordinates(gpu)) for m in work.models.values()): gpu
            for gpu in shared
        }
        # by its start, the models are loaded and offloaded
        left -= max(memory.phases(work, rank, None, assumed)[0].total for rank in kinds.values())
    return plan_engine(
        actor.arch,
        rollout,
        actor.dtype,
        left if cluster.chip.is_gpu else None,
        engines=rollout.servers * (nodes.groups if nodes is not None else cluster.nodes // size),
        gpus=gpus,
        requests=work.size.sampled,
        longest=work.lengths.longest,
        workspace=assumed.engine_workspace,
        context=assumed.engine_context,
        nodes=size,
        adapters=actor.adapters if work.sends_adapters else (),
    )


def _engine_gpus(rollout: RolloutConfig, cluster: Cluster, nodes_per_engine: int) -> tuple[int, ...]:
    """GPUs of all nodes: shared ones by rank number, others numbered from the world's size on."""
    if not cluster.chip.is_gpu:
        return ()
    ranks = min(cluster.gpus, cluster.per_node)
    own = engine_gpus(rollout, Machine(cluster.gpus, ranks, gpus=ranks), nodes_per_engine)
    beside = max(0, max(own) + 1 - ranks)
    return tuple(
        node * ranks + gpu if gpu < ranks else cluster.gpus + node * beside + gpu - ranks
        for node in range(cluster.nodes)
        for gpu in own
    )


def read_shapes(cfg: Config) -> dict[str, ModelArch]:
    """Returns the shape of every model that the run builds, from config.json alone; the configuration must be
    checked.
    """
    named = read_archs(cfg, [], shapes_only=True)
    return {name: arch for name in cfg.built() if (arch := named[section_of(name)]) is not None}
