"""Search for layouts: plans every layout that model, node and world allow, and sorts those that fit by speed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from mrl.config.checks import layout as layout_checks
from mrl.config.checks import lora as lora_checks
from mrl.config.checks import precision as precision_checks
from mrl.config.checks import vision as vision_checks
from mrl.config.checks.base import Archs
from mrl.config.derived import Machine, layout_text
from mrl.config.sections.models import ParallelConfig, TrainConfig
from mrl.config.trainers.base import Config
from mrl.config.trainers.table import trainer_of
from mrl.families import ModelArch
from mrl.plan.chips import GIB, Assumptions, Cluster
from mrl.plan.plan import Plan, machine_of, make_plan

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
MOST_STAGES, MOST_CONTEXT = 16, 8
LENGTH_OF_A_CUT = 4096  # minimum tokens of the longest sequence per context-parallel rank


@dataclass(frozen=True)
class Candidate:
    """A layout of all trained models, and its plan. tokens: the largest micro-batch."""

    layout: ParallelConfig
    recompute: Recompute
    tokens: int
    plan: Plan

    @property
    def tightest(self) -> float:
        """Bytes of the rank that needs most, in its peak phase."""
        return max(phase.total for _, phase in self.plan.worst.values())

    def words(self) -> str:
        layout = layout_text(self.layout, self.plan.work.models["actor"].grid.dp)
        return f"{layout}, {self.tokens} tokens, recompute {self.recompute}"


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    fitting: fastest first; of equally fast ones (within 1%) the one that leaves more memory. refused: number of layouts
    refused by the checks, by reason. nearest: of those that need too much memory the one that needs least
    """

    fitting: list[Candidate]
    refused: Counter[str]
    nearest: Candidate | None


def search(cfg: Config, cluster: Cluster, archs: Mapping[str, ModelArch], assumed: Assumptions) -> SearchResult:
    """Returns the result over all layouts of this world."""
    found, tight, refused = [], [], Counter[str]()
    machine = machine_of(cfg, cluster.gpus, cluster.per_node)
    # shapes by the checks' names of models
    checked = {name: archs.get({"reward.model": "reward"}.get(name, name), archs["actor"]) for name in cfg.models()}
    for layout in _layouts(cfg, cluster, archs["actor"]):
        for recompute, tokens in product(RECOMPUTES, _micro_batches(cfg)):
            variant = _with(cfg, layout, recompute, tokens)
            if (problem := next(_problems(variant, checked, machine), None)) is not None:
                refused[str(problem)] += 1
                break
            candidate = Candidate(layout, recompute, tokens, make_plan(variant, cluster, archs, assumed))
            if not candidate.plan.shortages and candidate.tightest <= (1 - assumed.spare_share) * cluster.chip.memory:
                found.append(candidate)
                break  # more recomputation is slower
            tight.append(candidate)
    best = min((each.plan.seconds for each in found), default=0.0)
    found.sort(key=lambda each: (int(100 * each.plan.seconds / best), each.tightest))
    return SearchResult(found, refused, min(tight, key=lambda each: each.tightest, default=None))


def _layouts(cfg: Config, cluster: Cluster, arch: ModelArch) -> Iterator[ParallelConfig]:
    """Yields layouts with tensor parallelism within a node, and context parallelism for long sequences."""
    longest = (cfg.step_size().prompt_tokens or 0) + (cfg.step_size().response_tokens or 0)
    tensors = [n for n in range(1, cluster.per_node + 1) if cluster.per_node % n == 0]
    stages = [n for n in range(1, MOST_STAGES + 1) if arch.num_layers % n == 0]
    cuts = [n for n in (1, 2, 4, MOST_CONTEXT) if n == 1 or longest // n >= LENGTH_OF_A_CUT]
    experts = [n for n in range(1, arch.experts.count + 1) if arch.experts.count % n == 0] if arch.experts else [1]
    for tensor, pipeline, context, expert in product(tensors, stages, cuts, experts):
        layout = ParallelConfig(tensor=tensor, pipeline=pipeline, context=context, expert=expert)
        if cluster.gpus % (tensor * pipeline * context) == 0 and expert * pipeline <= cluster.gpus:
            yield layout


def _problems(cfg: Config, archs: Archs, machine: Machine) -> Iterator[object]:
    yield from layout_checks.check(cfg, archs, machine)
    yield from precision_checks.check(cfg, archs, machine)
    yield from lora_checks.check(cfg, archs)
    yield from vision_checks.check(cfg, archs)
    yield from trainer_of(cfg).check(cfg, archs, machine)


def _micro_batches(cfg: Config) -> list[int]:
    """Micro-batch sizes in tokens: the configured one, and the longest sequence."""
    given, size = cfg.actor.max_tokens_per_microbatch, cfg.step_size()
    longest = (size.prompt_tokens or 0) + (size.response_tokens or 0)
    return [given, longest] if 0 < longest < given else [given]


def _with(cfg: Config, layout: ParallelConfig, recompute: Recompute, tokens: int) -> Config:
    """Returns the configuration with this layout for every trained model; the others follow the actor."""
    changed: dict[str, Any] = {}
    for name, use in cfg.models().items():
        section = dict(cfg).get(name)
        if use.train is not None and isinstance(section, TrainConfig):
            keys = {"parallel": layout, "recompute": recompute, "max_tokens_per_microbatch": tokens}
            changed[name] = section.model_copy(update=keys)
        elif name in ("ref", "teacher") and section is not None:
            changed[name] = section.model_copy(update={"parallel": None})
    return cfg.model_copy(update=changed)


def lines(result: SearchResult, most: int = 10) -> Iterator[str]:
    """Yields a table and the reasons for the best layout, or why there is none."""
    found = result.fitting
    if not found:
        yield from _why_none(result)
        return
    best = found[0]
    yield f"{'layout':<56} {'step':>8} {'peak memory':>12}  largest loss against the best"
    for each in found[:most]:
        lost = _lost(each, best) if each is not best else "the best"
        yield f"{each.words():<56} {each.plan.seconds:6.0f} s {each.tightest / GIB:8.1f} GiB  {lost}"
    yield from ("", *_reasons(found))


def _why_none(result: SearchResult) -> Iterator[str]:
    yield "No layout fits."
    if (each := result.nearest) is not None:
        spare = each.plan.assumed.spare_share
        needs = f"{each.tightest / GIB:.1f} of {each.plan.cluster.chip.memory / GIB:.1f} GiB"
        yield f"Closest: {each.words()}: needs {needs}, and {spare:.0%} must stay free (spare_share)."
        yield from (f"  {shortage.text}" for shortage in each.plan.shortages)
        yield "Use more GPUs, offload: all, rollout.release: all, or a smaller max_tokens_per_microbatch."
    for reason, count in result.refused.most_common(3):
        yield f"{count} layout{'s' * (count > 1)} refused, for example: {reason}"


def _lost(each: Candidate, best: Candidate) -> str:
    mine, theirs = _by_kind(each.plan), _by_kind(best.plan)
    gaps = {kind: mine.get(kind, 0.0) - theirs.get(kind, 0.0) for kind in mine.keys() | theirs.keys()}
    kind = max(gaps, key=lambda kind: gaps[kind])
    return f"{gaps[kind]:+.0f} s {kind}" if gaps[kind] >= 0.5 else "less than half a second"


KINDS = ("pipeline bubble", "tensor parallelism", "context parallelism", "expert parallelism", "between stages",
         "data parallelism", "layers", "optimizer", "responses")  # fmt: skip


def _by_kind(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in plan.parts:
        kind = next((kind for kind in KINDS if kind in part.what), part.phase)
        found[kind] = found.get(kind, 0.0) + part.seconds
    return found


def _reasons(found: Sequence[Candidate]) -> Iterator[str]:
    """Yields, for each parallelism of the best layout, the result of less of it; the same for recomputation."""
    best = found[0]
    for name, axis in (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context"), ("EP", "expert")):
        size = dict(best.layout)[axis]
        if size > 1:
            smaller = [each for each in found if dict(each.layout)[axis] < size]
            other = "no layout with less fits"
            if smaller:
                takes = f"{smaller[0].plan.seconds:.0f} s and {smaller[0].tightest / GIB:.0f} GiB"
                other = f"the best layout with less takes {takes} ({smaller[0].words()})"
            yield f"{name}{size}: {other}."
    if best.recompute != "none":
        yield f"recompute {best.recompute}: this layout does not fit with less."


def best_configuration(found: Sequence[Candidate], config: Path, overrides: Mapping[str, Any], out: Path) -> str:
    """Returns a configuration for `out`, based on `config` with `overrides`, that has the best layout.

    It sets every key of the layout, as the base's values would apply to missing ones.
    """
    best, tree = found[0], dict(overrides)
    cluster, planned, sizes = best.plan.cluster, best.plan.cfg, best.layout.model_dump()
    _set(tree, "run", nodes=cluster.nodes, nproc=min(cluster.per_node, cluster.gpus))
    for model in best.plan.work.models.values():
        if model.is_trained:
            keys = {"recompute": best.recompute, "max_tokens_per_microbatch": best.tokens}
            _set(tree, model.name, parallel=dict(sizes), **keys)
    for name in ("ref", "teacher"):
        if name in planned.models() and name in dict(planned):
            _set(tree, name, parallel=None)
    base = os.path.relpath(config.absolute(), out.absolute().parent)
    reasons = "".join(f"# {line}\n" for line in _reasons(found))
    head = f"# Written by mrl plan --search for {cluster.gpus} x {cluster.chip.name}: {best.words()}\n{reasons}"
    return head + yaml.safe_dump({"base": base, **tree}, sort_keys=False)


def _set(tree: dict[str, Any], section: str, **keys: Any) -> None:
    tree[section] = {**(tree.get(section) or {}), **keys}
