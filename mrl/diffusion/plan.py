"""`mrl plan` of diffusion models: GPU memory and images a second, from a diffusers directory's configurations alone.

Net and decoder run on tensors without memory; everything else is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import diffusers
import torch
from torch import Tensor

from mrl.config.sections.diffusion import SamplerConfig
from mrl.config.trainers.diffusion import DDPOConfig, DiffusionConfig, DiffusionSFTConfig
from mrl.diffusion import nets
from mrl.diffusion.meter import Cost, cost_of
from mrl.diffusion.shapes import Shapes, elements
from mrl.diffusion.sharding import blocks
from mrl.plan.chips import GIB, Assumptions, Cluster

FLOAT32, ADAM = 4, 8  # bytes of an element, of its moments
FLOAT32_SHARE = 1 / 16  # of bf16's arithmetic: data sheets of A100 and H100
TF32_SHARE = 1 / 2  # convolutions in float32


@dataclass(frozen=True)
class MemoryItem:
    what: str
    nbytes: float


@dataclass(frozen=True)
class PartTime:
    what: str
    seconds: float


class DiffusionPlan:
    """Plan of one rank, equal for all. problems: why it does not fit, one sentence each."""

    def __init__(self, cfg: DiffusionConfig, cluster: Cluster, assumed: Assumptions | None = None) -> None:
        assumed = assumed or Assumptions()
        self.cfg, self.cluster = cfg, cluster
        self.assumed = assumed if cluster.chip.is_gpu else assumed.without_gpu()
        self.shapes = Shapes.read(cfg)
        denoising = SamplerConfig(guidance=1.0)  # one net call a prediction
        self.sampler = cfg.sampler if isinstance(cfg, DDPOConfig) else denoising
        self.dtype = getattr(torch, cfg.model.dtype)
        with torch.device("meta"):
            net = getattr(diffusers, self.shapes.name).from_config(self.shapes.config)
        self.net = nets.prepared(net, cfg.model, cfg.actor)
        self.trained = sum(each.numel() for each in self.net.parameters() if each.requires_grad)
        self.frozen = elements(self.net) - self.trained
        self.largest = max((elements(block) for block in blocks(self.net)), default=0)
        for parameter in self.net.parameters():  # compute dtype; trained ones too, as under autocast
            parameter.data = parameter.data.to(self.dtype)

    @property
    def width(self) -> int:
        """Bytes of an element in computation."""
        return 2 if self.dtype == torch.bfloat16 else FLOAT32

    @property
    def images(self) -> int:
        """Images of a rank and step."""
        return -(-images_per_step(self.cfg) // self.cluster.gpus)

    @property
    def doubled(self) -> int:
        """Net calls of one prediction."""
        return 1 if self.sampler.guidance == 1 or nets.takes_guidance(self.net) else 2

    @cached_property
    def drawing(self) -> Cost:
        """Cost of one denoising step of a sampling batch."""
        with torch.no_grad():
            return cost_of(lambda: self._predict(min(self.sampler.batch, self.images)))

    @cached_property
    def learning(self) -> Cost:
        """Cost of one micro-batch's forward and backward pass."""
        rows = self.micro_batch
        return cost_of(lambda: self._predict(rows).float().square().mean().backward())

    @property
    def micro_batch(self) -> int:
        return min(self.cfg.actor.micro_batch, self.rows)

    @property
    def rows(self) -> int:
        """Rows of all updates of a step on one rank; a row is one denoising step of one image."""
        if not isinstance(self.cfg, DDPOConfig):
            return self.images
        batch = self.cfg.batch
        chosen = max(1, math.floor(self.sampler.steps * batch.timestep_fraction))
        return self.images * chosen * batch.inner_epochs

    @cached_property
    def decoding(self) -> Cost:
        """Cost of decoding one image."""
        if self.shapes.vae is None:
            return Cost(0, 0)
        with torch.device("meta"):
            vae = diffusers.AutoencoderKL.from_config(self.shapes.vae).eval().requires_grad_(False)
            latent = torch.empty(1, *self.shapes.latent)
        return cost_of(lambda: vae.decode(latent).sample)

    def _predict(self, count: int) -> Tensor:
        n = count * self.doubled
        with torch.device("meta"):
            x, times = torch.empty(n, *self.shapes.latent, dtype=self.dtype), torch.zeros(n)
            conditioning = self.shapes.conditioning(n, self.dtype)
        return nets.call(self.shapes.name, self.net, x, times, conditioning, self.sampler.guidance)

    def resident(self) -> Iterator[MemoryItem]:
        """Yields memory that is in use in every phase."""
        ranks = self.cluster.gpus if self.cfg.actor.sharded else 1
        yield MemoryItem(
            "CUDA and NCCL", self.assumed.trainer_context + self.assumed.communicators * (self.cluster.gpus > 1)
        )
        yield MemoryItem("net", (self.trained * FLOAT32 + self.frozen * self.width) / ranks)
        yield MemoryItem("gradients and Adam", self.trained * (FLOAT32 + ADAM) / ranks)
        if self.width == 2 and not self.cfg.actor.sharded:
            yield MemoryItem("trained weights in bfloat16", self.trained * self.width)
        if self.cfg.actor.sharded:
            yield MemoryItem("two blocks, whole", 2 * self.largest * self.width)
        if isinstance(self.cfg, DDPOConfig) and self.cfg.loss.kl_coef and self.cfg.actor.lora is None:
            yield MemoryItem("reference", (self.trained + self.frozen) * self.width / ranks)
        yield MemoryItem("text encoders", self.shapes.text_elements * self.width)
        with torch.device("meta"):
            conditioning = self.shapes.conditioning(self.images, torch.float32)
        yield MemoryItem("prompts of the step", sum(each.nbytes for each in conditioning.values()))
        if self.shapes.vae is not None:
            with torch.device("meta"):
                yield MemoryItem("vae", elements(diffusers.AutoencoderKL.from_config(self.shapes.vae)) * FLOAT32)

    def phases(self) -> dict[str, list[MemoryItem]]:
        """Returns the memory of a rank, by phase."""
        peaks = {"update": [MemoryItem(f"activations of {self.micro_batch} rows", self.learning.peak)]}
        if isinstance(self.cfg, DDPOConfig):
            drawn = min(self.sampler.batch, self.images)
            peaks = {"rollout": [MemoryItem(f"{drawn} images are drawn", self.drawing.peak)]} | peaks
            peaks["decoding"] = [MemoryItem("one image is decoded", self.decoding.peak)]
        found = {}
        for name, items in peaks.items():
            computed = [*self.resident(), *items]
            lost = self.assumed.fragments_share * sum(item.nbytes for item in computed[1:])
            found[name] = [*computed, MemoryItem("fragments", lost)]
        return found

    def host(self) -> Iterator[MemoryItem]:
        """Yields host memory of rank 0's process."""
        if isinstance(self.cfg, DDPOConfig):
            latents = self.images * (self.sampler.steps + 1) * math.prod(self.shapes.latent)
            yield MemoryItem("trajectories", latents * FLOAT32)
        yield MemoryItem("a checkpoint that is written", self.trained * (FLOAT32 + ADAM))

    def parts(self) -> list[PartTime]:
        """Returns the seconds of a step's parts; none without GPUs. Nothing is assumed to overlap; rewards are not
        counted."""
        chip = self.cluster.chip
        if not chip.is_gpu:
            return []
        whole = chip.bf16 * self.assumed.matmul_share
        speed = whole if self.width == 2 else whole * FLOAT32_SHARE
        learning = self.rows * self.learning.flops / self.micro_batch / speed
        if not isinstance(self.cfg, DDPOConfig):
            return [PartTime("update", learning)]
        each = self.drawing.flops / min(self.sampler.batch, self.images) / speed
        if self.cfg.loss.kl_coef:
            learning += self.rows * each
        decoding = self.images * self.decoding.flops / (whole * TF32_SHARE)
        drawing = self.images * self.sampler.steps * each
        return [PartTime("rollout", drawing), PartTime("decoding", decoding), PartTime("update", learning)]

    @property
    def images_per_s(self) -> float:
        """Images a second; 0 without GPUs."""
        seconds = sum(part.seconds for part in self.parts())
        return images_per_step(self.cfg) / seconds if seconds else 0.0

    @property
    def problems(self) -> list[str]:
        limit = self.cluster.chip.memory
        if not self.cluster.chip.is_gpu:
            return []
        remedies = {
            "rollout": "a smaller sampler.batch",
            "update": "a smaller actor.micro_batch, actor.recompute: true, actor.lora, or actor.sharded: true",
            "decoding": "a smaller model.image_size",
        }
        found = []
        for name, items in self.phases().items():
            if (total := sum(item.nbytes for item in items)) > limit:
                text = f"{name}: {total / GIB:.1f} GiB on GPUs of {limit / GIB:.1f} GiB"
                found.append(f"{text}\n    -> {remedies[name]}")
        return found

    def data(self) -> dict[str, Any]:
        """Returns the plan as plain values, in bytes and seconds."""
        return {
            "gpus": self.cluster.gpus,
            "chip": self.cluster.chip.name,
            "net": {"class": self.shapes.name, "trained": self.trained, "frozen": self.frozen},
            "memory": {name: {i.what: round(i.nbytes) for i in items} for name, items in self.phases().items()},
            "host": {item.what: round(item.nbytes) for item in self.host()},
            "seconds": {part.what: part.seconds for part in self.parts()},
            "images_per_s": self.images_per_s,
            "problems": self.problems,
        }

    def lines(self) -> Iterator[str]:
        """Yields lines for a terminal."""
        cluster, chip = self.cluster, self.cluster.chip
        count = f"{cluster.gpus} x {chip.name}" if chip.is_gpu else f"{cluster.gpus} processes without GPUs"
        yield f"{self.cfg.run.name}: {count} on {cluster.nodes} node{'s' * (cluster.nodes > 1)}"
        how = "sharded over all ranks" if self.cfg.actor.sharded else "replicated on every rank"
        weights = f"{(self.trained + self.frozen) / 1e6:.1f}M weights, {self.trained / 1e6:.2f}M of them trained"
        yield f"  {self.shapes.name}: {weights}; {how}; latents {' x '.join(map(str, self.shapes.latent))}"
        for title, rows in self._tables():
            yield from ("", title, *(f"  {row}" for row in rows))
        yield from ("", self.verdict())

    def _tables(self) -> Iterator[tuple[str, list[str]]]:
        of_what = "GPU" if self.cluster.chip.is_gpu else "rank"
        phases = self.phases()
        rows = [
            f"{name:<9} {sum(i.nbytes for i in items) / GIB:7.2f}  "
            + ", ".join(f"{i.what} {i.nbytes / GIB:.2f}" for i in items if i.nbytes >= 0.005 * GIB)
            for name, items in phases.items()
        ]
        yield f"Memory per {of_what} in GiB", rows
        yield "Host memory of rank 0 in GiB", [f"{item.what} {item.nbytes / GIB:.2f}" for item in self.host()]
        if parts := self.parts():
            yield (
                "Step time in seconds; no phases overlap, rewards are not counted",
                [f"{part.what:<9} {part.seconds:8.2f}" for part in parts],
            )
            shares = {"float32_share": FLOAT32_SHARE, "tf32_share": TF32_SHARE}
            assumed = [*self.assumed.rows(), *((name, f"{value:g} of bf16") for name, value in shares.items())]
            names = ("matmul_share", "trainer_context", "communicators", "fragments_share", *shares)
            rows = [f"{name} {value}" for name, value in assumed if name in names]
            yield "Assumptions, not measured with mrl", rows

    def verdict(self) -> str:
        """Returns whether the run fits, and its speed."""
        if self.problems:
            return "\n".join(["The run does not fit:", *(f"  {problem}" for problem in self.problems)])
        totals = {name: sum(item.nbytes for item in items) for name, items in self.phases().items()}
        name = max(totals, key=lambda each: totals[each])
        if not self.cluster.chip.is_gpu:
            ranks = min(self.cluster.gpus, self.cluster.per_node)
            host = (totals[name] + sum(item.nbytes for item in self.host())) * ranks
            needs = f"On CPUs: a node needs {host / GIB:.1f} GiB in addition to the programs themselves"
            return f"{needs}; step time is not predicted."
        room = (self.cluster.chip.memory - totals[name]) / GIB
        step = sum(part.seconds for part in self.parts())
        speed = f"A step takes about {step:.3g} s: {self.images_per_s:.3g} images per second."
        return f"The run fits: at its peak ({name}), {room:.1f} GiB are free. {speed}"


def images_per_step(cfg: DiffusionConfig) -> int:
    assert isinstance(cfg, DDPOConfig | DiffusionSFTConfig)
    return cfg.images_per_step if isinstance(cfg, DDPOConfig) else cfg.batch.images_per_step
