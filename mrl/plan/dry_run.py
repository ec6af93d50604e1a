"""Everything up to the first step, for the whole world, in this process: real code on models without memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mrl.config.checks.all import check_all
from mrl.config.derived import Machine, summary
from mrl.config.sections.precision import PrecisionConfig
from mrl.config.trainers.base import AnyConfig
from mrl.data.balance import costs_of, plan_micro_batches
from mrl.data.packing import sequence_align
from mrl.families.flops import ForwardFlops
from mrl.plan import text
from mrl.plan.built_model import BuiltModel, build
from mrl.plan.memory import elements_of_model
from mrl.plan.parameters import ModelElements
from mrl.plan.plan import Plan
from mrl.plan.workload import PlannedModel, StepWorkload


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold equally much of a model, and what the first of them really holds."""

    stage: int
    ranks: tuple[int, ...]
    planned: ModelElements
    built: BuiltModel

    @property
    def is_right(self) -> bool:
        return self.built.held == self.planned


def rank_kinds(model: PlannedModel) -> Iterator[RankKind]:
    """Yields the kinds over all ranks, building one rank of each."""
    found: dict[tuple[int, ModelElements], list[int]] = {}
    for coords in model.grid.all_coordinates:
        found.setdefault((coords.pp, elements_of_model(model, coords)), []).append(coords.rank)
    local = model.train.model_copy(update={"layers": "local", "precision": PrecisionConfig()})
    dtype = {2: torch.bfloat16, 4: torch.float32}[model.dtype]
    for (stage, planned), ranks in found.items():
        made = build(
            model.arch,
            model.path,
            model.role,
            local,
            ranks[0],
            model.grid.world,
            dtype,
            overlap=model.overlap,
            tower=model.trains_tower,
            loras=model.loras,
        )
        yield RankKind(stage, tuple(ranks), planned, made)


@dataclass
class DryRun:
    """Dry run of a plan; `lines` runs it.

    problems: what would stop the run, one sentence each, complete once `lines` ends
    absent: what is only missing on this machine
    """

    plan: Plan

    def __post_init__(self) -> None:
        self.problems: list[str] = list(self.plan.problems)
        self.missing_files = missing_files(self.plan.cfg)

    def lines(self) -> Iterator[str]:
        cfg, cluster = self.plan.cfg, self.plan.cluster
        began = time.monotonic()
        yield from (f"{name:>8}  {value}" for name, value in summary(cfg, cluster.gpus))
        yield from ("", "Files on this machine")
        yield from (
            f"  {line}" for line in self.missing_files or ["all files that the configuration names are present"]
        )
        yield from ("", "Ranks, built without allocating tensors")
        for model in self.plan.work.models.values():
            yield from (f"  {line}" for line in self._ranks(model))
        yield from ("", "Batch")
        yield from (f"  {line}" for line in text.batch(self.plan))
        for name, work in self.plan.works.items():
            lines = (self._micro_batches(model, work) for model in work.models.values())
            yield from (f"  {name}: {line}" if name else f"  {line}" for line in lines)
        yield from ("", f"Memory per {cluster.chip.name if self.plan.on_gpu else 'rank'} in GiB")
        yield from (f"  {line}" for line in text.memory(self.plan))
        yield from ("", text.verdict(self.plan), f"dry run: {time.monotonic() - began:.0f} s")

    def _ranks(self, model: PlannedModel) -> Iterator[str]:
        """Compares one rank of every kind with the plan: its model, Megatron's buffers and its optimizer's shard."""
        for kind in rank_kinds(model):
            if not kind.is_right:
                planned, built = kind.planned, kind.built.held
                self.problems.append(f"{model.name}, rank {kind.ranks[0]}: the plan has {planned}, the model {built}")
            count, held, ranks = sum(map(len, kind.built.names)), kind.built.held, kind.ranks
            yield (
                f"{model.name}, stage {kind.stage}, {len(ranks)} rank{'s' * (len(ranks) > 1)} like rank {ranks[0]}: "
                f"{count} parameter tensors, {held.weights} elements, {held.shard} in the rank's optimizer shard: "
                f"{'as planned' if kind.is_right else 'NOT as planned'}"
            )

    def _micro_batches(self, model: PlannedModel, work: StepWorkload) -> str:
        """Runs the real planner on samples of every length up to the longest."""
        layout = model.layout
        samples = work.size.minibatch if model.is_trained else work.size.learnt
        lengths = torch.linspace(2, work.lengths.longest, samples).long()
        plan = plan_micro_batches(
            lengths,
            model.grid.dp,
            model.train.max_tokens_per_microbatch,
            sequence_align(layout.context),
            multiple_of=layout.pipeline if layout.virtual_pipeline else 1,
            costs=costs_of(ForwardFlops.of(model.arch, model.role), lengths, lengths),
        )
        totals = [sum(int(lengths[i]) for group in replica for i in group) for replica in plan]
        return (
            f"{model.name}: {samples} samples of 2 to {work.lengths.longest} tokens pack into {len(plan[0])} "
            f"micro-batches per replica; replicas have {min(totals)} to {max(totals)} tokens"
        )


def missing_files(cfg: AnyConfig) -> list[str]:
    """Returns what `mrl train` would refuse on this machine: files that may exist on the run's machines."""
    machine = Machine.for_launch(cfg)
    here = check_all(cfg, machine)
    elsewhere = {str(problem) for problem in check_all(cfg, Machine(machine.world_size, 1, planned=True))}
    found = [problem for problem in here if str(problem) not in elsewhere and "run.nodes" not in problem.keys]
    return [f"missing: {problem}" for problem in found]
