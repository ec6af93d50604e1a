"""Sections of the diffusion trainers: model, sampler, batches, advantages, loss and image rewards."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.data import Sources
from mrl.config.sections.models import OptimizerConfig
from mrl.config.sections.reward import ServerConfig
from mrl.options.base import BelowOne, FilePath, NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt, Section


class DiffusionModelConfig(Section):
    """A diffusers directory: `transformer` or `unet`, `scheduler`, and if the network has them `vae`, text encoders and
    tokenizers. Supported: DiTTransformer2DModel, UNet2DModel, UNet2DConditionModel (Stable Diffusion 1 and 2),
    SD3Transformer2DModel and FluxTransformer2DModel."""

    path: FilePath  # diffusers directory
    from_scratch: bool = False  # start from random weights of the network, with its config.json only
    image_size: PositiveInt | None = None  # side of an image in pixels; null: the network's own
    # dtype of the network's computation in sampling and training, and of frozen weights; trained weights, the optimizer
    # and the computation of log-probs are float32
    dtype: Literal["float32", "bfloat16"] = "float32"


class DiffusionLoRAConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) by peft in linear layers of the frozen network."""

    rank: PositiveInt = 4  # rows of A, columns of B
    alpha: PositiveFloat = 4.0  # scale of the adapters: W + alpha / rank * B A
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")  # suffixes of layer names, here of attention


class DiffusionTrainConfig(Section):
    """Training of the network. It is replicated on every rank, or with `sharded` sharded over all ranks (FSDP2)."""

    optimizer: OptimizerConfig = OptimizerConfig()
    lora: DiffusionLoRAConfig | None = None  # train LoRA adapters only; null: all weights
    sharded: bool = False  # shard weights, gradients and optimizer; a block's weights are gathered while it computes
    recompute: bool = False  # recompute activations of a block in the backward pass instead of keeping them
    micro_batch: PositiveInt = 64  # maximum denoising steps of images per pass (guidance doubles it); bounds memory


class DiffusionDataConfig(Section):
    """Sources of prompts; a row has text, a class, or both, and for `diffusion_sft` also an image."""

    train: Sources  # training rows
    prompt_key: str = "prompt"  # column of the text
    label_key: str = "label"  # column of the class, an integer from 0, for class-conditional networks
    image_key: str = "image"  # column of the image's path, below the source's folder; diffusion_sft only
    shuffle: bool = True  # shuffle every epoch differently, by run.seed


class SamplerConfig(Section):
    """Sampling of images, and the Gaussian of each denoising step.

    ddim: arXiv 2010.02502, for schedulers with alphas. flow_sde: arXiv 2505.05470, for rectified flows. A step with
    standard deviation 0 is deterministic: it has no probability and is not trained.
    """

    kind: Literal["ddim", "flow_sde"] = "ddim"  # kind of sampler
    steps: PositiveInt = 50  # denoising steps from noise to image
    eta: NonNegativeFloat = 1.0  # ddim: 1 is as random as DDPM; 0 is deterministic and cannot be trained
    noise_level: PositiveFloat = 0.7  # flow_sde: scale of the noise
    guidance: PositiveFloat = 5.0  # classifier-free guidance scale, in sampling and training; 1: none, half the work
    negative_prompt: str = ""  # negative prompt of guidance, for text-conditional networks
    batch: PositiveInt = 64  # maximum images generated at once


class DiffusionBatchConfig(Section):
    """Batch sizes: images per step, and the updates made from them."""

    prompts_per_step: PositiveInt  # prompts per step
    images_per_prompt: PositiveInt = 1  # images per prompt: the group size
    images_per_update: PositiveInt | None = None  # images per update, with all their denoising steps; null: all
    inner_epochs: PositiveInt = 1  # passes over the images of a step
    # share of an image's denoising steps to train on, in random order
    timestep_fraction: PositiveFraction = 1.0


class DiffusionSFTBatchConfig(Section):
    """Batch size; a step is one update."""

    images_per_step: PositiveInt  # images per update, each at one random time
    drop_prompt: BelowOne = 0.1  # share of images trained without a prompt, for guidance


class DiffusionAdvantageConfig(Section):
    """The statistics that an image's score is normalized by.

    batch: all scores of the step. prompt: the last `buffer_size` scores of the image's prompt, or all scores of the
    step if the prompt has fewer than `min_count`. group: the images of the same prompt in this step.
    """

    against: Literal["batch", "prompt", "group"] = "batch"  # scores that an image is compared with; see the section
    buffer_size: PositiveInt = 16  # scores kept per prompt
    min_count: PositiveInt = 16  # minimum scores for a prompt's own statistics
    clip: PositiveFloat = 5.0  # clip advantages to +- this


class DiffusionLossConfig(Section):
    """PPO's clipped loss on the log-prob of every denoising step (the mean over a latent's elements)."""

    clip_range: PositiveFloat = 1e-4  # clip range of the ratio around 1
    kl_coef: NonNegativeFloat = 0.0  # weight of the KL divergence from the initial weights; above 0: a second network


class ScorerConfig(Section):
    """The built-in `scorer`: the cosine of an image's and its prompt's embeddings by a model that transformers loads
    (CLIP, SigLIP, PickScore), on the CPU."""

    path: FilePath  # model directory: config.json, safetensors, processor and tokenizer
    threads: PositiveInt = 1  # threads per worker


class ImageRewardConfig(Section):
    """The reward of an image: a function or a server.

    FILE.py:NAME is a function (images, prompts, rows) -> one score per image, or a dict with "score" and further
    numbers. `images` is a float32 array [n, channels, height, width] in 0..1. A call gets some of a step's images, in
    no particular grouping. The built-ins are brightness, jpeg_compressibility (minus the kilobytes of a JPEG of quality
    95), jpeg_incompressibility and scorer.

    A server uses the protocol of `reward.servers` of trainer rl with `api: mrl`; samples have "image", a PNG in base64,
    instead of "response". If scoring an image fails, the run ends: there is no `on_error`.
    """

    function: FilePath | None = None  # FILE.py:NAME or a built-in
    server: ServerConfig | None = None  # server, instead of a function
    scorer: ScorerConfig | None = None  # for `function: scorer`
    workers: PositiveInt = 1  # processes per rank that score while the next images are generated
    timeout_s: PositiveFloat = 60.0  # maximum seconds of one call


class ImagesConfig(Section):
    """Grids of sample images from fixed noise and prompts, before the first step and during the run.

    The prompts are the first of the data. Grids are in RUN_DIR/images and in the report.
    """

    every_steps: PositiveInt = 10  # steps between grids; there is always one after the last step
    count: PositiveInt = 16  # images per grid
