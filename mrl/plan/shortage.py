"""Shortages of GPU memory, their size, and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mrl.config.trainers.base import section_of
from mrl.plan.chips import GIB
from mrl.plan.engine import EnginePlan
from mrl.plan.memory import PhaseMemory, level_of
from mrl.plan.workload import PlannedModel, StepWorkload

RELEASES = {"none": ("cache", "all"), "cache": ("all",), "all": ()}


@dataclass(frozen=True)
class Shortage:
    """text: phase, rank, needed and available GiB, and the largest causes. remedy: what to do.

    counted: it would not fit even without the assumed overheads of the process (CUDA, NCCL, fragments)
    """

    text: str
    remedy: str
    counted: bool = True

    def __str__(self) -> str:
        return f"{self.text}. Remedies: {self.remedy}"


def shortages(
    work: StepWorkload, worst: Mapping[str, tuple[int, PhaseMemory]], engine: EnginePlan | None, memory: int
) -> Iterator[Shortage]:
    """Yields the shortages. worst: for each phase the rank that needs most. memory: bytes of a GPU."""
    for name, (rank, phase) in worst.items():
        if phase.total > memory:
            largest = sorted(phase.items, key=lambda item: -item.nbytes)[:3]
            what = ", ".join(f"{item.owner} {item.what} {item.nbytes / GIB:.1f}" for item in largest)
            needs, has = f"{phase.total / GIB:.1f} GiB", f"{memory / GIB:.1f}"
            counted = sum(item.nbytes for item in phase.items if item.owner != "process")
            text = f"{name}: rank {rank} needs {needs}, its GPU has {has} (largest: {what})"
            yield Shortage(text, "; ".join(_remedies(work, phase, engine)), counted > memory)
    if engine is not None and engine.holds < 1:
        needed, left = engine.context_tokens * engine.token_bytes / GIB, engine.cache / GIB
        text = (
            f"rollout: a sequence of {engine.context_tokens} tokens needs {needed:.1f} GiB of KV cache, and an engine "
            f"has {left:.1f} left besides its weights ({engine.weights / GIB:.1f} GiB)"
        )
        yield Shortage(text, "; ".join([*_away(work, "rollout"), "a larger rollout.memory_fraction or rollout.tensor"]))


def _remedies(work: StepWorkload, phase: PhaseMemory, engine: EnginePlan | None) -> Iterator[str]:
    """Yields remedies for this phase, the cheapest first."""
    awake = sum(item.nbytes for item in phase.items if item.owner == "engine")
    if engine is not None and awake > engine.context and (better := RELEASES[engine.release]):
        if phase.name not in ("rollout", "scoring"):
            yield f"rollout.release: {better[-1]} (the engine holds {awake / GIB:.1f} GiB meanwhile)"
    yield from _away(work, phase.name)
    model = work.models.get(phase.name.removesuffix("_update"))
    if model is not None and model.is_trained:
        yield from _smaller_passes(model, phase, work.lengths.longest)
    yield "a larger parallel.tensor or parallel.pipeline, or more GPUs (mrl plan CONFIG --search)"


def _away(work: StepWorkload, phase: str) -> Iterator[str]:
    """Yields the keys of models that could offload more in this phase."""
    for name, model in work.models.items() if work.is_sampling else ():
        level, key = level_of(phase, model), f"{section_of(name)}.offload"
        if level == "nothing" and model.train.offload != "all":
            yield f"{key}: all"
        elif level == "parameters" and model.train.offload == "none" and model.is_trained:
            yield f"{key}: optimizer"


def _smaller_passes(model: PlannedModel, phase: PhaseMemory, longest: int) -> Iterator[str]:
    saved = sum(item.nbytes for item in phase.items if item.what == "activations") / GIB
    if model.train.recompute != "full":
        yield f"{model.name}.recompute: full (keeps about a tenth of {saved:.1f} GiB of activations)"
    tokens = model.train.max_tokens_per_microbatch
    if tokens > longest:
        yield f"a smaller {model.name}.max_tokens_per_microbatch than {tokens}"
    elif model.layout.context == 1:
        yield f"{model.name}.parallel.context: 2, which splits the longest sequence"
