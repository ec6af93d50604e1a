"""Numbers that follow from a configuration: worlds, data-parallel sizes, batches. Printed at start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.schema import DataConfig, ParallelConfig, RLConfig, SFTConfig, TrainConfig


@dataclass(frozen=True)
class Machine:
    """The world that a configuration is checked for.

    world_size: ranks in all; local_world_size: of these, on this machine
    gpus: devices on this machine, 0 for a CPU machine, None when nobody has looked
    joined: the world was started by somebody else (torchrun, ft_launcher)
    """

    world_size: int
    local_world_size: int
    gpus: int | None = None
    joined: bool = False

    @classmethod
    def starting(cls, cfg: RLConfig | SFTConfig, gpus: int | None = None) -> Machine:
        """The world that `mrl train` starts on this machine."""
        nproc = cfg.run.nproc or smallest_world(cfg)
        return cls(nproc, nproc, gpus)


def model_size(layout: ParallelConfig) -> int:
    """Ranks that hold one copy of the model."""
    return layout.tensor * layout.pipeline * layout.context


def expert_size(layout: ParallelConfig) -> int:
    """Ranks that hold one copy of the expert layers."""
    return layout.expert_tensor_size * layout.expert * layout.pipeline


def layouts(cfg: RLConfig | SFTConfig) -> dict[str, ParallelConfig]:
    """The layout of every model that the run builds, by the key that holds it."""
    found = {"actor.parallel": cfg.actor.parallel}
    if isinstance(cfg, RLConfig):
        if cfg.critic is not None:
            found["critic.parallel"] = cfg.critic.parallel
        if needs_ref(cfg) and cfg.ref.parallel is not None:
            found["ref.parallel"] = cfg.ref.parallel
        if cfg.reward.model is not None:
            found["reward.model.parallel"] = cfg.reward.model.parallel or cfg.actor.parallel
    return found


def trained(cfg: RLConfig | SFTConfig) -> dict[str, TrainConfig]:
    """By its key, each model that has settings of its own; others follow the actor's."""
    critic = {"critic": cfg.critic} if isinstance(cfg, RLConfig) and cfg.critic is not None else {}
    return {"actor": cfg.actor, **critic}


def data_sections(cfg: RLConfig | SFTConfig) -> dict[str, DataConfig]:
    """By its key, each section that says where rows come from."""
    sections = {"data": cfg.data}
    if isinstance(cfg, RLConfig) and cfg.ptx is not None:
        sections["ptx.data"] = cfg.ptx.data
    return sections


def smallest_world(cfg: RLConfig | SFTConfig) -> int:
    """The fewest ranks over which every layout of the run can be laid out."""
    return math.lcm(*(math.lcm(model_size(p), expert_size(p)) for p in layouts(cfg).values()))


def data_parallel(layout: ParallelConfig, world_size: int) -> int:
    return world_size // model_size(layout)


def needs_ref(cfg: RLConfig) -> bool:
    return cfg.algorithm.kl.use_in_reward or cfg.algorithm.kl.use_in_loss


def samples_per_step(cfg: RLConfig) -> int:
    return cfg.batch.prompts_per_step * cfg.batch.samples_per_prompt


def prompts_per_round(cfg: RLConfig) -> int:
    """Prompts that are sampled at once."""
    return cfg.algorithm.filter_groups.prompts_per_round or cfg.batch.prompts_per_step


def most_samples_per_step(cfg: RLConfig) -> int:
    """Responses that a step may draw: every round of dynamic sampling, and the greedy ones."""
    groups = cfg.algorithm.filter_groups
    drawn = prompts_per_round(cfg) * groups.max_num_gen_batches if groups.is_on else cfg.batch.prompts_per_step
    greedy = cfg.batch.prompts_per_step if cfg.algorithm.adv_estimator == "remax" else 0
    return drawn * cfg.batch.samples_per_prompt + greedy


def samples_per_minibatch(cfg: RLConfig) -> int:
    return cfg.batch.samples_per_minibatch or samples_per_step(cfg)


def updates_per_step(cfg: RLConfig) -> int:
    return cfg.batch.epochs_per_step * (samples_per_step(cfg) // samples_per_minibatch(cfg))


def reused_samples_per_step(cfg: RLConfig) -> int:
    """Of earlier steps, once the replay buffer has enough."""
    return cfg.replay.prompts_per_step * cfg.batch.samples_per_prompt if cfg.replay is not None else 0


def most_updates_per_step(cfg: RLConfig) -> int:
    """With re-used samples among those of the step."""
    total = samples_per_step(cfg) + reused_samples_per_step(cfg)
    return cfg.batch.epochs_per_step * (total // (cfg.batch.samples_per_minibatch or total))


def summary(cfg: RLConfig | SFTConfig, world_size: int) -> list[tuple[str, str]]:
    """Name and value of everything a reader would otherwise have to work out."""
    rows = [("run", f"{cfg.run.root}/{cfg.run.name}, {cfg.run.steps} steps, seed {cfg.run.seed}")]
    rows += [
        (key.removesuffix(".parallel"), f"{_layout(layout, world_size)} over {_ranks(world_size)}")
        for key, layout in layouts(cfg).items()
    ]
    if isinstance(cfg, SFTConfig):
        return [*rows, ("step", f"{cfg.batch.samples_per_step} samples, 1 update")]
    batch, new, reused = cfg.batch, samples_per_step(cfg), reused_samples_per_step(cfg)
    minibatch = batch.samples_per_minibatch or new + reused
    updates = f"{batch.epochs_per_step} x {(new + reused) // minibatch} mini-batches of {minibatch} samples"
    rows.append(("step", f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} = {new} samples"))
    if (groups := cfg.algorithm.filter_groups).is_on:
        bound = f"at most {groups.max_num_gen_batches} rounds of {prompts_per_round(cfg)} prompts a step"
        rows.append(("dynamic sampling", bound))
    if cfg.replay is not None:
        kept = f"at most {cfg.replay.buffer_prompts} prompts are kept"
        rows.append(("replay", f"{reused} samples of earlier steps beside them; {kept}"))
    rows.append(("updates", f"{most_updates_per_step(cfg)} a step: {updates}"))
    engine = f"{cfg.rollout.servers} x tensor {cfg.rollout.tensor}" if not cfg.rollout.urls else "at given addresses"
    rows.append(("engine", f"{cfg.rollout.engine}, {engine}"))
    return rows


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _layout(layout: ParallelConfig, world_size: int) -> str:
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline or 1,
        "CP": layout.context,
        "EP": layout.expert,
        "DP": data_parallel(layout, world_size),
    }
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one copy"
