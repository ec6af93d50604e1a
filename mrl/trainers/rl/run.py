"""Everything an RL run holds, built in the order that overlaps the engine's start with the models', unless they share
GPUs: an engine takes its part of what it finds free."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mrl import platform
from mrl.algo import kl
from mrl.config import placement
from mrl.config.schema import KLConfig, RLConfig
from mrl.config.trainers.rl import samples_per_step
from mrl.core import Rollout, Sample
from mrl.inference.protocol import RELEASED_PARTS
from mrl.inference.seeds import sample_seed
from mrl.inference.teacher_engine import TeacherEngine
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.trainers.rl.demonstrations import Demonstrations
from mrl.trainers.rl.generate import Generator
from mrl.trainers.rl.longest_wait import longest_wait
from mrl.trainers.rl.main_parts import MainParts, this_machine
from mrl.trainers.rl.make_sync import make_sync
from mrl.trainers.rl.memory_order import Engines, order_with
from mrl.trainers.rl.mismatch import MismatchLimits
from mrl.trainers.rl.models import Models, MovingAverage, build_models
from mrl.trainers.rl.passes import StepPasses, ToCompute
from mrl.trainers.rl.replay import Replay
from mrl.trainers.rl.reward_scores import ToScore, score, to_score
from mrl.trainers.rl.scores import ScoreControl
from mrl.trainers.shared.checkpoints import CombinedState, Stateful
from mrl.trainers.shared.memory import OffloadError, PhaseMemoryManager
from mrl.trainers.shared.references import ActorWithoutAdapters
from mrl.trainers.shared.run import Run, set_up_run
from mrl.trainers.shared.world import RankZeroError
from mrl.weights.errors import SyncError
from mrl.weights.sync.engine_sync import EngineSync, SyncReport

SHUFFLE_STREAM = 1 << 48  # keeps the orders of a step's samples apart from all other draws


@dataclass
class RLRun(Run):
    cfg: RLConfig
    critic: Learner | None
    ref: Learner | PolicyCopy | ActorWithoutAdapters | None
    reward_model: Learner | None
    ema: MovingAverage | None
    teachers: Mapping[str, Learner]
    teacher_engines: Mapping[str, TeacherEngine]  # rank 0 only
    kl_controller: kl.Controller
    scores: ScoreControl
    generator: Generator | None  # rank 0 only
    replay: Replay | None
    demonstrations: Demonstrations | None
    sync: EngineSync
    mismatch: MismatchLimits
    passes: StepPasses
    synced_version: int | str | None = None  # the name of the weights that the engines have

    def minibatches(self, rollout: Rollout, epoch: int = 0) -> list[Sequence[int]]:
        """The samples of each update of a pass over the step's: at most `samples_per_minibatch`, and as even as can be
        where samples were left out of the step. Shuffled ones follow from (seed, step, epoch), whatever the layout."""
        cfg, samples = self.cfg.batch, rollout.num_samples
        order: Sequence[int] = range(samples)
        if cfg.shuffle_minibatches:
            generator = torch.Generator().manual_seed(
                sample_seed(self.cfg.run.seed, SHUFFLE_STREAM + rollout.step, epoch)
            )
            order = torch.randperm(samples, generator=generator).tolist()
        count = math.ceil(samples / (cfg.samples_per_minibatch or samples))
        return [order[samples * i // count : samples * (i + 1) // count] for i in range(count)]

    def generate(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Returns the step's samples with their controlled scores, and metrics, the same on every rank."""
        self._give_lost_weights()
        self.passes.begin()

        def make() -> tuple[Rollout, dict[str, float]]:
            generator = self._generator
            if self.cfg.rollout.max_staleness == 0:
                generator.on_sample = self.passes.seeing(step, self._ticker(samples_per_step(self.cfg)))
            return generator.step(step)

        rollout, metrics = self.world.from_main("rollout", make, self._together)
        rollout, controlled = self.scores(rollout)
        return rollout, metrics | controlled

    def rest(self) -> None:
        """Waits until no response is being generated. Collective."""
        if self.cfg.rollout.max_staleness:
            self.world.from_main("waiting for samples", lambda: self._generator.scheduler.rest())

    def go_on(self) -> None:
        """Lets engines generate samples of later steps, after `rest`."""
        if self.cfg.rollout.max_staleness and self.generator is not None:
            self.generator.scheduler.resume()

    def trains_actor(self, step: int) -> bool:
        """Returns True if step `step` (from 0) trains the actor; the first ones may train the critic alone."""
        return self.cfg.critic is None or step >= self.cfg.critic.warmup_steps

    @property
    def version(self) -> int | None:
        """Version of the actor's weights by the engines' numbering, where samples may be of older weights."""
        return int(self.synced_version or 0) if self.cfg.rollout.is_behind else None

    def validate(self, step: int, name: str = "validation") -> dict[str, float]:
        self._give_lost_weights()

        def make() -> dict[str, float]:
            responses = len(self._generator.validated) * self.cfg.validation.samples_per_prompt
            return self._generator.validate(step, self._ticker(responses), name)

        return self.world.from_main("validation", make, together=self._together)

    def validate_average(self, step: int) -> dict[str, float]:
        """Validates the moving average of the actor's weights; the engines then get the actor's weights again."""
        assert self.ema is not None
        self.memory.begin("sync")
        with self.ema.in_place():
            self.sync_weights(f"{step}-ema")
            with self.memory.during("validation"):
                metrics = self.validate(step, "validation_ema")
        self.sync_weights(step)
        return metrics

    def _together(self, argument: ToScore | ToCompute | str) -> object:
        """Runs rank 0's requests to all ranks during sampling: scores of a reward model, forward passes of the first
        samples, or a weight sync for one engine."""
        if isinstance(argument, ToCompute):
            with self.memory.during("early_passes"):
                self.passes.add(argument.part)
            return None
        if isinstance(argument, ToScore):
            judge = self.cfg.reward.model
            assert self.reward_model is not None and judge is not None
            with self.memory.during("scoring"):
                return score(self.reward_model, judge, argument.texts)
        with self.memory.during("engine_restart"):
            return self.sync.resync(argument)

    def sync_weights(self, version: int | str, *, verify: bool = False) -> SyncReport:
        """Gives the actor's weights to every engine; `version` comes back with every sample. If an engine of ours dies
        in it, that one is started again, and all get the weights once more, verified. Where engines come and go, it is
        for those that are there, verified if one is new."""
        engine = self.generator.engine if self.generator is not None else None
        with engine.weight_sync(str(version)) if engine is not None else contextlib.nullcontext():
            while True:
                verify |= self._look_for_engines()
                try:
                    report = self.sync.update_weights(str(version), verify=verify)
                    break
                except SyncError as error:
                    if not self._revived(error):
                        raise
                verify = True
            if engine is not None:
                engine.has_synced(str(version), report.adapters)
        self.synced_version, self.memory.needs_weight_sync = version, False
        return report

    def _look_for_engines(self) -> bool:
        """Looks which engines the next weight sync is for; returns whether one of them is new. Collective."""
        if not (self.cfg.rollout.is_behind or self.cfg.placement.is_apart):
            return False
        urls, new = self.world.from_main("looking for engines", lambda: self._generator.engine.present())
        self.sync.set_engines(urls, new)
        return bool(new)

    def sync_again(self, *, verify: bool = False) -> SyncReport:
        """The weights that the engines were given last, by the same name: for engines that lack them."""
        assert self.synced_version is not None
        return self.sync_weights(self.synced_version, verify=verify)

    def _give_lost_weights(self) -> None:
        """Syncs weights to engines that were restarted while memory was moved, when no weight sync was possible."""
        while self.memory.needs_weight_sync:
            with self.memory.during("sync"):
                self.sync_again()

    def finish(self) -> None:
        """Finishes the run, and tells the engine nodes."""
        super().finish()
        if self.generator is not None:
            self.generator.engine.pool.end_of_run()

    def release_resources(self) -> None:
        """Engines that are not ours are left awake, with the last weights; a note says so if that fails."""
        if self.cfg.rollout.release == "none" or not self.cfg.rollout.urls:
            return
        try:
            self.memory.begin("end")
            self._give_lost_weights()
        except (RankZeroError, OffloadError, SyncError) as error:
            self.recorder.note(f"engines at rollout.urls may be left without memory or weights: {error}")

    def _revived(self, error: SyncError) -> bool:
        return self.world.from_main("starting the engine again", lambda: self._generator.engine.pool.revive(error))

    @property
    def engines(self) -> dict[str, float]:
        """Metric of the number of engines, where nodes may join and leave."""
        is_told = self.cfg.placement.is_apart and self.generator is not None
        return {"rollout/engines": len(self._generator.engine.urls)} if is_told else {}

    @property
    def engine_restarts(self) -> int:
        """So far, as rank 0 knows them."""
        return self.generator.engine.pool.restarts.made if self.generator else 0

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
    with set_up_run(cfg, longest_wait(cfg)) as setup:
        world, note, main = setup.world, setup.recorder.note, MainParts(cfg, setup)
        waits = world.any(bool(placement.gpus_with_engines(cfg, this_machine())))
        if not waits:
            main.start_elsewhere()
        world.from_main("starting the run", main.start)
        models = build_models(cfg, world)
        demonstrations = Demonstrations(cfg) if cfg.ptx is not None else None
        platform.release_cached_memory()
        world.any(False)  # all ranks are here: what is free on their GPUs now is what an engine there counts with
        if waits:
            main.start_elsewhere()
        engines = world.from_main("starting the engine", main.ready)
        sync = make_sync(main, {"": models.actor}, engines)
        warmup_steps = cfg.critic.warmup_steps if cfg.critic else 0
        mismatch = MismatchLimits(cfg.rollout.mismatch, note, engines.is_exact, warmup_steps)
        run = build_run(main, models, demonstrations, sync, mismatch)
        setup.stack.callback(sync.close)
        if main.engine is not None:

            def tell(line: str) -> None:
                world.activity.note()
                note(line)

            main.engine.pool.restarts.allow(tell, world.together)
        if main.rewards is not None:
            sees = models.reward is not None and models.reward.arch.vision is not None
            main.rewards.score_model = lambda samples: world.together(to_score(samples, sees))
        run.memory.begin("resume")
        run.resume()
        run.memory.begin("sync")
        outlive = cfg.run.launcher == "ft" or cfg.placement.is_apart  # the ranks, with older weights
        synced = run.sync_weights(run.start_step, verify=outlive)
        if synced.verified:
            have = "the engine has" if len(engines.urls) == 1 else f"{len(engines.urls)} engines have"
            note(f"{have} the weights of step {run.start_step}, all {synced.verified} tensors")
        for line in demonstrations.notes if demonstrations is not None else []:
            note(line)
        setup.is_set_up()
        yield run


def make_kl_controller(cfg: KLConfig) -> kl.Controller:
    return kl.make_controller(cfg.controller, coef=cfg.coef, target=cfg.target, horizon_samples=cfg.horizon_samples)


def build_run(
    main: MainParts,
    models: Models,
    demonstrations: Demonstrations | None,
    sync: EngineSync,
    mismatch: MismatchLimits,
) -> RLRun:
    cfg, setup, controller = main.cfg, main.setup, make_kl_controller(main.cfg.algorithm.kl)
    scores = ScoreControl(cfg.algorithm)
    replay = Replay(cfg.replay, cfg.run.seed, setup.world) if cfg.replay is not None else None
    states: dict[str, Stateful] = {"kl_controller": controller, "score_moments": scores.moments}
    keeps = CombinedState(
        *([replay.buffer] if replay is not None else []), *(main.generator.kept if main.generator is not None else [])
    )
    is_kept = cfg.replay is not None or cfg.rollout.is_behind
    engines = Engines(setup.world, RELEASED_PARTS[cfg.rollout.release], main.engine)
    order = PhaseMemoryManager(order_with(models.teachers), models.learners, engines)
    base = setup.begin(
        models.actor, models.saved, states, keeps if is_kept else None, order, end_tokens={"actor": main.end_tokens}
    )
    base.speed.watch(models.critic, models.ref, *models.teachers.values())
    return RLRun(
        **vars(base),
        critic=models.critic,
        ref=models.ref,
        reward_model=models.reward,
        ema=models.ema,
        teachers=models.teachers,
        teacher_engines=main.teacher_engines,
        kl_controller=controller,
        scores=scores,
        generator=main.generator,
        replay=replay,
        passes=StepPasses.make(cfg, models, setup.world.together),
        demonstrations=demonstrations,
        sync=sync,
        mismatch=mismatch,
    )
