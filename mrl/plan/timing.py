"""Seconds of a step's parts: computation and communication at an assumed share of the chip's peak rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mrl.families import ModelArch
from mrl.families.flops import BACKWARD, BACKWARD_OF_FROZEN, ForwardFlops
from mrl.plan import fp8, tower
from mrl.plan.chips import Assumptions, Cluster
from mrl.plan.engine import EnginePlan
from mrl.plan.memory import elements_of_model, offloaded_memory
from mrl.plan.workload import MicroBatchPlan, PlannedModel, SampleLengths, StepWorkload


@dataclass(frozen=True)
class TimedPart:
    """limit: the bounding resource, in words."""

    phase: str
    what: str
    seconds: float
    limit: str


def token_flops(arch: ModelArch, length: float) -> float:
    """Returns the operations of a token's forward pass through all layers, attending to `length` / 2 tokens on
    average.
    """
    forward = ForwardFlops.of(arch)
    return forward.per_token + forward.per_pair * length / 2


def model_flops(model: PlannedModel, samples: float, lengths: SampleLengths) -> tuple[float, float, float]:
    """Returns (layers' matrices, attention, head) operations of a forward pass of all samples."""
    forward, tokens = ForwardFlops.of(model.arch, model.role), samples * lengths.mean
    attention = tokens * forward.per_pair * lengths.mean / 2
    return tokens * forward.per_token, attention, samples * lengths.response * forward.per_output


@dataclass(frozen=True)
class ClusterRates:
    """Assumed rates of a cluster."""

    cluster: Cluster
    assumed: Assumptions

    @property
    def flops(self) -> float:
        return self.cluster.chip.bf16 * self.assumed.matmul_share

    @property
    def hbm(self) -> float:
        return self.cluster.chip.hbm * self.assumed.hbm_share

    def link(self, model: PlannedModel, *axes: str) -> tuple[float, str]:
        """Returns (bytes a second of a rank, name) of the link between the ranks of these groups."""
        chip, share = self.cluster.chip, self.assumed.link_share
        if model.grid.spread(*axes, node=self.cluster.per_node) > 1:
            return chip.network * share, "network"
        return chip.nvlink * share, "NVLink"

    @property
    def pcie(self) -> float:
        return self.cluster.chip.pcie * self.assumed.link_share

    @property
    def network(self) -> float:
        return self.cluster.chip.network * self.assumed.link_share


def passes(
    rates: ClusterRates, model: PlannedModel, phase: str, batches: MicroBatchPlan, lengths: SampleLengths, trained: bool
) -> Iterator[TimedPart]:
    """Yields the parts of a mini-batch's passes: forward, and backward if `trained`. Parts add up without overlap."""
    matrices, attention, head = model_flops(model, batches.per_replica * model.grid.dp, lengths)
    chip, assumed = rates.cluster.chip, rates.assumed
    layers = matrices / fp8.layers_rate(model, chip, assumed) + attention / rates.flops
    selective = 0.1 if model.arch.experts is not None else 0.6  # it recomputes the products of dense MLPs
    again = {"none": 0.0, "selective": selective, "full": 1.0}[model.train.recompute]
    backward = BACKWARD_OF_FROZEN if model.adapters else BACKWARD
    times, head_times = (1 + backward + again, 2 + backward) if trained else (1, 1)
    p, name = model.layout, model.name
    ranks = model.grid.world
    skew = assumed.experts_skew if model.arch.experts is not None else 1.0
    compute = layers * times * skew / ranks
    yield TimedPart(phase, f"{name} layers{fp8.words(model)}", compute, "arithmetic")
    last = ranks / p.pipeline
    per_rank = head * head_times / last
    yield TimedPart(phase, f"{name} head", per_rank / fp8.head_rate(model, chip, assumed), "arithmetic")
    if seen := tower.flops(model, batches.per_replica, lengths, trained=trained):
        what = f"{name} images, on every rank of the first stage"
        yield TimedPart(phase, what, seen / rates.flops, "arithmetic")
    if p.pipeline > 1:
        bubble = (p.pipeline - 1) / (batches.count * (p.virtual_pipeline or 1))
        what = f"{name} pipeline bubble, {batches.count} micro-batches for {p.pipeline} stages"
        yield TimedPart(phase, what, compute * bubble, "too few micro-batches")
    yield from _communication(rates, model, phase, batches, 2 + again if trained else 1)


def _communication(
    rates: ClusterRates, model: PlannedModel, phase: str, batches: MicroBatchPlan, moved: float
) -> Iterator[TimedPart]:
    """Yields the communication of all micro-batches of a rank.

    moved: multiple of a forward pass's traffic; backward passes and recomputation add to it.
    """
    p, arch, name = model.layout, model.arch, model.name
    tokens = batches.count * batches.tokens / p.context
    wide = tokens * arch.hidden_size * model.dtype
    layers = arch.num_layers / p.pipeline
    if p.tensor > 1:
        speed, link = rates.link(model, "tp")
        nbytes = layers * 4 * wide * (p.tensor - 1) / p.tensor * moved
        yield TimedPart(phase, f"{name} tensor parallelism", nbytes / speed, link)
    if p.context > 1:
        speed, link = rates.link(model, "cp")
        kv = 2 * tokens * arch.num_kv_heads / p.tensor * arch.head_dim * model.dtype
        yield TimedPart(phase, f"{name} context parallelism", layers * kv * (p.context - 1) * moved / speed, link)
    if p.expert > 1 and arch.experts is not None:
        speed, link = rates.link(model, "ep")
        routed = tokens / p.tensor * arch.experts.per_token * arch.hidden_size * model.dtype
        nbytes = layers * 2 * routed * (p.expert - 1) / p.expert * moved * rates.assumed.experts_skew
        yield TimedPart(phase, f"{name} expert parallelism", nbytes / speed, link)
    if p.pipeline > 1:
        speed, link = rates.link(model, "pp")
        hops = 2 * (p.virtual_pipeline or 1) * (2 if moved >= 2 else 1)
        share = p.tensor if p.sequence else 1
        yield TimedPart(phase, f"{name} between stages", hops * wide / share / speed, link)


def optimizer_step(rates: ClusterRates, model: PlannedModel, phase: str) -> Iterator[TimedPart]:
    """Yields the parts once an update: gradient reduction, Adam, weight gathering."""
    own, size = elements_of_model(model.updated, model.grid.coordinates(0)), model.grid.dp * model.layout.context
    if size > 1:
        speed, link = rates.link(model, "dp", "cp")
        weights = own.buffer * model.dtype - fp8.saved_weight_bytes(model, model.grid.coordinates(0)) / 2
        nbytes = (own.buffer * 4 + weights) * (size - 1) / size
        yield TimedPart(phase, f"{model.name} gradients and weights over data parallelism", nbytes / speed, link)
    touched = own.shard * (5 * 4 + 2 * 4 + model.dtype) + own.buffer * 4  # two moments, mains, gradients; zeroing
    yield TimedPart(phase, f"{model.name} optimizer", touched / rates.hbm, "memory bandwidth")


def rollout(rates: ClusterRates, work: StepWorkload, engine: EnginePlan) -> Iterator[TimedPart]:
    """Yields the parts of a rollout: each engine prefills its prompts and decodes, with as many requests as it has
    and holds.
    """
    actor, chip, size = work.models["actor"], rates.cluster.chip, work.size
    arch, lengths, assumed = actor.arch, work.lengths, rates.assumed
    requests = size.sampled / engine.engines
    mean_tokens = lengths.prompt + lengths.response / 2
    room = max(1.0, engine.cache_tokens / (lengths.mean or 1))
    at_once = max(1.0, min(engine.wanted, room, requests))
    prefill = requests * lengths.prompt * token_flops(arch, lengths.prompt)
    speed = engine.tensor * chip.bf16 * assumed.prefill_share
    yield TimedPart("rollout", "prefill of prompts", prefill / speed, "arithmetic")
    if seen := tower.flops(actor, requests, lengths):
        yield TimedPart("rollout", "images", seen / speed, "arithmetic")  # each GPU processes a share of them
    steps = max(requests * lengths.response / at_once, float(size.response_tokens or 0))
    busy = requests * lengths.response / steps
    read = engine.weights * _touched(arch, busy) + busy * mean_tokens * engine.token_bytes
    head = ForwardFlops.of(arch).per_output
    flops = busy * (token_flops(arch, 2 * mean_tokens) + head) / engine.tensor
    memory, arithmetic = read / rates.hbm, flops / (chip.bf16 * assumed.prefill_share)
    slower, limit = max((memory, "memory bandwidth"), (arithmetic, "arithmetic"))
    overhead = assumed.decode_overhead_s + (2 * arch.num_layers * assumed.hop_s if engine.tensor > 1 else 0)
    limit = limit if slower > overhead else "kernel launches and small all-reduces"
    tail = "" if steps > (size.response_tokens or 0) else "; limited by the longest response"
    engines = f"each of {engine.engines} engines" if engine.engines > 1 else "1 engine"
    what = f"responses, {busy:.0f} at once on {engines}{tail}"
    yield TimedPart("rollout", what, steps * (slower + overhead), limit)
    if engine.nodes > 1:  # two all-reduces a layer of one vector per token, and one more between nodes
        wide = arch.hidden_size * actor.dtype
        moved = (requests * lengths.prompt + steps * busy) * 2 * arch.num_layers * wide / rates.network
        waited = steps * 2 * arch.num_layers * assumed.hop_s
        yield TimedPart("rollout", f"all-reduces of an engine over {engine.nodes} nodes", moved + waited, "network")


def _touched(arch: ModelArch, tokens: float) -> float:
    """Share of an engine's weights that a decode step with `tokens` tokens reads: not every expert is chosen."""
    if arch.experts is None or arch.expert_width is None:
        return 1.0
    expert_layers = sum(layer.experts for layer in arch.layers)
    in_experts = expert_layers * 3 * arch.experts.count * arch.expert_width * arch.hidden_size
    rest = arch.num_layers * arch.hidden_size * arch.head_dim * 2 * (arch.num_heads + arch.num_kv_heads)
    rest += 2 * arch.vocab_size * arch.hidden_size
    share = 1 - (1 - arch.experts.per_token / arch.experts.count) ** tokens
    return (rest + in_experts * share) / (rest + in_experts)


def sync(rates: ClusterRates, work: StepWorkload, apart: int) -> Iterator[TimedPart]:
    """Yields the parts of a weight sync: every stage's sender gathers its part and sends it to every node's engines.

    apart: engines with their own nodes, each of which gets its own broadcast.
    """
    actor = work.models["actor"]
    senders = actor.layout.pipeline
    held = [elements_of_model(actor, coords) for coords in actor.grid.all_coordinates if coords.dp == coords.cp == 0]
    total = sum(own.weights - (own.frozen if work.sends_adapters else 0) for own in held)
    nbytes = total * actor.dtype / senders
    speed, link = rates.link(actor, "tp")
    yield TimedPart("sync", "gathering weights", nbytes / speed if actor.layout.tensor > 1 else 0.0, link)
    speed, link, copies = to_engines(rates, apart)
    yield TimedPart("sync", "weights to the engines", nbytes * copies / speed, link)


def to_engines(rates: ClusterRates, apart: int) -> tuple[float, str, int]:
    """Returns (bytes a second, link, how often each byte is sent) of a weight sync to the engines. apart: as for
    `sync`"""
    is_far = rates.cluster.nodes > 1 or apart > 0
    speed, link = (rates.network, "network") if is_far else (rates.cluster.chip.nvlink, "NVLink")
    return speed, link, max(1, apart)


def offload(rates: ClusterRates, work: StepWorkload) -> Iterator[TimedPart]:
    """Yields the parts of offloading and restoring once a step; gradients are not copied."""
    for model in work.models.values():
        copied = sum(item.nbytes for item in offloaded_memory(model, model.grid.coordinates(0)))
        if copied:
            yield TimedPart("moving memory", model.name, 2 * copied / rates.pcie, "PCIe")


def divergence(rates: ClusterRates, work: StepWorkload, phase: str) -> Iterator[TimedPart]:
    """Yields what the divergence to teachers adds to an update: logits and both gradients of the actor's head, and each
    teacher's logits of its share of the samples."""
    actor, samples = work.models["actor"], work.batches["actor"].per_replica
    if work.size.taught:
        head = 3 * model_flops(actor, samples * actor.grid.dp, work.lengths)[2]
        teachers = [model_flops(model, samples * actor.grid.dp, work.lengths)[2] for model in work.teachers]
        head += sum(teachers) / max(1, len(teachers))
        ranks = actor.grid.world / actor.layout.pipeline
        yield TimedPart(phase, "divergence to the teachers", head / ranks / rates.flops, "arithmetic")


@dataclass(frozen=True)
class DeltaBreakEven:
    """When a delta weight sync is faster than one of whole weights.

    smaller_below: share of changed elements below which it has fewer bytes
    faster_below: share below which it takes less time; 0: none does; None: the rates are not known
    speed: bytes a second of the link to the engines; slowest: of a link on which no delta is faster
    """

    smaller_below: float
    faster_below: float | None
    speed: float
    slowest: float
    link: str


def delta_break_even(rates: ClusterRates, work: StepWorkload, apart: int) -> DeltaBreakEven:
    """Returns the break-even of `mrl.inference.delta.encode`: a changed element of b bytes takes b + 1, and 255
    unchanged ones take 1. The sender compares on its GPU, so the copy that it keeps in host memory crosses PCIe twice.

    apart: as for `sync`
    """
    width = work.models["actor"].dtype
    gaps, each = 1 / (255 * width), (width + 1) / width
    smaller = (1 - gaps) / each
    if not rates.cluster.chip.is_gpu:
        return DeltaBreakEven(smaller, None, 0.0, 0.0, "")
    speed, link, copies = to_engines(rates, apart)
    compared = 2 * speed / copies / rates.pcie
    slowest = (1 - gaps) * copies * rates.pcie / 2
    return DeltaBreakEven(smaller, max(0.0, (1 - gaps - compared) / each), speed, slowest, link)


def overlapped(parts: Sequence[TimedPart]) -> list[TimedPart]:
    """Returns the time saved by sampling while training on the last samples: the shorter of the two."""
    sampling = sum(part.seconds for part in parts if part.phase == "rollout")
    learning = sum(part.seconds for part in parts if part.phase not in ("rollout", "sync", "moving memory"))
    return [TimedPart("rollout", "overlapped with training", -min(sampling, learning), "rollout.max_staleness")]


def step(
    rates: ClusterRates, works: Mapping[str, StepWorkload], engine: EnginePlan | None, apart: int = 0
) -> list[TimedPart]:
    """Returns all parts of one step, none overlapping.

    works: as in `Plan`; apart: engines that have their own nodes
    """
    found, work = list[TimedPart](), StepWorkload.together(works.values())
    if engine is not None:
        found += rollout(rates, work, engine)
    for adapter, own in works.items():
        parts = _learning(rates, own)
        found += [replace(part, what=f"{adapter}: {part.what}") for part in parts] if adapter else parts
    if work.is_sampling:
        found += [*sync(rates, work, apart), *offload(rates, work)]
    return found


def _learning(rates: ClusterRates, work: StepWorkload) -> list[TimedPart]:
    """Returns the parts of all passes and updates over the samples of a step."""
    found: list[TimedPart] = []
    size, lengths = work.size, work.lengths
    all_samples = {name: MicroBatchPlan.of(model, size.learnt, lengths.mean) for name, model in work.models.items()}
    if "reward" in work.models:
        found += passes(rates, work.models["reward"], "scoring", all_samples["reward"], lengths, trained=False)
    for name in size.passes:
        if name in work.models:
            phase = name if work.models[name] in work.teachers else "experience"
            found += passes(rates, work.models[name], phase, all_samples[name], lengths, trained=False)
    updates = size.epochs * max(1, size.learnt // size.minibatch)
    for name, model in work.models.items():
        if model.is_trained:
            phase = f"{name}_update"
            once = [*passes(rates, model, phase, work.batches[name], lengths, trained=True)]
            once += optimizer_step(rates, model, phase)
            once += divergence(rates, work, phase) if name == "actor" else ()
            found += [TimedPart(part.phase, part.what, part.seconds * updates, part.limit) for part in once]
    return found
