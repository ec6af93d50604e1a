"""Everything an RL run holds, built in the order that overlaps the engine's start with the models'."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mrl import checkpoint, failure, platform
from mrl.algo import kl
from mrl.config.schema import RLConfig, TrainConfig
from mrl.core import Rollout, Sample, StepStats
from mrl.data import PromptDataset, load_tokenizer
from mrl.learner import Learner
from mrl.models import load_arch
from mrl.observe import Recorder, RunDir, SilentRecorder
from mrl.reward import RewardPool
from mrl.rollout import Engine, start_engine
from mrl.trainers.generate import Generator
from mrl.trainers.world import World
from mrl.weights.export import save_hf
from mrl.weights.sync import SyncReport, WeightSync


@dataclass
class RLRun:
    cfg: RLConfig
    world: World
    run_dir: Path
    recorder: Recorder | SilentRecorder
    actor: Learner
    critic: Learner | None
    ref: Learner | None
    kl_controller: kl.Controller
    generator: Generator | None  # rank 0 only
    sync: WeightSync
    start_step: int

    @property
    def samples_per_step(self) -> int:
        return self.cfg.batch.prompts_per_step * self.cfg.batch.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        per_epoch = self.samples_per_step // (self.cfg.batch.samples_per_minibatch or self.samples_per_step)
        return per_epoch * self.cfg.batch.epochs_per_step

    def minibatches(self, rollout: Rollout) -> list[range]:
        size = self.cfg.batch.samples_per_minibatch or rollout.num_samples
        return [range(i, i + size) for i in range(0, rollout.num_samples, size)]

    def generate(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """The step's samples, the same on every rank."""
        return self.world.from_main(
            "rollout", lambda: self._generator.rollout(step, self._ticker(self.samples_per_step))
        )

    def validate(self, step: int) -> dict[str, float]:
        prompts = self.cfg.validation.prompts
        return self.world.from_main("validation", lambda: self._generator.validate(step, self._ticker(prompts)))

    def push_weights(self, version: int) -> SyncReport:
        """Gives the actor's weights to every engine; `version` comes back with every sample."""
        return self.sync.push(str(version))

    def maybe_save(self, step: int, stats: StepStats) -> None:
        every = self.cfg.checkpoint.every_steps
        if every and (step % every == 0 or step == self.cfg.run.steps):
            with self.recorder.phase("checkpoint", stats):
                checkpoint.save(
                    self.run_dir,
                    step,
                    self._trained(),
                    {"step": step, "kl_controller": self.kl_controller.state_dict()},
                    self.cfg.checkpoint.keep_last,
                )

    def finish(self) -> None:
        """The trained policy as a Hugging Face directory, if asked for."""
        if self.cfg.checkpoint.export_hf:
            save_hf(self.actor.exporter, self.cfg.model.path, self.run_dir / "hf", overwrite=True)

    def resume(self) -> None:
        """Goes on from the run directory's newest complete checkpoint, if there is one."""
        path = self.world.from_main("looking for a checkpoint", lambda: checkpoint.latest(self.run_dir))
        if path is None:
            return
        state = checkpoint.load(path, self._trained())
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.start_step = state["step"]
        self.recorder.note(f"continuing from {path} (step {self.start_step})")

    def _trained(self) -> dict[str, Learner]:
        learners = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        return {name: learner for name, learner in learners.items() if learner.trainable}

    def _ticker(self, total: int) -> Callable[[Sample], None]:
        self.recorder.expect(total)
        return lambda sample: self.recorder.advance()

    @property
    def _generator(self) -> Generator:
        assert self.generator is not None, "only rank 0 talks to the engine"
        return self.generator


@contextlib.contextmanager
def open_rl_run(cfg: RLConfig) -> Iterator[RLRun]:
    """Builds the run on every rank; closes engine, reward workers, files and process group on any exit."""
    with contextlib.ExitStack() as stack, failure.noted():
        world = World(cfg.run.timeout_s, _longest_wait(cfg), cfg.run.seed)
        stack.callback(world.close)
        run_dir = Path(cfg.run.root) / cfg.run.name
        recorder: Recorder | SilentRecorder = SilentRecorder()
        engine: Engine | None = None
        rewards: RewardPool | None = None

        gpu = platform.device().type == "cuda"

        def start_main_parts() -> None:
            nonlocal recorder, engine, rewards
            stack.enter_context(RunDir.open(cfg))
            recorder = stack.enter_context(Recorder(run_dir, cfg.run.steps, tensorboard=cfg.run.tensorboard))
            rewards = stack.enter_context(
                contextlib.closing(
                    RewardPool(cfg.reward, prompt_key=cfg.data.prompt_key, answer_key=cfg.data.answer_key)
                )
            )
            engine = stack.enter_context(
                contextlib.closing(
                    start_engine(cfg.rollout, cfg.model.path, cfg.model.dtype, run_dir / "logs", cfg.run.seed, gpu=gpu)
                )
            )

        world.from_main("starting the run", start_main_parts)
        actor, critic, ref = build_learners(cfg, world)
        generator: Generator | None = None

        def ready() -> tuple[str, ...]:
            nonlocal generator
            assert engine is not None and rewards is not None
            recorder.note("waiting for the engine")
            engine.wait_ready()
            generator = make_generator(cfg, run_dir, engine, rewards)
            for note in (*engine.notes, *generator.notes()):
                recorder.note(note)
            return engine.urls

        urls = world.from_main("starting the engine", ready)
        run = RLRun(
            cfg=cfg,
            world=world,
            run_dir=run_dir,
            recorder=recorder,
            actor=actor,
            critic=critic,
            ref=ref,
            kl_controller=kl.make_controller(
                cfg.algorithm.kl.controller,
                coef=cfg.algorithm.kl.coef,
                target=cfg.algorithm.kl.target,
                horizon_samples=cfg.algorithm.kl.horizon_samples,
            ),
            generator=generator,
            sync=WeightSync(actor.exporter, urls, cfg.sync, cfg.rollout.tensor),
            start_step=0,
        )
        run.resume()
        run.push_weights(run.start_step)
        yield run


def build_learners(cfg: RLConfig, world: World) -> tuple[Learner, Learner | None, Learner | None]:
    """Actor; critic if there is one; reference if a KL term asks for it."""
    model, kl_cfg = cfg.model, cfg.algorithm.kl

    def build(role: str, path: str, train: TrainConfig, trainable: bool) -> Learner:
        return Learner(
            "critic" if role == "critic" else "policy",
            load_arch(path),
            path,
            train,
            world.meshes.get(train.parallel),
            dtype=getattr(torch, model.dtype),
            seed=cfg.run.seed,
            from_scratch=model.from_scratch,
            allow_pickle=model.allow_pickle,
            trainable=trainable,
        )

    actor = build("actor", model.path, cfg.actor, True)
    critic = ref = None
    if cfg.critic is not None:
        critic = build("critic", cfg.critic.path or model.path, cfg.critic, not cfg.critic.frozen)
    if kl_cfg.use_in_loss or kl_cfg.use_in_reward:
        layout = cfg.actor.model_copy(
            update={
                "parallel": cfg.ref.parallel or cfg.actor.parallel,
                "max_tokens_per_microbatch": cfg.ref.max_tokens_per_microbatch or cfg.actor.max_tokens_per_microbatch,
            }
        )
        ref = build("ref", cfg.ref.path or model.path, layout, False)
    return actor, critic, ref


def make_generator(cfg: RLConfig, run_dir: Path, engine: Engine, rewards: RewardPool) -> Generator:
    tokenizer = load_tokenizer(cfg.model.path)
    train = PromptDataset(cfg.data.train, cfg.data, tokenizer)
    validation = PromptDataset(cfg.data.validation, cfg.data, tokenizer) if cfg.data.validation else None
    return Generator(cfg, run_dir, engine, rewards, tokenizer, train, validation)


def _longest_wait(cfg: RLConfig) -> float:
    """Seconds the other ranks wait for rank 0's sampling: every request in turn, each up to its own time-out."""
    samples = max(cfg.batch.prompts_per_step * cfg.batch.samples_per_prompt, cfg.validation.prompts)
    rounds = math.ceil(samples / cfg.rollout.concurrent_requests)
    return (
        cfg.run.timeout_s
        + cfg.rollout.startup_timeout_s
        + rounds * cfg.rollout.request_timeout_s
        + cfg.reward.timeout_s * math.ceil(samples / cfg.reward.workers)
    )
