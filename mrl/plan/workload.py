"""Models of a run and its step in numbers: prompts -> samples -> mini-batches -> micro-batches -> ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mrl.config.derived import layout_text
from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.models import ParallelConfig, TrainConfig
from mrl.config.trainers.base import Config, StepSize
from mrl.families import FAMILIES, ModelArch
from mrl.families.adapters import LoRA
from mrl.families.table import Role
from mrl.plan.activations import LayerKind, Tokens
from mrl.plan.chips import Assumptions
from mrl.plan.grid import Grid

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class PlannedModel:
    """One model of the run over its whole world. dtype: bytes of a weight; on_gpu: its ranks have GPUs; loras: of all
    adapters that are trained instead of its weights."""

    name: str
    path: str
    arch: ModelArch
    role: Role
    train: TrainConfig
    is_trained: bool
    grid: Grid
    dtype: int
    kind: LayerKind
    on_gpu: bool
    trains_tower: bool = False
    loras: tuple[LoRAConfig, ...] = ()

    @property
    def layout(self) -> ParallelConfig:
        return self.train.parallel

    @property
    def adapters(self) -> tuple[LoRA, ...]:
        """LoRA adapters that are trained instead of all weights; empty without any."""
        return tuple(lora.spec for lora in self.loras)

    @property
    def updated(self) -> PlannedModel:
        """The model with the only adapter that an update changes: that of `train`."""
        return self if len(self.loras) < 2 or self.train.lora is None else replace(self, loras=(self.train.lora,))

    @property
    def words(self) -> str:
        """Layout as text, such as "TP2 x PP4 x DP8"."""
        return layout_text(self.layout, self.grid.dp)

    @property
    def overlap(self) -> bool:
        """True if gradient reduction overlaps the backward pass: see `mrl.learner.optimizer.sums_overlap`."""
        return self.is_trained and self.on_gpu and self.grid.dp * self.layout.context > 1 and not self.trains_tower


def models_of(
    cfg: Config, archs: Mapping[str, ModelArch], world: int, on_gpu: bool, fused: bool
) -> tuple[PlannedModel, ...]:
    """Returns the run's models.

    archs: by the models' names. fused: the GPUs can use transformer-engine's layers.
    """
    dtype = DTYPE_BYTES[cfg.model.dtype]
    found = []
    for name, built in cfg.built().items():
        asked = built.train.layers
        can = FAMILIES[archs[name].family].local_only is None
        takes_them = asked == "transformer_engine" or (asked == "auto" and fused and dtype == 2 and can)
        found.append(
            PlannedModel(
                name,
                built.path or cfg.model.path,
                archs[name],
                "critic" if built.scores else "policy",
                built.train,
                built.is_trained,
                Grid(built.train.parallel, world),
                dtype,
                "transformer_engine" if takes_them else "local",
                on_gpu,
                trains_tower=archs[name].vision is not None and built.is_trained and cfg.model.vision.train,
                loras=built.loras,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of a sample: the longest, and assumed means; images: image tokens of the prompt, for models with image
    inputs.
    """

    longest: int
    response: float
    prompt: float
    images: float = 0.0

    @property
    def mean(self) -> float:
        return self.prompt + self.response

    @staticmethod
    def of(size: StepSize, train: TrainConfig, assumed: Assumptions) -> SampleLengths:
        if size.prompt_tokens is None or size.response_tokens is None:
            tokens = train.max_tokens_per_microbatch
            half = tokens / 8  # a guess: lengths come from the data
            return SampleLengths(tokens, half, half)
        return SampleLengths(
            size.prompt_tokens + size.response_tokens,
            size.response_tokens * assumed.mean_response_share,
            size.prompt_tokens * assumed.mean_prompt_share,
            size.image_tokens * assumed.mean_prompt_share,
        )


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of one model in a mini-batch, for samples of equal length.

    per_replica: samples of a data-parallel replica; count: micro-batches of each; samples, tokens: of one micro-batch
    """

    model: str
    per_replica: float
    count: int
    samples: float
    tokens: float

    @staticmethod
    def of(model: PlannedModel, samples: int, mean: float) -> MicroBatchPlan:
        """Packs samples of `mean` tokens as `mrl.data.balance.plan_micro_batches` does."""
        layout, dp = model.layout, model.grid.dp
        align = 2 * layout.context if layout.context > 1 else 1
        length = max(align, -(-int(mean) // align) * align)
        fits = max(1, model.train.max_tokens_per_microbatch // length)
        step = dp * (layout.pipeline if layout.virtual_pipeline else 1)
        limit = max(model.train.max_tokens_per_microbatch, length)
        fewest = max(1, -(-samples * length // limit))
        count = -(-fewest // step) * step
        if -(-samples // count) > fits:
            needed = -(-samples // fits)
            count = -(-needed // step) * step
        each = samples / count
        return MicroBatchPlan(model.name, samples / dp, count // dp, each, each * length)


def largest_micro_batch(model: PlannedModel, lengths: SampleLengths, samples: int, size: StepSize) -> Tokens:
    """Returns the micro-batch that memory must hold.

    If all samples of a data-parallel replica fit into one micro-batch: these, at their longest, with each prompt once
    for a group of samples where the model computes common prefixes once. Otherwise a full one, or one longer sample; in
    the worst case all of it is response. It has as many image tokens as prompts full of them with responses of mean
    length.
    """
    full = max(model.train.max_tokens_per_microbatch, lengths.longest)
    own = -(-samples // model.grid.dp)
    seen = size.image_tokens / (size.image_tokens + lengths.response) if size.image_tokens else 0.0
    if own * lengths.longest <= full and size.prompt_tokens is not None and size.response_tokens is not None:
        shares = model.layout.context == 1 and model.arch.vision is None and size.replays == "off"
        prompts = -(-own // size.group) if shares else own
        response = own * size.response_tokens
        packed = response + prompts * size.prompt_tokens
    else:
        packed = min(full, max(lengths.longest, samples * lengths.longest // model.grid.dp))
        response = packed - (0 if lengths.prompt >= lengths.longest else 1)
    return Tokens(packed, response, min(lengths.longest, packed), int(packed * seen))


@dataclass(frozen=True)
class StepWorkload:
    """A step of a run, for all its models.

    tokens: of the largest micro-batch; bucket: bytes of a weight sync bucket; copies: as in `Config.copies`;
    keeps_sent: with sync.delta; sends_adapters: weight syncs send adapters only
    """

    models: dict[str, PlannedModel]
    size: StepSize
    lengths: SampleLengths
    batches: dict[str, MicroBatchPlan]
    tokens: dict[str, Tokens]
    bucket: int
    copies: dict[str, bool]
    keeps_sent: bool
    sends_adapters: bool

    @property
    def teachers(self) -> list[PlannedModel]:
        """Teachers that the trainer computes, each in a phase of its own."""
        return [model for name, model in self.models.items() if name.partition(".")[0] == "teacher"]

    @property
    def is_sampling(self) -> bool:
        return self.size.sampled > 0

    def with_samples(self, size: StepSize, lengths: SampleLengths) -> StepWorkload:
        """Returns the same models at a step of other samples, in the micro-batches these need."""
        batches = {
            name: MicroBatchPlan.of(model, size.minibatch if model.is_trained else size.learnt, lengths.mean)
            for name, model in self.models.items()
        }
        return replace(self, size=size, lengths=lengths, batches=batches)

    @staticmethod
    def of(cfg: Config, models: tuple[PlannedModel, ...], assumed: Assumptions) -> StepWorkload:
        size, engines = cfg.step_size(), cfg.engines()
        lengths = SampleLengths.of(size, models[0].train, assumed)
        learnt = {model.name: size.minibatch if model.is_trained else size.learnt for model in models}
        return StepWorkload(
            {model.name: model for model in models},
            size,
            lengths,
            {model.name: MicroBatchPlan.of(model, learnt[model.name], lengths.mean) for model in models},
            {model.name: largest_micro_batch(model, lengths, learnt[model.name], size) for model in models},
            engines[1].bucket_mib << 20 if engines is not None else 0,
            cfg.copies(),
            engines is not None and engines[1].delta is not None,
            engines is not None and engines[1].lora == "adapter",
        )

    @staticmethod
    def together(works: Collection[StepWorkload]) -> StepWorkload:
        """Returns one workload with the samples of all: what the engines and the host have to hold."""
        first, samples = next(iter(works)), sum(work.size.learnt for work in works)
        if len(works) == 1:
            return first
        size = replace(
            first.size,
            learnt=samples,
            prompts=sum(work.size.prompts for work in works),
            sampled=sum(work.size.sampled for work in works),
            response_tokens=max(work.size.response_tokens or 0 for work in works) or None,
        )
        lengths = SampleLengths(
            max(work.lengths.longest for work in works),
            sum(work.lengths.response * work.size.learnt for work in works) / samples,
            sum(work.lengths.prompt * work.size.learnt for work in works) / samples,
            sum(work.lengths.images * work.size.learnt for work in works) / samples,
        )
        return replace(first, size=size, lengths=lengths)
