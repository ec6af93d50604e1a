"""DDPO (arXiv 2305.13301) and Flow-GRPO (2505.05470): sample, score, normalize, update.

Left out of the reference: its image hook (grids are written) and prompt functions (prompts are rows of data).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mrl.config.sections.diffusion import DiffusionLossConfig, DiffusionModelConfig, DiffusionTrainConfig
from mrl.config.trainers.diffusion import DDPOConfig
from mrl.core import StepStats
from mrl.diffusion import adapters, advantages, nets
from mrl.diffusion.conditioning import ConditioningInputs, PromptRow
from mrl.diffusion.images import ImageGrids, save_grid
from mrl.diffusion.pipeline import Pipeline
from mrl.diffusion.prompts import PromptRows
from mrl.diffusion.rewards import ImageRewards, SamplingErrorCheck, parts_of
from mrl.diffusion.run import DiffusionRun, begin
from mrl.diffusion.sample import Trajectories, draw, share
from mrl.diffusion.update import Policy, Predict, chosen_steps, make_update
from mrl.observe.report import BY_PROMPT
from mrl.reward.score_requests import Outcome
from mrl.trainers.shared.loop import Loop
from mrl.trainers.shared.run import set_up_run
from mrl.trainers.shared.updates import named, over_updates

ERROR_CHECK = SamplingErrorCheck()
NAME_CHARS = 60  # characters of a prompt in its metric's name
SHUFFLE, ORDER = 1, 2  # random streams: order of images in updates, of steps in an image


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step. outcomes, prompts: of all images of the step"""

    mine: Trajectories
    prompts: list[PromptRow]
    outcomes: list[Outcome]


@dataclass
class DDPORun(DiffusionRun):
    """Run of DDPO. grids: images that show the progress"""

    cfg: DDPOConfig
    data: PromptRows
    rewards: ImageRewards
    policy: Policy
    prompt_stats: advantages.PromptStats
    grids: ImageGrids


class DDPOLoop(Loop[DDPORun]):
    def open(self) -> contextlib.AbstractContextManager[DDPORun]:
        return open_run(self.cfg)

    def before_steps(self) -> None:
        if self.run.start_step == 0:
            _show(self.run, 0)

    def step(self, step: int) -> StepStats:
        return train_step(self.run, step)


@contextlib.contextmanager
def open_run(cfg: DDPOConfig) -> Iterator[DDPORun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with set_up_run(cfg) as start:
        data = ERROR_CHECK.together("reading data.train", lambda: PromptRows(cfg.data, cfg.run.seed))
        stats = advantages.PromptStats(cfg.advantage.buffer_size, cfg.advantage.min_count)
        rewards = ERROR_CHECK.together("loading reward.function", lambda: ImageRewards(cfg.reward))
        start.stack.callback(rewards.close)
        run = begin(start, cfg, cfg.sampler, {"prompt_stats": stats})
        grids = ERROR_CHECK.together("reading data.train", lambda: ImageGrids(cfg, data))
        policy = _policy(cfg, run)
        start.is_set_up()
        yield DDPORun(**vars(run), data=data, rewards=rewards, policy=policy, prompt_stats=stats, grids=grids)


def _policy(cfg: DDPOConfig, run: DiffusionRun) -> Policy:
    reference = ERROR_CHECK.together(
        "loading the reference", lambda: reference_of(cfg.model, cfg.actor, cfg.loss, run.pipeline)
    )
    policy = Policy.of(run.pipeline, cfg.sampler, cfg.loss, cfg.actor.micro_batch, reference)
    steps = policy.steps
    if len(steps.counted) < len(steps.times):
        run.recorder.note(
            f"{len(steps.times) - len(steps.counted)} of {len(steps.times)} denoising steps are "
            "deterministic: they have no ratio and are not trained"
        )
    return policy


def reference_of(
    model: DiffusionModelConfig, train: DiffusionTrainConfig, loss: DiffusionLossConfig, pipeline: Pipeline
) -> Predict | None:
    """Returns the net of the run's beginning: the net without adapters, or a second copy; None without a KL term.

    Collective.
    """
    if not loss.kl_coef:
        return None
    if pipeline.lora is None:
        first = nets.build(model, train, frozen=True)
        return lambda x, times, conditioning, guidance: pipeline.predict(x, times, conditioning, guidance, first)

    def without(x: Tensor, times: Tensor, conditioning: ConditioningInputs, guidance: float) -> Tensor:
        with adapters.off(pipeline.net):
            return pipeline.predict(x, times, conditioning, guidance)

    return without


def train_step(run: DDPORun, step: int) -> StepStats:
    """Runs one step: images, rewards, advantages, updates."""
    cfg = run.cfg
    stats, began = run.checkpointer.new_stats(step + 1), time.monotonic()
    with run.phase("rollout", stats):
        sampled = _sample(run, step)
    run.callbacks("on_rollout", sampled, step=step)
    scores = np.array([outcome.score for outcome in sampled.outcomes])
    stats.metrics |= {"reward/mean": float(scores.mean()), "reward/std": float(scores.std())}
    stats.metrics |= parts_of(sampled.outcomes) | _by_prompt(run, sampled, scores)
    with run.phase("update", stats):
        _learn(run, step, sampled, _advantages(run, sampled, scores), stats)
    stats.metrics["perf/images_per_s"] = cfg.images_per_step / (time.monotonic() - began)
    if run.grids.is_due(step + 1):
        with run.phase("rollout", stats):
            _show(run, step + 1)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


def _sample(run: DDPORun, step: int) -> StepSamples:
    cfg, total = run.cfg, run.cfg.images_per_step
    rows = [prompt for _, prompt in run.data.of_step(step, cfg.batch.prompts_per_step)]
    prompts = [prompt for prompt in rows for _ in range(cfg.batch.images_per_prompt)]
    mine, policy, what = share(total), run.policy, f"sampling for step {step + 1}"
    conditioning = ERROR_CHECK.together(what, lambda: policy.pipeline.conditioning.encode([prompts[i] for i in mine]))
    run.recorder.expect(len(mine))

    def score(ids: range, images: Tensor) -> None:
        run.rewards.submit(ids, images, [prompts[i] for i in ids], step)
        run.recorder.advance(len(ids))

    def sample() -> Trajectories:
        return draw(policy.pipeline, policy.steps, policy.sampler, mine, conditioning, (cfg.run.seed, step), score)

    drawn = ERROR_CHECK.together(what, sample)
    outcomes = ERROR_CHECK.each(f"scoring the images of step {step + 1}", run.rewards.collect)
    return StepSamples(drawn, prompts, [each for part in outcomes for each in part])


def _advantages(run: DDPORun, sampled: StepSamples, scores: np.ndarray) -> Tensor:
    """[B] float32."""
    cfg = run.cfg.advantage
    if cfg.against == "prompt":
        found = run.prompt_stats.advantages([prompt.text for prompt in sampled.prompts], scores)
    elif cfg.against == "group":
        each = run.cfg.batch.images_per_prompt
        found = advantages.of_groups(scores, np.arange(len(scores)) // each)
    else:
        found = advantages.of_batch(scores)
    return torch.from_numpy(found).float().clamp(-cfg.clip, cfg.clip)


def _learn(run: DDPORun, step: int, sampled: StepSamples, weights: Tensor, stats: StepStats) -> None:
    cfg, each = run.cfg, run.cfg.images_per_update
    made: list[dict[str, float]] = []
    for epoch in range(cfg.batch.inner_epochs):
        seeds = (cfg.run.seed, step, epoch)
        order = np.random.default_rng([*seeds, SHUFFLE]).permutation(cfg.images_per_step)
        for ids in order.reshape(-1, each).tolist():
            fraction, counted = cfg.batch.timestep_fraction, run.policy.steps.counted
            places = {i: chosen_steps(counted, fraction, (*seeds, ORDER, i)) for i in sorted(ids)}
            made.append(make_update(run.policy, run.learner, sampled.mine, weights, places))
            run.updates.note_update("actor", made[-1], step, ids)
    run.updates.end_of_step(step + 1)
    stats.metrics |= named("actor", over_updates(made))
    stats.metrics["advantage/clipped"] = float((weights.abs() >= cfg.advantage.clip).float().mean())


def _by_prompt(run: DDPORun, sampled: StepSamples, scores: np.ndarray) -> dict[str, float]:
    """Mean score in this step of each prompt of the grid, by `prompt_names`."""
    texts = np.array([prompt.text for prompt in sampled.prompts])
    shown = prompt_names(prompt.text for prompt in run.grids.prompts)
    return {name: float(scores[texts == text].mean()) for text, name in shown.items() if text in texts}


def prompt_names(texts: Iterable[str]) -> dict[str, str]:
    """Returns reward_by_prompt/BEGINNING by text; equal beginnings are numbered."""
    names, seen = {}, Counter[str]()
    for text in dict.fromkeys(texts):
        beginning = text[:NAME_CHARS]
        seen[beginning] += 1
        number = f" ({seen[beginning]})" if seen[beginning] > 1 else ""
        names[text] = f"{BY_PROMPT}{beginning}{number}"
    return names


def _show(run: DDPORun, steps: int) -> None:
    """Writes the grid after `steps` steps. Collective."""
    images = run.grids.draw(run.policy, steps)
    if run.world.is_main:
        run.recorder.write_guarded("a grid of images", lambda: save_grid(run.run_dir, steps, images))
