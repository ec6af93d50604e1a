"""A configuration and a cluster -> everything that the plan says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mrl.config.checks.models import read_archs
from mrl.config.derived import Machine, smallest_world
from mrl.config.placement import engine_gpus
from mrl.config.sections.rollout import RolloutConfig
from mrl.config.trainers.base import Config
from mrl.families import ModelArch
from mrl.fp8_chips import chip_problem
from mrl.plan import memory, timing
from mrl.plan.chips import Assumptions, Cluster
from mrl.plan.engine import EnginePlan, plan_engine
from mrl.plan.memory import Item, Phase
from mrl.plan.timing import Clock, Part
from mrl.plan.workload import Work, models_of

PER_NODE = 8  # GPUs, where nobody says otherwise


def world_of(cfg: Config, per_node: int) -> int:
    """Ranks that the configuration is made for: run.nodes machines with run.nproc processes each, or a node's GPUs; the
    smallest world of its layouts where it names neither."""
    if cfg.run.nodes is not None:
        return cfg.run.nodes * (cfg.run.nproc or per_node)
    return cfg.run.nproc or smallest_world(cfg)


def machine_of(cfg: Config, gpus: int | None, per_node: int) -> Machine:
    """What the configuration is checked for: a world that is elsewhere, whose GPUs are all there."""
    world, engines = gpus or world_of(cfg, per_node), cfg.engines()
    apart = engines[0].gpus if engines is not None and engines[0].gpus is not None else ()
    return Machine(world, min(world, per_node), gpus=max((world, *(gpu + 1 for gpu in apart))), planned=True)


@dataclass(frozen=True)
class Plan:
    """work: a step of the run; engine: on the GPUs of the trainer; None: elsewhere, or nothing is sampled."""

    cfg: Config
    cluster: Cluster
    assumed: Assumptions
    work: Work
    engine: EnginePlan | None

    @cached_property
    def ranks(self) -> dict[int, list[Phase]]:
        """The phases of one rank of each kind: ranks of one kind need the same in every phase."""
        kinds: dict[tuple[object, ...], int] = {}
        for rank in range(self.cluster.gpus):
            kinds.setdefault(self._kind(rank), rank)
        return {rank: memory.phases(self.work, rank, self._engine_at(rank), self.assumed) for rank in kinds.values()}

    @cached_property
    def worst(self) -> dict[str, tuple[int, Phase]]:
        """Of each phase, the rank that needs most."""
        names = [phase.name for phase in next(iter(self.ranks.values()))]
        each = [
            [
                (phase.total, rank, phase)
                for rank, phases in self.ranks.items()
                for phase in phases
                if phase.name == name
            ]
            for name in names
        ]
        return {name: max(rows, key=lambda row: row[0])[1:] for name, rows in zip(names, each, strict=True)}

    @cached_property
    def parts(self) -> list[Part]:
        return timing.step(Clock(self.cluster, self.assumed), self.work, self.engine)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def problems(self) -> list[str]:
        """Why it does not fit, one sentence each."""
        found = []
        limit = self.cluster.chip.memory
        for name, (rank, phase) in self.worst.items():
            if phase.total > limit:
                over = (phase.total - limit) / (1 << 30)
                largest = sorted(phase.items, key=lambda item: -item.nbytes)[:3]
                what = ", ".join(f"{item.owner} {item.what} {item.nbytes / (1 << 30):.1f}" for item in largest)
                found.append(f"{name}: rank {rank} needs {over:.1f} GiB more than its GPU has (largest: {what})")
        found += self._without_fp8()
        engine = self.engine
        if engine is not None and engine.holds < 1:
            left = engine.cache / (1 << 30)
            found.append(
                f"rollout: {left:.1f} GiB are left for an engine's cache, less than one sequence of full length"
            )
        return found

    def _without_fp8(self) -> list[str]:
        """Recipes that these GPUs cannot compute."""
        chip, models = self.cluster.chip, self.cfg.built().values()
        wanted = {
            fp8.recipe for model in models if (fp8 := model.train.precision.fp8).recipe != "none" and not fp8.emulate
        }
        problems = (chip_problem(recipe, chip.capability, None, chip.name) for recipe in sorted(wanted))
        return [f"precision.fp8.recipe: {problem}" for problem in problems if problem is not None]

    def host(self, rank: int) -> list[Item]:
        """What a rank's process has in host memory."""
        checkpoint = self.cfg.checkpoint
        return memory.host_items(self.work, rank, checkpoint.every_steps is not None and checkpoint.asynchronous)

    @property
    def host_of_node(self) -> float:
        """Bytes of the first node, which has rank 0."""
        first = range(min(self.cluster.gpus, self.cluster.per_node))
        return sum(item.nbytes for rank in first for item in self.host(rank))

    @property
    def checkpoint_bytes(self) -> float:
        """On disk, of one."""
        trained = [model for model in self.work.models.values() if model.is_trained]
        return sum(memory.checkpoint_bytes(model, seat) for model in trained for seat in model.grid.seats)

    def _kind(self, rank: int) -> tuple[object, ...]:
        found: list[object] = [self._engine_at(rank) is not None]
        for model in self.work.models.values():
            seat = model.grid.seat(rank)
            sends = seat.tp == seat.dp == seat.cp == 0
            found += [seat.pp, sends, memory.model_held(model, seat)]
        return tuple(found)

    def _engine_at(self, rank: int) -> EnginePlan | None:
        return self.engine if self.engine is not None and self.engine.at(rank) is not None else None


def make(cfg: Config, cluster: Cluster, archs: Mapping[str, ModelArch], assumed: Assumptions) -> Plan:
    """archs: as `read_shapes` gives them. Raises ValueError for a world that a layout does not fill."""
    work = Work.of(cfg, models_of(cfg, archs, cluster.gpus, on_gpu=True), assumed)
    engines = cfg.engines()
    engine = _engine(engines[0], cluster, work, assumed) if engines is not None else None
    return Plan(cfg, cluster, assumed, work, engine)


def _engine(rollout: RolloutConfig, cluster: Cluster, work: Work, assumed: Assumptions) -> EnginePlan | None:
    if rollout.urls:
        return None
    actor = work.models["actor"]
    kinds = {
        tuple(memory.model_held(m, m.grid.seat(rank)) for m in work.models.values()): rank
        for rank in range(cluster.gpus)
    }
    left = float(cluster.chip.memory)  # of GPUs of their own
    gpus = engine_gpus(rollout, Machine(cluster.gpus, cluster.per_node, gpus=cluster.gpus))
    if any(gpu < cluster.gpus for gpu in gpus):
        left = min(memory.left_for_engine(work, rank, cluster.chip.memory, assumed) for rank in kinds.values())
    return plan_engine(
        actor.arch,
        rollout,
        actor.dtype,
        left,
        gpus=gpus,
        requests=work.size.sampled,
        longest=work.lengths.longest,
        workspace=assumed.engine_workspace,
        context=assumed.engine_context,
    )


def read_shapes(cfg: Config) -> dict[str, ModelArch]:
    """Of every model that the run builds, from config.json alone; the configuration has been checked."""
    named = read_archs(cfg, [], shapes_only=True)
    keys = {"reward": "reward.model"}
    found = {name: named[keys.get(name, name)] for name in cfg.built()}
    return {name: arch for name, arch in found.items() if arch is not None}
