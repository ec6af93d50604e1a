"""Configuration and checks of `trainer: ddpo` and `trainer: diffusion_sft`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mrl.config.builtin_rewards import IMAGE_SCORER
from mrl.config.checks.base import Archs, without_effect
from mrl.config.checks.data import Columns, Unreadable, check_names, check_weights, read_columns
from mrl.config.checks.diffusion import (
    NETS,
    SCHEDULERS,
    blank_label,
    component,
    has_random_step,
    latent_shape,
    net_of,
    net_problem,
    numbered,
    scheduler_problem,
    vae_of,
)
from mrl.config.checks.models import check_optimizer
from mrl.config.checks.reward import check_server
from mrl.config.derived import Machine
from mrl.config.file_fingerprint import file_of
from mrl.config.problems import Problem
from mrl.config.sections.data import SourceConfig
from mrl.config.sections.diffusion import (
    DiffusionAdvantageConfig,
    DiffusionBatchConfig,
    DiffusionDataConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionSFTBatchConfig,
    DiffusionTrainConfig,
    ImageRewardConfig,
    ImagesConfig,
    SamplerConfig,
)
from mrl.config.sections.reward import ServerConfig
from mrl.config.trainers.base import AnyConfig, DataUse

KIND, GUIDANCE, AGAINST = "sampler.kind", "sampler.guidance", "advantage.against"


class DiffusionConfig(AnyConfig):
    """The keys of both diffusion trainers, which share `run`, `checkpoint` and `resilience` with other trainers."""

    model: DiffusionModelConfig
    actor: DiffusionTrainConfig = DiffusionTrainConfig()  # the trained network and its optimizer
    data: DiffusionDataConfig

    def data_uses(self) -> dict[str, DataUse]:
        return {}

    def sources(self) -> dict[str, tuple[SourceConfig, ...]]:
        return {"data.train": self.data.train}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        yield "model.path", self.model.path


class DDPOConfig(DiffusionConfig):
    """`trainer: ddpo`: RL of diffusion models by policy gradients over denoising steps (DDPO, Flow-GRPO)."""

    trainer: Literal["ddpo"]  # RL of diffusion models: DDPO, Flow-GRPO
    sampler: SamplerConfig = SamplerConfig()
    batch: DiffusionBatchConfig
    advantage: DiffusionAdvantageConfig = DiffusionAdvantageConfig()
    loss: DiffusionLossConfig = DiffusionLossConfig()
    reward: ImageRewardConfig
    images: ImagesConfig = ImagesConfig()

    @property
    def images_per_step(self) -> int:
        return self.batch.prompts_per_step * self.batch.images_per_prompt

    @property
    def images_per_update(self) -> int:
        return self.batch.images_per_update or self.images_per_step

    def min_updates(self, name: str) -> int:
        return self.run.steps * self.batch.inner_epochs * (self.images_per_step // self.images_per_update)

    @property
    def is_sampling(self) -> bool:
        return True

    def timed_parts(self) -> tuple[str, ...]:
        return ("rollout",)

    def reward_servers(self) -> dict[str, ServerConfig]:
        return {"reward.server": self.reward.server} if self.reward.server is not None else {}

    def reread_files(self) -> Iterator[tuple[str, str]]:
        yield from super().reread_files()
        if file := file_of(self.reward.function):
            yield "reward.function", file
        if self.reward.scorer is not None:
            yield "reward.scorer.path", self.reward.scorer.path

    def given_urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.reward_servers().values())

    def summary(self) -> list[tuple[str, str]]:
        batch, updates = self.batch, self.images_per_step // self.images_per_update
        return [
            ("step", f"{batch.prompts_per_step} prompts x {batch.images_per_prompt} = {self.images_per_step} images"),
            ("updates", f"{batch.inner_epochs} x {updates} of {self.images_per_update} images"),
            ("sampler", f"{self.sampler.kind}, {self.sampler.steps} steps, guidance {self.sampler.guidance:g}"),
        ]


class DiffusionSFTConfig(DiffusionConfig):
    """`trainer: diffusion_sft`: fine-tuning of diffusion models on images."""

    trainer: Literal["diffusion_sft"]  # fine-tuning of diffusion models on images
    batch: DiffusionSFTBatchConfig

    def summary(self) -> list[tuple[str, str]]:
        return [("step", f"{self.batch.images_per_step} images, 1 update")]


def check_sft(cfg: DiffusionSFTConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from _common(cfg, machine)
    yield from _shares(cfg, machine, "batch.images_per_step", cfg.batch.images_per_step)


def check_ddpo(cfg: DDPOConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from _common(cfg, machine)
    total, each = cfg.images_per_step, cfg.images_per_update
    if total % each:
        message = f"{each} do not divide the {total} images of a step (prompts_per_step x images_per_prompt)"
        yield Problem(("batch.images_per_update", "batch.prompts_per_step", "batch.images_per_prompt"), message)
    yield from _shares(cfg, machine, "batch.prompts_per_step", total)
    yield from _advantage(cfg)
    yield from _reward(cfg.reward)
    because = "ddpo trains on images that it samples"
    yield from without_effect(cfg.data, "data", ["image_key"], because, "trainer")
    if cfg.sampler.kind == "ddim":
        yield from without_effect(cfg.sampler, "sampler", ["noise_level"], "ddim uses eta", KIND)
        if cfg.sampler.eta == 0:
            yield Problem(("sampler.eta",), "must be above 0: at 0 every step is deterministic and has no ratio")
    else:
        yield from without_effect(cfg.sampler, "sampler", ["eta"], "flow_sde uses noise_level", KIND)
    if cfg.loss.kl_coef and cfg.model.from_scratch:
        yield Problem(("loss.kl_coef", "model.from_scratch"), "has a random reference with from_scratch: set it to 0")


def check_files(cfg: DiffusionConfig) -> Iterator[Problem]:
    """Checks the diffusers directory and the data by their JSON files and first rows."""
    yield from check_names("data.train", cfg.data.train)
    yield from check_weights("data.train", cfg.data.train)
    for source in cfg.data.train:
        if source.name is not None:
            message = f"the name {source.name!r} of {source.path} has no effect: {cfg.trainer} knows no data sources"
            yield Problem(("data.train", "trainer"), message)
        try:
            yield from _columns(cfg, source, read_columns(source))
        except Unreadable as error:
            yield Problem(("data.train",), str(error))
    yield from _weights(cfg)
    yield from check_shapes(cfg)
    scorer = cfg.reward.scorer if isinstance(cfg, DDPOConfig) else None
    if scorer is not None and not (Path(scorer.path) / "config.json").is_file():
        yield Problem(("reward.scorer.path",), f"{scorer.path} has no config.json: expected a model directory")


def _columns(cfg: DiffusionConfig, source: SourceConfig, columns: Columns | None) -> Iterator[Problem]:
    if columns is None:
        return
    data, has = cfg.data, f"the first row of {source.path} has {', '.join(columns) or 'no keys'}"
    if data.prompt_key not in columns and data.label_key not in columns:
        message = f"neither {data.prompt_key!r} nor {data.label_key!r} (data.label_key): {has}"
        yield Problem(("data.prompt_key", "data.train"), message)
    if isinstance(cfg, DiffusionSFTConfig) and data.image_key not in columns:
        yield Problem(("data.image_key", "data.train"), f"no {data.image_key!r}: {has}")


def check_shapes(cfg: DiffusionConfig) -> Iterator[Problem]:
    """Checks the configuration files of a diffusers directory; needs no weights."""
    path = Path(cfg.model.path)
    try:
        _, name, config = net_of(path)
        scheduler, settings = component(path / "scheduler", "scheduler_config.json")
        vae = vae_of(path)
    except ValueError as error:
        yield Problem(("model.path",), str(error))
        return
    if (why := net_problem(name, config, vae)) is not None:
        yield Problem(("model.path",), why)
    try:
        latent_shape(name, config, vae, cfg.model.image_size)
    except ValueError as error:
        yield Problem(("model.image_size", "model.path"), str(error))
    if isinstance(cfg, DDPOConfig):
        yield from _sampler(cfg, name, config, scheduler, settings)
        return
    if all(scheduler not in names for names in SCHEDULERS.values()):
        yield Problem(("model.path",), f"mrl cannot train with the noise of a {scheduler}")
    if isinstance(cfg, DiffusionSFTConfig) and cfg.batch.drop_prompt and NETS[name].told == "labels":
        if blank_label(name, config) is None:
            because = f"this {name} is never told a class"
            yield from without_effect(cfg.batch, "batch", ["drop_prompt"], because, "model.path")


def _weights(cfg: DiffusionConfig) -> Iterator[Problem]:
    path = Path(cfg.model.path)
    try:
        folder, name, _ = net_of(path)
    except ValueError:
        return  # `check_shapes` reports this error
    if not cfg.model.from_scratch and not any(folder.glob("*.safetensors")):
        message = f"{folder} has no safetensors: set from_scratch: true to start from random weights"
        yield Problem(("model.path", "model.from_scratch"), message)
    count = NETS[name].encoders
    for part in (*numbered("tokenizer", count), *numbered("text_encoder", count)):
        if not (path / part).is_dir():
            yield Problem(("model.path",), f"{path} has no {part}, which a {name} needs for prompts")


def _sampler(cfg: DDPOConfig, name: str, config: dict, scheduler: str, settings: dict) -> Iterator[Problem]:
    if (why := scheduler_problem(cfg.sampler.kind, scheduler, settings)) is not None:
        yield Problem((KIND, "model.path"), f"{cfg.model.path}/scheduler: {why}")
    times = settings.get("num_train_timesteps", 1000)
    if cfg.sampler.steps > times:
        what = f"{cfg.sampler.steps} steps exceed the scheduler's {times} timesteps"
        yield Problem(("sampler.steps", "model.path"), what)
    if not has_random_step(cfg.sampler.kind, settings, cfg.sampler.steps):
        message = "the only step is at time 0, where it is deterministic and has no ratio: use more steps"
        yield Problem(("sampler.steps", "model.path"), message)
    if NETS[name].told == "labels":
        if cfg.sampler.guidance != 1 and blank_label(name, config) is None:
            yield Problem((GUIDANCE, "model.path"), f"must be 1: this {name} has no unconditional class for guidance")
        yield from without_effect(cfg.sampler, "sampler", ["negative_prompt"], f"a {name} takes classes", "model.path")
    elif cfg.sampler.guidance == 1:
        yield from without_effect(cfg.sampler, "sampler", ["negative_prompt"], "there is no guidance", GUIDANCE)


def _common(cfg: DiffusionConfig, machine: Machine) -> Iterator[Problem]:
    if machine.planned:  # otherwise check_files checks the shapes
        yield from check_shapes(cfg)
    yield from check_optimizer("actor.optimizer", cfg.actor.optimizer, cfg.min_updates("actor"))
    if cfg.actor.optimizer.muon is not None:
        yield Problem(("actor.optimizer.muon", "trainer"), f"trainer {cfg.trainer} trains with Adam alone: remove muon")
    if cfg.actor.lora is not None and cfg.model.from_scratch:
        yield Problem(("actor.lora", "model.from_scratch"), "adapters need trained weights: set from_scratch: false")


def _shares(cfg: DiffusionConfig, machine: Machine, key: str, count: int) -> Iterator[Problem]:
    world = machine.world_size
    if count < world:
        yield Problem((key, "run.nproc"), f"{count} images are fewer than the {world} ranks that share them")
    elif cfg.actor.sharded and count % world:
        message = f"{world} ranks do not divide the {count} images of a step, as sharded: true requires"
        yield Problem(("actor.sharded", key, "run.nproc"), message)


def _reward(reward: ImageRewardConfig) -> Iterator[Problem]:
    if (reward.function is None) == (reward.server is None):
        yield Problem(("reward.function", "reward.server"), "give exactly one of them to score the images")
    if reward.server is not None:
        yield from check_server("reward.server", reward.server)
        yield from without_effect(reward.server, "reward.server", ["api"], "images use api: mrl", "reward.server")
        because = "a server scores the images"
        yield from without_effect(reward, "reward", ["workers", "timeout_s"], because, "reward.server")
    if (reward.function == IMAGE_SCORER) != (reward.scorer is not None):
        yield Problem(("reward.function", "reward.scorer"), f"`function: {IMAGE_SCORER}` and `scorer:` need each other")


def _advantage(cfg: DDPOConfig) -> Iterator[Problem]:
    advantage = cfg.advantage
    if advantage.against != "prompt":
        because = f"scores are compared with {advantage.against}"
        yield from without_effect(advantage, "advantage", ["buffer_size", "min_count"], because, AGAINST)
    elif advantage.min_count > advantage.buffer_size:
        message = f"{advantage.min_count} exceeds the {advantage.buffer_size} scores that are kept per prompt"
        yield Problem(("advantage.min_count", "advantage.buffer_size"), message)
    if advantage.against == "group" and cfg.batch.images_per_prompt < 2:
        message = "1 image per prompt has no group to be compared with: use at least 2"
        yield Problem(("batch.images_per_prompt", AGAINST), message)


OF_BOTH: dict[str, Any] = {  # of the rows of both trainers in the table
    "check_files": check_files,
    "packages": ("diffusers", "peft", "PIL"),
    "plan": "mrl.diffusion.plan:DiffusionPlan",
    "preview": "mrl.diffusion.preview:preview",
}
