"""Training of diffusion models: the model, its sampler, batches, advantages, loss, rewards of images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import FilePath, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from mrl.config.sections.data import Sources
from mrl.config.sections.models import OptimizerConfig
from mrl.config.sections.reward import ServerConfig


class DiffusionModelConfig(Section):
    """A diffusers directory: `transformer` or `unet`, `scheduler`, and where the net has them `vae`, text encoders and
    tokenizers. Nets are DiTTransformer2DModel, UNet2DModel, UNet2DConditionModel (Stable Diffusion 1 and 2),
    SD3Transformer2DModel and FluxTransformer2DModel."""

    path: FilePath  # diffusers directory
    from_scratch: bool = False  # random weights of the net, from its config.json alone
    image_size: PositiveInt | None = None  # pixels of a side of an image; null: what the net was made for
    # what the net computes in, when sampling and when training, and what frozen weights are kept in; trained weights,
    # the optimizer and all that log-probs are made of are float32
    dtype: Literal["float32", "bfloat16"] = "float32"


class DiffusionLoRAConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) by peft in linear layers of the net, which itself is frozen."""

    rank: PositiveInt = 4  # rows of A, columns of B
    alpha: PositiveFloat = 4.0  # W + alpha / rank * B A
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")  # ends of the layers' names: here of attention


class DiffusionTrainConfig(Section):
    """How the net is trained. Every rank has all of it, or with `sharded` its part of every block (FSDP2)."""

    optimizer: OptimizerConfig = OptimizerConfig()
    lora: DiffusionLoRAConfig | None = None  # adapters alone are trained; null: all weights
    sharded: bool = False  # ranks share weights, gradients and optimizer; a block's weights are whole while it computes
    recompute: bool = False  # compute a block's activations again in the backward pass, in place of keeping them
    micro_batch: PositiveInt = 64  # steps of images in one pass, at most (guidance doubles it): bounds memory


class DiffusionDataConfig(Section):
    """Where prompts come from; a row has text, a class, or both, and `diffusion_sft` also has its image."""

    train: Sources  # what is learnt from
    prompt_key: str = "prompt"  # where a row has its text
    label_key: str = "label"  # where a row has its class, a number from 0, for nets that are told one
    image_key: str = "image"  # where a row has the path of its image, below the source's folder; diffusion_sft
    shuffle: bool = True  # every epoch in an order of its own, by run.seed


class SamplerConfig(Section):
    """How images are drawn, and which Gaussian a step is.

    ddim: arXiv 2010.02502, of schedulers with alphas. flow_sde: arXiv 2505.05470, of rectified flows. A step whose
    deviation is 0 has no probability, and takes no part in training.
    """

    kind: Literal["ddim", "flow_sde"] = "ddim"  # the family of steps
    steps: PositiveInt = 50  # from noise to image
    eta: NonNegativeFloat = 1.0  # ddim: 1 is as random as DDPM, 0 deterministic, which nothing can be learnt from
    noise_level: PositiveFloat = 0.7  # flow_sde: how random
    guidance: PositiveFloat = 5.0  # weight of the prompt, in sampling and in training; 1: no guidance, half the work
    negative_prompt: str = ""  # what guidance leads away from, for nets that are told text
    batch: PositiveInt = 64  # images that are drawn at once, at most


class DiffusionBatchConfig(Section):
    """How much a step samples, and in how many updates it learns from that."""

    prompts_per_step: PositiveInt  # prompts that a step samples for
    images_per_prompt: PositiveInt = 1  # images of each: the size of a group
    images_per_update: PositiveInt | None = None  # images of one update, with all their steps; null: all of the step
    inner_epochs: PositiveInt = 1  # passes over a step's images
    # share of an image's steps that are learnt from, in an order of its own
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0


class DiffusionSFTBatchConfig(Section):
    """How much a step learns from; a step is one update."""

    images_per_step: PositiveInt  # images of one update, each at one random time
    drop_prompt: Annotated[float, Field(ge=0, lt=1)] = 0.1  # share that is told no prompt, so that guidance is possible


class DiffusionAdvantageConfig(Section):
    """What an image's score is held against.

    batch: all scores of the step. prompt: the last `buffer_size` of its prompt, and of a prompt with fewer than
    `min_count` those of the step. group: the images of its prompt in this step.
    """

    against: Literal["batch", "prompt", "group"] = "batch"  # see the section
    buffer_size: PositiveInt = 16  # scores that are kept of a prompt
    min_count: PositiveInt = 16  # scores from which a prompt has its own statistics
    clip: PositiveFloat = 5.0  # largest advantage, either way


class DiffusionLossConfig(Section):
    """PPO's clipped loss, of every step's log-prob (the mean over a latent's elements)."""

    clip_range: PositiveFloat = 1e-4  # how far a ratio may go from 1
    kl_coef: NonNegativeFloat = 0.0  # weight of the KL divergence from the run's first weights; over 0: a second net


class ScorerConfig(Section):
    """The built-in `scorer`: the cosine of an image's and its prompt's embeddings by a model that transformers loads
    (CLIP, SigLIP, PickScore), on the CPU."""

    path: FilePath  # its directory: config.json, safetensors, processor and tokenizer
    threads: PositiveInt = 1  # that each of the workers computes with


class ImageRewardConfig(Section):
    """What scores an image: a function or a server.

    FILE.py:NAME is a function (images, prompts, rows) -> one score an image, or a dict with "score" and further
    numbers. `images` is a float32 array [n, channels, height, width] in 0..1. A call has some of a step's images, in no
    particular grouping. The built-ins are brightness, jpeg_compressibility (minus the kilobytes of a JPEG of quality
    95), jpeg_incompressibility and scorer. A server is asked as `reward.servers` of trainer rl with `api: mrl`, each
    sample having "image", a PNG in base64, in place of "response". An image whose score fails ends the run: there is no
    `on_error`.
    """

    function: FilePath | None = None  # FILE.py:NAME or a built-in
    server: ServerConfig | None = None  # in place of a function
    scorer: ScorerConfig | None = None  # for `function: scorer`
    workers: PositiveInt = 1  # processes of each rank that score while the next images are drawn
    timeout_s: PositiveFloat = 60.0  # seconds of one call


class ImagesConfig(Section):
    """Grids of images of the same noise and prompts (the first of the data), before the first step and as the run goes
    on, in RUN_DIR/images and in the report."""

    every_steps: PositiveInt = 10  # steps between two of them; there is always one after the last step
    count: PositiveInt = 16  # images of a grid
