"""Memory of each rank in each phase of a step, one item per cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mrl.families import ModelArch
from mrl.families.table import VOCAB_ALIGN_GPU, padded_vocab_size, weight_table
from mrl.kernels.head_chunks import BLOCK_GPU, chunk_rows, waiting_rows
from mrl.plan import activations, fp8, routing_replay, tower
from mrl.plan.activations import FLOAT32, Shapes, Tokens
from mrl.plan.chips import Assumptions
from mrl.plan.engine import EnginePlan
from mrl.plan.grid import RankCoordinates, chunk_layers
from mrl.plan.parameters import ModelElements, model_elements
from mrl.plan.workload import PlannedModel, StepWorkload

Level = Literal["nothing", "parameters", "all"]  # residency of a model on the device: see mrl.learner.memory
# What each phase needs of the models and of the engines (weights, cache): the trainer moves memory by the same table,
# mrl.trainers.rl.memory_order; a model that is not named may be away.
NEEDS: dict[str, tuple[dict[str, Level], tuple[bool, bool]]] = {
    "rollout": ({}, (True, True)),
    "scoring": ({"reward": "parameters"}, (True, True)),
    "experience": ({"actor": "parameters", "critic": "parameters", "ref": "parameters"}, (False, False)),
    "actor_update": ({"actor": "all"}, (False, False)),
    "critic_update": ({"critic": "all"}, (False, False)),
    "sync": ({"actor": "parameters"}, (True, False)),
    "checkpoint": ({"actor": "parameters"}, (True, False)),  # writes tensors from where they are, after a weight sync
}  # and each teacher has a phase of its name, which needs that teacher alone
SAMPLE_VECTORS, DENSE_VECTORS = 10, 8  # float32 of a step's response tokens, flat and padded to the longest
INT32 = 4
OBJECT_BYTES = 12  # of a response token on rank 0: its id, its log-prob, about four letters


@dataclass(frozen=True)
class MemoryItem:
    """Bytes and their cause. owner: a model's name, engine, or process."""

    owner: str
    what: str
    nbytes: float


@dataclass(frozen=True)
class PhaseMemory:
    """Peak memory of one rank's GPU in a phase."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> float:
        return sum(item.nbytes for item in self.items)

    @property
    def tensors(self) -> float:
        """Bytes in the trainer's own allocator: without engines, CUDA's and NCCL's part, and fragments."""
        return sum(item.nbytes for item in self.items if item.owner not in ("engine", "process"))


def elements_of_model(model: PlannedModel, coords: RankCoordinates) -> ModelElements:
    wide_head = model.dtype < FLOAT32 and not model.train.precision.fp8.shares_buffers
    own = model.overlap, model.adapters, model.trains_tower, wide_head
    return model_elements(model.arch, model.role, model.grid, coords, *own)


def resident_memory(model: PlannedModel, coords: RankCoordinates, level: Level) -> Iterator[MemoryItem]:
    """Yields what stays of a model on the device at a level, given its `offload`."""
    own, offload = elements_of_model(model, coords), model.train.offload
    if offload != "all" or level != "nothing":
        nbytes = own.weight_bytes(model.dtype, model.is_trained) - fp8.saved_weight_bytes(model, coords)
        yield MemoryItem(model.name, "weights", nbytes)
    if casts := fp8.cast_bytes(model, coords):  # transformer-engine's own, which offload does not move
        yield MemoryItem(model.name, "weights in fp8", casts)
    if model.is_trained and (offload == "none" or level == "all"):
        yield MemoryItem(model.name, "gradients", own.gradient_bytes())
        yield MemoryItem(model.name, "optimizer", own.optimizer_bytes(model.dtype))


def offloaded_memory(model: PlannedModel, coords: RankCoordinates) -> Iterator[MemoryItem]:
    """Yields a model's host memory for offload. Gradients are not copied; they return as zeros."""
    own, offload = elements_of_model(model, coords), model.train.offload
    if offload != "none" and model.is_trained:
        yield MemoryItem(model.name, "offloaded optimizer", own.optimizer_bytes(model.dtype))
    if offload == "all":
        yield MemoryItem(model.name, "offloaded weights", own.weight_bytes(model.dtype, model.is_trained))


def forward_peak(model: PlannedModel, coords: RankCoordinates, tokens: Tokens) -> Iterator[MemoryItem]:
    """Yields the transient memory of a pass without gradients, one layer at a time."""
    shapes = Shapes(model.arch, model.layout, model.dtype, model.kind, tokens)
    working = _working_layer(shapes) + fp8.working_bytes(model, tokens)
    yield MemoryItem(model.name, "activations", working + shapes.share * _width(model) * 2)
    if seen := tower.forward_bytes(model, coords, tokens):
        yield MemoryItem(model.name, "tower", seen)
    if _has_head(model, coords):
        rounded = fp8.head_bytes(model, tokens, trained=False)
        yield MemoryItem(model.name, "head", _head_rows(model, tokens) + _logits(model, tokens) + rounded)


def update_peak(
    model: PlannedModel, coords: RankCoordinates, tokens: Tokens, micro_batches: int
) -> Iterator[MemoryItem]:
    """Yields the transient memory of an update: activations of the micro-batches in flight, the current layer, the
    head.
    """
    shapes = Shapes(model.arch, model.layout, model.dtype, model.kind, tokens)
    each = [
        activations.saved_bytes(model.arch, model.role, model.train, layers, model.dtype, model.kind, tokens)
        for layers in chunk_layers(model.layout, model.arch.num_layers, coords.pp)
    ]
    count = activations.in_flight(model.layout, coords.pp, micro_batches)
    yield MemoryItem(model.name, "activations", sum(sorted(each * -(-count // len(each)))[-count:]))
    working = _working_layer(shapes) + fp8.working_bytes(model, tokens)
    if model.kind == "local" and not model.adapters:  # transformer-engine adds in place
        # one product's gradient before it is added to the buffer
        widths = [layer.ffn_size * 2 for layer in set(model.arch.layers) if not layer.experts]
        working += max(widths, default=0) / model.layout.tensor * _width(model)
    yield MemoryItem(model.name, "current layer", working)
    if seen := tower.update_bytes(model, coords, tokens, -(-count // len(each))):
        yield MemoryItem(model.name, "tower", seen)
    if _has_head(model, coords) and model.role == "policy":
        yield MemoryItem(model.name, "head", _head_rows(model, tokens) + _head_pass(model, tokens))


def _head_pass(model: PlannedModel, tokens: Tokens) -> float:
    """Bytes of the logits and gradients of a training pass of the head."""
    if model.adapters:
        return _logits(model, tokens, model.dtype)
    waiting = _waiting(model, tokens)
    # Bytes an element of the lm_head weight's gradient: a single product is as wide as the model (more in fp8). Else
    # there is the sum and one part, which older torch adds to the sum, or the sum and its narrow copy.
    is_whole = tokens.response / model.layout.context <= waiting
    copies = model.dtype + FLOAT32 * model.train.precision.fp8.head if is_whole else 2 * FLOAT32
    beside: float = _columns(model) * model.arch.hidden_size * copies
    return _logits(model, tokens, model.dtype, waiting) + beside + fp8.head_bytes(model, tokens, trained=True)


def divergence_peak(work: StepWorkload, coords_of: Mapping[str, RankCoordinates]) -> Iterator[MemoryItem]:
    """Yields what the divergence to the teachers adds to an update: a second pass of the actor's head, whose gradients
    are held beside the first one's, and each teacher's hidden states and lm_head, and one chunk of its logits.
    """
    actor = work.models["actor"]
    if not (work.size.taught and _has_head(actor, coords_of["actor"])):
        return
    rows, tokens = work.tokens["actor"].response / actor.layout.context, work.tokens["actor"]
    yield MemoryItem("actor", "head of the divergence", rows * _width(actor) + _head_pass(actor, tokens))
    for teacher in work.teachers:
        kept = _columns(actor) * _width(teacher) if teacher.train.offload == "all" else 0
        chunk = _columns(actor) * min(_chunk(actor), rows) * FLOAT32
        yield MemoryItem(teacher.name, "head beside the actor's", rows * _width(teacher) + kept + chunk)


def _width(model: PlannedModel) -> int:
    return model.arch.hidden_size * model.dtype


def _working_layer(shapes: Shapes) -> float:
    kinds = set(shapes.arch.layers)
    return max(
        activations.layer_bytes(shapes, kind, "none") + activations.recomputed_bytes(shapes, kind) for kind in kinds
    )


def _has_head(model: PlannedModel, coords: RankCoordinates) -> bool:
    return coords.pp == model.layout.pipeline - 1


def _head_rows(model: PlannedModel, tokens: Tokens) -> float:
    """Bytes of the head's input rows, their gradients, and all hidden states, whole on every tensor-parallel rank."""
    return (2 * tokens.response + tokens.packed) / model.layout.context * _width(model)


def _columns(model: PlannedModel) -> int:
    """Vocabulary entries on a rank, including padding."""
    return padded_vocab_size(model.arch, model.layout.tensor, VOCAB_ALIGN_GPU) // model.layout.tensor


def _chunk(model: PlannedModel) -> int:
    return chunk_rows(_columns(model), FLOAT32, on_gpu=True)


def _waiting(model: PlannedModel, tokens: Tokens) -> int:
    """Rows whose gradients are multiplied at once."""
    chunk, rows = _chunk(model), math.ceil(tokens.response / model.layout.context)
    if model.dtype == FLOAT32 or model.train.precision.fp8.head:
        return chunk
    return waiting_rows(rows, _columns(model), model.arch.hidden_size, model.dtype, chunk)


def _logits(model: PlannedModel, tokens: Tokens, gradient: int = 0, waiting: int = 0) -> float:
    """Bytes of a chunk of float32 logits, narrower gradients of that many or of the buffered rows, and block
    buffers.
    """
    if model.role == "critic":
        return 0.0
    rows = tokens.response / model.layout.context
    chunk = min(_chunk(model), rows)
    narrow = min(max(waiting, chunk), rows) * gradient if gradient < FLOAT32 else 0
    return _columns(model) * (chunk * FLOAT32 + narrow) + 2 * BLOCK_GPU * FLOAT32


def sync_peak(model: PlannedModel, coords: RankCoordinates, bucket: int) -> Iterator[MemoryItem]:
    """Yields a weight sync sender's memory: the parts of its largest tensor, that tensor, and two buckets, as
    engines still read one.
    """
    if coords.tp == 0 and coords.dp == 0 and coords.cp == 0:
        whole = _largest_tensor(model.arch) * model.dtype
        filled = min(bucket, elements_of_model(model, coords).weights * model.layout.tensor * model.dtype)
        yield MemoryItem(model.name, "sync buckets", 2 * max(filled, whole) + 2 * whole)


@lru_cache(maxsize=64)
def _largest_tensor(arch: ModelArch) -> int:
    """Elements of the largest parameter, unsharded."""
    return max(sum(math.prod(shape) for shape in row.shapes) for row in weight_table(arch).values())


def phases(work: StepWorkload, rank: int, engine: EnginePlan | None, assumed: Assumptions) -> list[PhaseMemory]:
    """Returns the phases of one rank. engine: the one that shares its GPU, or None."""
    coords_of = {name: model.grid.coordinates(rank) for name, model in work.models.items()}
    found = []
    for name in phase_names(work):
        awake = _needs(name)[1]
        items = [MemoryItem("process", "CUDA and NCCL", assumed.trainer_context + assumed.communicators)]
        for model in work.models.values():
            level = level_of(name, model) if work.is_sampling else "all"
            items += resident_memory(model, coords_of[model.name], level)
        items += _copies(work, coords_of["actor"], on_host=False)
        items += _transient(name, work, coords_of)
        computed = sum(item.nbytes for item in items[1:])
        items.append(MemoryItem("process", "fragmentation", assumed.fragments_share * computed))
        if engine is not None:
            has = ["weights"] if awake[0] or engine.release != "all" else []
            has += ["cache"] if awake[1] or engine.release == "none" else []
            items.append(MemoryItem("engine", " and ".join(has) or "released", engine.awake(*awake)))
        found.append(PhaseMemory(name, tuple(items)))
    return found


def level_of(phase: str, model: PlannedModel) -> Level:
    """Returns the residency of a model in a phase."""
    return _needs(phase)[0].get(model.name, "nothing")


def _needs(phase: str) -> tuple[dict[str, Level], tuple[bool, bool]]:
    return NEEDS.get(phase, ({phase: "parameters"}, (False, False)))


def phase_names(work: StepWorkload) -> list[str]:
    updates = [f"{model.name}_update" for model in work.models.values() if model.is_trained]
    if not work.is_sampling:
        return [*updates, "checkpoint"]
    scoring = ["scoring"] if "reward" in work.models else []
    teachers = [model.name for model in work.teachers]
    experience = ["experience"] if set(work.size.passes) - {*teachers} else []
    return ["rollout", *scoring, *experience, *teachers, *updates, "sync", "checkpoint"]


def _transient(phase: str, work: StepWorkload, coords_of: Mapping[str, RankCoordinates]) -> list[MemoryItem]:
    models = work.models
    if phase in ("rollout", "checkpoint"):
        return []
    if phase == "scoring" or phase in models:  # the reward model, or a teacher
        name = "reward" if phase == "scoring" else phase
        return list(forward_peak(models[name], coords_of[name], work.tokens[name]))
    if phase == "experience":
        stage, teachers = coords_of["actor"].pp, {model.name for model in work.teachers}
        there = [name for name in work.size.passes if name in models and name not in teachers]
        each = [list(forward_peak(models[name], coords_of[name], work.tokens[name])) for name in there]
        most = max(each, key=lambda items: sum(item.nbytes for item in items), default=[])
        recorded = routing_replay.recorded_bytes(work, stage)
        return [*most, *_experts(routing_replay.pass_bytes(models["actor"], work, stage) + recorded)]
    if phase == "sync":
        return list(sync_peak(models["actor"], coords_of["actor"], work.bucket))
    name = phase.removesuffix("_update")
    model, count = models[name], work.batches[name].count
    stage = coords_of[name].pp
    given = activations.in_flight(model.layout, stage, count) * routing_replay.pass_bytes(model, work, stage)
    divergence = divergence_peak(work, coords_of) if name == "actor" else ()
    return [*update_peak(model, coords_of[name], work.tokens[name], count), *divergence, *_experts(given)]


def _experts(nbytes: float) -> list[MemoryItem]:
    return [MemoryItem("actor", "routed experts", nbytes)] if nbytes else []


def _copies(work: StepWorkload, coords: RankCoordinates, on_host: bool) -> Iterator[MemoryItem]:
    """Yields the copies of the actor's weights; each rank holds the range that it updates."""
    for name, is_on_host in work.copies.items():
        if is_on_host == on_host:
            yield MemoryItem("actor", name, FLOAT32 * elements_of_model(work.models["actor"], coords).shard)


def host_items(work: StepWorkload, rank: int, written: Mapping[str, int]) -> list[MemoryItem]:
    """Returns host memory of one rank's process beyond its code.

    Counts offloaded tensors, copies of the actor (of a delta sync's sender, its share), a checkpoint being written, and
    the step's samples.
    written: bytes of a weight in such a checkpoint, by model; data-parallel ranks divide the writing like the updating
    """
    found: list[MemoryItem] = []
    for model in work.models.values():
        coords = model.grid.coordinates(rank)
        found += offloaded_memory(model, coords)
        if model.name in written:
            nbytes = elements_of_model(model, coords).shard * written[model.name]
            found.append(MemoryItem(model.name, "checkpoint being written", nbytes))
    actor = work.models["actor"]
    coords = actor.grid.coordinates(rank)
    found += _copies(work, coords, on_host=True)
    if work.keeps_sent and coords.tp == coords.dp == coords.cp == 0:
        nbytes = elements_of_model(actor, coords).weights * actor.layout.tensor * actor.dtype
        found.append(MemoryItem("actor", "weights sent last", nbytes))
    size, mean = work.size, work.lengths
    flat = size.learnt * (mean.mean * 8 + mean.response * FLOAT32 * SAMPLE_VECTORS)
    dense = size.learnt * (work.size.response_tokens or work.lengths.longest) * FLOAT32 * DENSE_VECTORS
    found.append(MemoryItem("samples", "tensors of the step", flat + dense))
    tokens = size.learnt * mean.response
    for teacher in work.teachers if _has_head(actor, coords) else ():
        states = size.taught * tokens / (actor.grid.dp * actor.layout.context) * _width(teacher)
        found += [MemoryItem(teacher.name, "hidden states", states)] if states else []
    if size.served_tokens:
        found.append(MemoryItem("samples", "teachers' top tokens", tokens * size.served_tokens * (INT32 + FLOAT32)))
    if own := routing_replay.host_bytes(work, coords):
        found.append(MemoryItem("samples", "routed experts", own))
    if rank == 0 and size.sampled:
        objects = size.sampled * mean.response * OBJECT_BYTES + routing_replay.sample_bytes(work)
        found.append(MemoryItem("samples", "objects of rank 0", objects))
    return found
