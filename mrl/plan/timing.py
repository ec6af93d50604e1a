"""Seconds of a step's parts: computation and communication at an assumed share of the chip's peak rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mrl.families import ModelArch
from mrl.families.flops import BACKWARD, BACKWARD_OF_FROZEN, ForwardFlops
from mrl.plan import fp8, tower
from mrl.plan.chips import Assumptions, Cluster
from mrl.plan.engine import EnginePlan
from mrl.plan.memory import model_held, on_host
from mrl.plan.workload import Batches, Lengths, Model, Work


@dataclass(frozen=True)
class Part:
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


def model_flops(model: Model, samples: float, lengths: Lengths) -> tuple[float, float, float]:
    """Returns (layers' matrices, attention, head) operations of a forward pass of all samples."""
    forward, tokens = ForwardFlops.of(model.arch, model.role), samples * lengths.mean
    attention = tokens * forward.per_pair * lengths.mean / 2
    return tokens * forward.per_token, attention, samples * lengths.response * forward.per_output


@dataclass(frozen=True)
class Clock:
    """Assumed rates of a cluster."""

    cluster: Cluster
    assumed: Assumptions

    @property
    def flops(self) -> float:
        return self.cluster.chip.bf16 * self.assumed.matmul_share

    @property
    def hbm(self) -> float:
        return self.cluster.chip.hbm * self.assumed.hbm_share

    def link(self, model: Model, *axes: str) -> tuple[float, str]:
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


def passes(clock: Clock, model: Model, phase: str, batches: Batches, lengths: Lengths, trained: bool) -> Iterator[Part]:
    """Yields the parts of a mini-batch's passes: forward, and backward if `trained`. Parts add up without overlap."""
    matrices, attention, head = model_flops(model, batches.per_replica * model.grid.dp, lengths)
    chip, assumed = clock.cluster.chip, clock.assumed
    layers = matrices / fp8.layers_rate(model, chip, assumed) + attention / clock.flops
    selective = 0.1 if model.arch.experts is not None else 0.6  # it recomputes the products of dense MLPs
    again = {"none": 0.0, "selective": selective, "full": 1.0}[model.train.recompute]
    backward = BACKWARD if model.adapters is None else BACKWARD_OF_FROZEN
    times, head_times = (1 + backward + again, 2 + backward) if trained else (1, 1)
    p, name = model.layout, model.name
    ranks = model.grid.world
    skew = assumed.experts_skew if model.arch.experts is not None else 1.0
    compute = layers * times * skew / ranks
    yield Part(phase, f"{name} layers{fp8.words(model)}", compute, "arithmetic")
    last = ranks / p.pipeline
    per_rank = head * head_times / last
    yield Part(phase, f"{name} head", per_rank / fp8.head_rate(model, chip, assumed), "arithmetic")
    if seen := tower.flops(model, batches.per_replica, lengths, trained=trained):
        what = f"{name} pictures, on every rank of the first stage"
        yield Part(phase, what, seen / clock.flops, "arithmetic")
    if p.pipeline > 1:
        bubble = (p.pipeline - 1) / (batches.count * (p.virtual_pipeline or 1))
        what = f"{name} pipeline bubble, {batches.count} micro-batches for {p.pipeline} stages"
        yield Part(phase, what, compute * bubble, "too few micro-batches")
    yield from _communication(clock, model, phase, batches, 2 + again if trained else 1)


def _communication(clock: Clock, model: Model, phase: str, batches: Batches, moved: float) -> Iterator[Part]:
    """Yields the communication of all micro-batches of a rank.

    moved: multiple of a forward pass's traffic; backward passes and recomputation add to it.
    """
    p, arch, name = model.layout, model.arch, model.name
    tokens = batches.count * batches.tokens / p.context
    wide = tokens * arch.hidden_size * model.dtype
    layers = arch.num_layers / p.pipeline
    if p.tensor > 1:
        speed, link = clock.link(model, "tp")
        nbytes = layers * 4 * wide * (p.tensor - 1) / p.tensor * moved
        yield Part(phase, f"{name} tensor parallelism", nbytes / speed, link)
    if p.context > 1:
        speed, link = clock.link(model, "cp")
        kv = 2 * tokens * arch.num_kv_heads / p.tensor * arch.head_dim * model.dtype
        yield Part(phase, f"{name} context parallelism", layers * kv * (p.context - 1) * moved / speed, link)
    if p.expert > 1 and arch.experts is not None:
        speed, link = clock.link(model, "ep")
        routed = tokens / p.tensor * arch.experts.per_token * arch.hidden_size * model.dtype
        nbytes = layers * 2 * routed * (p.expert - 1) / p.expert * moved * clock.assumed.experts_skew
        yield Part(phase, f"{name} expert parallelism", nbytes / speed, link)
    if p.pipeline > 1:
        speed, link = clock.link(model, "pp")
        hops = 2 * (p.virtual_pipeline or 1) * (2 if moved >= 2 else 1)
        share = p.tensor if p.sequence else 1
        yield Part(phase, f"{name} between stages", hops * wide / share / speed, link)


def step_of_optimizer(clock: Clock, model: Model, phase: str) -> Iterator[Part]:
    """Yields the parts once an update: gradient reduction, Adam, weight gathering."""
    own, size = model_held(model, model.grid.seat(0)), model.grid.dp * model.layout.context
    if size > 1:
        speed, link = clock.link(model, "dp", "cp")
        weights = own.buffer * model.dtype - fp8.saved_weight_bytes(model, model.grid.seat(0)) / 2
        nbytes = (own.buffer * 4 + weights) * (size - 1) / size
        yield Part(phase, f"{model.name} gradients and weights over data parallelism", nbytes / speed, link)
    touched = own.shard * (5 * 4 + 2 * 4 + model.dtype) + own.buffer * 4  # two moments, mains, gradients; zeroing
    yield Part(phase, f"{model.name} optimizer", touched / clock.hbm, "memory bandwidth")


def rollout(clock: Clock, work: Work, engine: EnginePlan) -> Iterator[Part]:
    """Yields the parts of a rollout: each engine prefills its prompts and decodes, with as many requests as it has
    and holds.
    """
    actor, chip, size = work.models["actor"], clock.cluster.chip, work.size
    arch, lengths, assumed = actor.arch, work.lengths, clock.assumed
    requests = size.sampled / engine.engines
    mean_tokens = lengths.prompt + lengths.response / 2
    room = max(1.0, engine.cache_tokens / (lengths.mean or 1))
    at_once = max(1.0, min(engine.wanted, room, requests))
    prefill = requests * lengths.prompt * token_flops(arch, lengths.prompt)
    speed = engine.tensor * chip.bf16 * assumed.prefill_share
    yield Part("rollout", "prompts", prefill / speed, "arithmetic")
    if seen := tower.flops(actor, requests, lengths):
        yield Part("rollout", "pictures", seen / speed, "arithmetic")  # each GPU processes a share of them
    steps = max(requests * lengths.response / at_once, float(size.response_tokens or 0))
    busy = requests * lengths.response / steps
    read = engine.weights * _touched(arch, busy) + busy * mean_tokens * engine.token_bytes
    head = ForwardFlops.of(arch).per_output
    flops = busy * (token_flops(arch, 2 * mean_tokens) + head) / engine.tensor
    memory, arithmetic = read / clock.hbm, flops / (chip.bf16 * assumed.prefill_share)
    slower, limit = max((memory, "memory bandwidth"), (arithmetic, "arithmetic"))
    overhead = assumed.decode_overhead_s + (2 * arch.num_layers * assumed.hop_s if engine.tensor > 1 else 0)
    limit = limit if slower > overhead else "launches and small all-reduces"
    tail = "" if steps > (size.response_tokens or 0) else "; the longest response decides"
    engines = f"each of {engine.engines} engines" if engine.engines > 1 else "1 engine"
    what = f"responses, {busy:.0f} at once on {engines}{tail}"
    yield Part("rollout", what, steps * (slower + overhead), limit)
    if engine.nodes > 1:  # two all-reduces a layer of one vector per token, and one more between nodes
        wide = arch.hidden_size * actor.dtype
        moved = (requests * lengths.prompt + steps * busy) * 2 * arch.num_layers * wide / clock.network
        waited = steps * 2 * arch.num_layers * assumed.hop_s
        yield Part("rollout", f"all-reduces of an engine over {engine.nodes} nodes", moved + waited, "network")


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


def sync(clock: Clock, work: Work, apart: int) -> Iterator[Part]:
    """Yields the parts of a weight sync: every stage's sender gathers its part and sends it to every node's engines.

    apart: engines with their own nodes, each of which gets its own broadcast.
    """
    actor = work.models["actor"]
    senders = actor.layout.pipeline
    total = sum(model_held(actor, seat).weights for seat in actor.grid.seats if seat.dp == seat.cp == 0)
    nbytes = total * actor.dtype / senders
    speed, link = clock.link(actor, "tp")
    yield Part("sync", "gathering weights", nbytes / speed if actor.layout.tensor > 1 else 0.0, link)
    nodes = clock.cluster.nodes
    speed, link = (clock.network, "network") if nodes > 1 or apart else (clock.cluster.chip.nvlink, "NVLink")
    yield Part("sync", "weights to the engines", nbytes * max(1, apart) / speed, link)


def offload(clock: Clock, work: Work) -> Iterator[Part]:
    """Yields the parts of offloading and restoring once a step; gradients are not copied."""
    for model in work.models.values():
        copied = sum(item.nbytes for item in on_host(model, model.grid.seat(0)))
        if copied:
            yield Part("moving memory", model.name, 2 * copied / clock.pcie, "PCIe")


def hidden(parts: Sequence[Part]) -> list[Part]:
    """Returns the time saved by sampling while training on the last samples: the shorter of the two."""
    sampling = sum(part.seconds for part in parts if part.phase == "rollout")
    learning = sum(part.seconds for part in parts if part.phase not in ("rollout", "sync", "moving memory"))
    return [Part("rollout", "beside learning", -min(sampling, learning), "rollout.overlap")]


def step(clock: Clock, work: Work, engine: EnginePlan | None, apart: int = 0) -> list[Part]:
    """Returns all parts of one step, none overlapping. apart: engines that have their own nodes."""
    found: list[Part] = []
    size, lengths = work.size, work.lengths
    if engine is not None:
        found += rollout(clock, work, engine)
    all_samples = {name: Batches.of(model, size.learnt, lengths.mean) for name, model in work.models.items()}
    if "reward" in work.models:
        found += passes(clock, work.models["reward"], "scoring", all_samples["reward"], lengths, trained=False)
    for name in size.passes:
        if name in work.models:
            found += passes(clock, work.models[name], "experience", all_samples[name], lengths, trained=False)
    updates = size.epochs * max(1, size.learnt // size.minibatch)
    for name, model in work.models.items():
        if model.is_trained:
            phase = f"{name}_update"
            once = [*passes(clock, model, phase, work.batches[name], lengths, trained=True)]
            once += step_of_optimizer(clock, model, phase)
            found += [Part(part.phase, part.what, part.seconds * updates, part.limit) for part in once]
    if work.is_sampling:
        found += [*sync(clock, work, apart), *offload(clock, work)]
    return found
