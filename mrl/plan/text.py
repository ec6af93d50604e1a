"""Plan as text for a terminal, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.derived import stage_layers
from mrl.config.trainers.base import Config
from mrl.families.flops import num_parameters
from mrl.plan.chips import GIB
from mrl.plan.memory import MemoryItem
from mrl.plan.plan import Plan
from mrl.plan.workload import PlannedModel, StepWorkload


def lines(plan: Plan) -> Iterator[str]:
    """Yields the whole plan."""
    yield from _head(plan)
    of_what = "GPU" if plan.on_gpu else "rank"
    overlap = "generation overlaps with training" if plan.samples_during_training else "no phases overlap"
    for title, part in (
        ("Batch", batch(plan)),
        ("Ranks", grid(plan)),
        (f"Memory per {of_what} in GiB; for each phase, the rank that needs most", memory(plan)),
        ("Host memory and disk" if plan.on_gpu else "Memory and disk of a node", host_and_disk(plan)),
        (f"Step time in seconds; {overlap}", seconds(plan)),
        ("Delta weight sync", delta_sync(plan)),
        ("Assumptions, not measured with mrl", assumed(plan)),
    ):
        if shown := [f"  {line}" for line in part]:
            yield from ("", title, *shown)
    yield ""
    yield verdict(plan)


def verdict(plan: Plan) -> str:
    """Returns in words whether the run fits, and its bottleneck."""
    if plan.problems:
        each = [f"  {shortage.text}\n    -> {shortage.remedy}" for shortage in plan.shortages]
        return "\n".join(["The run does not fit:", *each])
    if not plan.on_gpu:
        needs = f"{plan.host_of_node / GIB:.1f} GiB"
        return f"On CPUs: a node needs {needs} in addition to the programs themselves; step time is not predicted."
    name, (rank, phase) = max(plan.worst.items(), key=lambda item: item[1][1].total)
    room = (plan.cluster.chip.memory - phase.total) / GIB
    fits = f"The run fits: at its peak ({name}, rank {rank}), {room:.1f} GiB are free."
    return " ".join(filter(None, (fits, bottleneck(plan), deadline_warning(plan))))


def deadline_warning(plan: Plan) -> str:
    """Returns a warning if a stopped run has less time than it needs; else an empty string."""
    needed, limit = plan.save_seconds, plan.cfg.resilience.save_deadline_s
    if needed <= limit:
        return ""
    said = f"After a signal to stop, the run may need {needed:.0f} s to end its step and save, and"
    return (
        f"{said} resilience.save_deadline_s is {limit:g} s: raise it, and set the scheduler's notice a minute longer."
    )


def phase_seconds(plan: Plan) -> dict[str, float]:
    """Returns the seconds of one step, by phase."""
    totals: dict[str, float] = {}
    for part in plan.parts:
        totals[part.phase] = totals.get(part.phase, 0.0) + part.seconds
    return totals


def bottleneck(plan: Plan) -> str:
    totals = phase_seconds(plan)
    part = max(plan.parts, key=lambda part: min(part.seconds, totals[part.phase]))  # without its hidden part
    share = min(part.seconds, totals[part.phase]) / plan.seconds
    what = f"{part.phase}: {part.what} ({part.limit})"
    seconds = f"{plan.seconds:.{0 if plan.seconds >= 1 else 3}f} s"
    return f"A step takes about {seconds}; its largest part ({share:.0%}) is {what}."


def _head(plan: Plan) -> Iterator[str]:
    cluster, chip = plan.cluster, plan.cluster.chip
    each = f"{cluster.gpus} x {chip.name}" if plan.on_gpu else with_noun(cluster.gpus, "process")
    where = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes of {cluster.per_node}"
    yield f"{plan.cfg.run.name}: {each} on {where}{'' if plan.on_gpu else ', without GPUs'}"
    for model in plan.work.models.values():
        whole = num_parameters(model.arch, model.role)
        size = f"{whole / 1e9:.1f}B" if whole >= 1e8 else f"{whole / 1e6:.1f}M"
        held = f"{len(model.arch.layers)} layers, {size} weights"
        how = "trained" if model.is_trained else "not trained"
        if len(model.adapters) > 1:
            how = f"{len(model.adapters)} adapters trained"
        yield f"  {model.name:<8} {model.words}; {held}; {how}; {model.kind} layers, offload {model.train.offload}"
    if plan.engine is not None and (own := plan.cfg.engine_nodes()) is not None:
        engine, gpus = plan.engine, plan.engine.engines * plan.engine.tensor
        where = f"on {own.nodes} separate nodes (mrl serve): {gpus} x {chip.name} in addition to the trainer's"
        yield f"  {'engines':<8} {engine.engines} x TP{engine.tensor}, {where}"
    elif plan.engine is not None:
        engine = plan.engine
        shared = any(engine.at(rank) is not None for rank in range(cluster.gpus))
        where = ", colocated on the trainer's GPUs" if shared else ", on separate GPUs"
        placed = f"{where}, release {engine.release}" if plan.on_gpu else ""
        yield f"  {'engines':<8} {engine.engines} x TP{engine.tensor}{placed}"
    elif plan.cfg.engines() is not None:
        yield f"  {'engines':<8} at rollout.urls: not planned; step time does not include generation"


def with_noun(number: float, what: str) -> str:
    """Returns a number with its noun, such as "1 update" or "2 batches"."""
    return f"{number:g} {what}" + ("" if number == 1 else "es" if what.endswith(("s", "ch")) else "s")


def batch(plan: Plan) -> Iterator[str]:
    """Yields the step's arithmetic, from prompts to ranks."""
    for adapter, work in plan.works.items():
        cfg = plan.cfg.adapter_configs()[adapter] if adapter else plan.cfg
        yield from (f"{adapter}: {line}" if adapter else line for line in _batch_of(cfg, work))


def _batch_of(cfg: Config, work: StepWorkload) -> Iterator[str]:
    size = work.size
    if size.sampled:
        samples = f"{size.sampled // size.prompts} = {with_noun(size.sampled, 'sample')}"
        yield f"{with_noun(size.prompts, 'prompt')} x {samples} per step"
        longest = f"{size.prompt_tokens} + {size.response_tokens} = {work.lengths.longest}"
        mean = f"{work.lengths.prompt:.0f} + {work.lengths.response:.0f}"
        yield f"a sample: at most {longest} tokens of prompt and response; assumed mean {mean}"
    for name, words in cfg.summary():
        if name in ("dynamic sampling", "replay"):
            yield f"{name}: {words}; the times below are for one round without it"
    minibatches = size.learnt // size.minibatch
    updates = (
        f"{size.epochs} x {minibatches} = {with_noun(size.epochs * minibatches, 'update')} of {size.minibatch} samples"
    )
    yield f"{size.learnt} training samples -> {updates}"
    for name, each in work.batches.items():
        model = work.models[name]
        what = "an update" if model.is_trained else "a forward pass over all samples"
        replicas = f" on each of {model.grid.dp} replicas" if model.grid.dp > 1 else ""
        per_rank = f", {each.tokens / model.layout.context:.0f} per rank" if model.layout.context > 1 else ""
        yield (
            f"{name}: {what} processes {with_noun(each.per_replica, 'sample')}{replicas}, in "
            f"{with_noun(each.count, 'micro-batch')} of {each.samples:.1f} samples, {each.tokens:.0f} tokens (at most "
            f"{model.train.max_tokens_per_microbatch}){per_rank}"
        )


def grid(plan: Plan) -> Iterator[str]:
    """Yields node by node the ranks' coordinates, for each layout."""
    shown: list[object] = []
    for model in plan.work.models.values():
        if model.layout in shown:
            continue
        shown.append(model.layout)
        same = [other.name for other in plan.work.models.values() if other.layout == model.layout]
        stages = "/".join(map(str, stage_layers(model.layout, model.arch.num_layers)))
        yield f"{', '.join(same)}: {model.words}; layers per stage {stages}"
        per_node, last = plan.cluster.per_node, plan.cluster.gpus
        for node, first in enumerate(range(0, last, per_node)):
            ranks = range(first, min(first + per_node, last))
            numbers = f"ranks {first}-{ranks[-1]}" if len(ranks) > 1 else f"rank {first}"
            yield f"  node {node}: {numbers}  {_spans(model, ranks)}{_engines(plan, ranks)}"


def _spans(model: PlannedModel, ranks: Sequence[int]) -> str:
    all_coords = [model.grid.coordinates(rank) for rank in ranks]
    found = []
    for axis in ("pp", "dp", "cp", "tp", *(("ep",) if model.layout.expert > 1 else ())):
        values = sorted({dict(vars(coords))[axis] for coords in all_coords})
        found.append(f"{axis} {values[0]}" if len(values) == 1 else f"{axis} {values[0]}-{values[-1]}")
    return "  ".join(found)


def _engines(plan: Plan, ranks: Sequence[int]) -> str:
    numbers = sorted({number for rank in ranks if (number := plan.placement.engine_of.get(rank)) is not None})
    if not numbers:
        return ""
    return f"  engine {numbers[0]}" if len(numbers) == 1 else f"  engines {numbers[0]}-{numbers[-1]}"


def memory(plan: Plan) -> Iterator[str]:
    limit = plan.cluster.chip.memory / GIB
    for name, (rank, phase) in plan.worst.items():
        mark = "" if phase.total <= plan.cluster.chip.memory else "   <-- too much"
        most = f" of {limit:.1f}{mark}" if plan.on_gpu else ""
        yield f"{name:<16} rank {rank:<4} {_gib(phase.total):>7}{most}"
        yield f"    {_items(phase.items)}"
    if plan.engine is not None and plan.on_gpu:
        engine = plan.engine
        yield (
            f"per GPU of an engine: weights {engine.weights / GIB:.1f}, KV cache {engine.cache / GIB:.1f} = "
            f"{engine.cache_tokens} tokens: {engine.holds} sequences of {engine.context_tokens}; the run requests "
            f"{engine.wanted} concurrently"
        )
        if engine.holds < engine.wanted:
            yield "  (the others wait in the queue, or the engine preempts some when responses grow long)"


def _items(items: Sequence[MemoryItem]) -> str:
    shown = [item for item in items if item.nbytes >= 0.0005 * GIB]
    return ", ".join(f"{item.owner} {item.what} {_gib(item.nbytes)}" for item in shown) or "less than 1 MiB each"


def _gib(nbytes: float) -> str:
    """Formats GiB; tiny models get three decimals."""
    return f"{nbytes / GIB:.1f}" if nbytes >= GIB / 10 else f"{nbytes / GIB:.3f}"


def host_and_disk(plan: Plan) -> Iterator[str]:
    """Yields host memory and disk."""
    models = "" if plan.on_gpu else " (including models, and weights and KV caches of all engines)"
    yield f"host memory of the first node: {_gib(plan.host_of_node)} GiB{models}; rank 0 of it:"
    yield f"    {_items(plan.host(0))}"
    if plan.cfg.checkpoint.every_steps is not None:
        one, kept = plan.checkpoint_bytes, plan.cfg.checkpoint.keep_last + 1
        write = f", {plan.write_seconds:.0f} s" if plan.on_gpu else ""
        all_of_them = f"the newest {kept - 1} and one being written: {_gib(one * kept)} GiB"
        yield f"a checkpoint: {_gib(one)} GiB{write}; {all_of_them}"


def seconds(plan: Plan) -> Iterator[str]:
    if not plan.parts:
        return
    totals = phase_seconds(plan)
    digits = 1 if plan.seconds >= 1 else 4
    for phase, total in totals.items():
        yield f"{phase:<16} {total:8.{digits}f}   {total / plan.seconds:4.0%}"
        for part in plan.parts:
            if part.phase == phase and abs(part.seconds) >= 0.01 * total:
                yield f"    {part.seconds:8.{digits}f}  {part.what} ({part.limit})"
    yield f"{'step':<16} {plan.seconds:8.{digits}f}"


def delta_sync(plan: Plan) -> Iterator[str]:
    """Yields the shares of changed elements below which sync.delta has fewer bytes, and takes less time."""
    if (found := plan.delta_break_even) is None:
        return
    yield f"has fewer bytes than whole weights if less than {found.smaller_below:.0%} of the elements change"
    if found.faster_below is None:
        return
    link, limit = f"at {found.speed / 1e9:.1f} GB/s ({found.link})", f"{found.slowest / 1e9:.1f} GB/s"
    if found.faster_below > 0:
        yield f"is faster {link} if less than {found.faster_below:.0%} change; on links above {limit} it never is"
    else:
        yield f"is never faster {link}, only on links below {limit}: the comparison moves all weights over PCIe twice"


def assumed(plan: Plan) -> Iterator[str]:
    rows = plan.assumed.rows() if plan.on_gpu else []
    for start in range(0, len(rows), 3):
        yield "   ".join(f"{name} {value}" for name, value in rows[start : start + 3])


def data(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON-ready values, in bytes and seconds."""
    return {
        "fits": not plan.problems,
        "problems": plan.problems,
        "gpu": plan.cluster.chip.name,
        "gpu_bytes": plan.cluster.chip.memory,
        "batch": {
            f"{adapter}/{name}" if adapter else name: vars(each)
            for adapter, work in plan.works.items()
            for name, each in work.batches.items()
        },
        "memory": {
            name: {"rank": rank, "bytes": phase.total, "items": [vars(item) for item in phase.items]}
            for name, (rank, phase) in plan.worst.items()
        },
        "engine": vars(plan.engine) if plan.engine is not None else None,
        "engine_nodes": own.nodes if (own := plan.cfg.engine_nodes()) is not None else 0,
        "host_bytes_of_node": plan.host_of_node,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "seconds": plan.seconds,
        "save_seconds": plan.save_seconds,
        "delta_sync": vars(found) if (found := plan.delta_break_even) is not None else None,
        "parts": [vars(part) for part in plan.parts],
        "tensors_of_rank_0": {phase.name: phase.tensors for phase in plan.ranks[0]},
        "assumed": vars(plan.assumed),
    } | plan.placement.data()
