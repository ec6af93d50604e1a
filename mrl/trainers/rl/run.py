"""Everything an RL run holds, built in the order that overlaps the engine's start with the models', unless they share
GPUs: an engine takes its part of what it finds free."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mrl import platform
from mrl.algo import kl
from mrl.config import placement
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import most_samples_per_step, samples_per_step
from mrl.core import Rollout, Sample
from mrl.data import PromptDataset, load_tokenizer
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.observe import Recorder, SilentRecorder
from mrl.reward import RewardManager, longest_wait_s
from mrl.reward.check import row_check
from mrl.rollout import RELEASED_PARTS, Access, Engine, Others, join_engines, start_engine
from mrl.trainers.rl.demonstrations import Demonstrations
from mrl.trainers.rl.generate import Generator, Sampled, Sampler
from mrl.trainers.rl.memory_order import ORDER, Engines
from mrl.trainers.rl.mismatch import MismatchLimits
from mrl.trainers.rl.models import Models, MovingAverage, build_models
from mrl.trainers.rl.models import notes as model_notes
from mrl.trainers.rl.nodes import NodeEngines, start_engines_elsewhere
from mrl.trainers.rl.replay import Replay
from mrl.trainers.rl.reward_scores import ToScore, score
from mrl.trainers.rl.scores import ScoreControl
from mrl.trainers.shared.checkpoints import Kept
from mrl.trainers.shared.memory import MemoryOrder, OffloadError
from mrl.trainers.shared.run import Run, Start, started
from mrl.trainers.shared.world import RankZeroError
from mrl.weights.sync.push import SyncError, SyncReport, WeightSync
from mrl.weights.sync.quantized import QuantizedSource


@dataclass
class RLRun(Run):
    cfg: RLConfig
    critic: Learner | None
    ref: Learner | PolicyCopy | None
    reward_model: Learner | None
    ema: MovingAverage | None
    kl_controller: kl.Controller
    scores: ScoreControl
    generator: Generator | None  # rank 0 only
    replay: Replay | None
    demonstrations: Demonstrations | None
    sync: WeightSync
    mismatch: MismatchLimits
    pushed: int | str | None = None  # the name of the weights that the engines have

    def minibatches(self, rollout: Rollout) -> list[range]:
        size = self.cfg.batch.samples_per_minibatch or rollout.num_samples
        return [range(i, i + size) for i in range(0, rollout.num_samples, size)]

    def generate(self, step: int) -> Sampled:
        """The step's samples with their controlled scores, the same on every rank."""
        self._give_lost_weights()
        return self.sampler.start(step).result()

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.world, self._sample, self._together, self.scores)

    def _sample(self, step: int) -> Sampled:
        return self._generator.rollout(step, self._ticker(samples_per_step(self.cfg)))

    def validate(self, step: int, name: str = "validation") -> dict[str, float]:
        self._give_lost_weights()
        prompts = self.cfg.validation.prompts
        return self.world.from_main(
            "validation",
            lambda: self._generator.validate(step, self._ticker(prompts), name),
            together=self._together,
        )

    def validate_average(self, step: int) -> dict[str, float]:
        """As `validate`, of the moving average of the actor's weights; the engines then get the actor's again."""
        assert self.ema is not None
        self.memory.begin("sync")
        with self.ema.in_place():
            self.push_weights(f"{step}-ema")
            with self.memory.during("validation"):
                metrics = self.validate(step, "validation_ema")
        self.push_weights(step)
        return metrics

    def _together(self, argument: ToScore | str) -> object:
        """What rank 0 may ask of all ranks while it samples: a reward model's scores, or the weights for an engine."""
        if isinstance(argument, ToScore):
            assert self.reward_model is not None
            with self.memory.during("scoring"):
                return score(self.reward_model, argument.sequences)
        with self.memory.during("engine_restart"):
            return self.sync.restore(argument)

    def push_weights(self, version: int | str, *, verify: bool = False) -> SyncReport:
        """Gives the actor's weights to every engine; `version` comes back with every sample. If an engine of ours dies
        in it, that one is started again, and all get the weights once more, verified. Where engines come and go, it is
        for those that are there, verified if one is new."""
        while True:
            verify |= self._look_for_engines()
            try:
                report = self.sync.push(str(version), verify=verify)
                break
            except SyncError as error:
                if not self._revived(error):
                    raise
            verify = True
        if self.generator is not None:
            self.generator.engine.has_pushed(str(version))
        self.pushed, self.memory.must_push = version, False
        return report

    def _look_for_engines(self) -> bool:
        """The next push is for the engines that are there; whether one of them is new. Collective."""
        if not self.cfg.placement.is_apart:
            return False
        urls, new = self.world.from_main("looking for engines", lambda: self._generator.engine.present())
        self.sync.use(urls, new)
        return bool(new)

    def push_again(self) -> SyncReport:
        """The weights that the engines were given last, by the same name: for engines that lack them."""
        assert self.pushed is not None
        return self.push_weights(self.pushed)

    def _give_lost_weights(self) -> None:
        """To engines that were started again while memory moved, when there was nobody to ask for weights."""
        while self.memory.must_push:
            with self.memory.during("sync"):
                self.push_again()

    def finish(self) -> None:
        """As every run; engine nodes are told."""
        super().finish()
        if self.generator is not None:
            self.generator.engine.end_of_run()

    def let_go(self) -> None:
        """Engines that are not ours are left awake, with the last weights; a note says so if that fails."""
        if self.cfg.rollout.release == "none" or not self.cfg.rollout.urls:
            return
        try:
            self.memory.begin("end")
            self._give_lost_weights()
        except (RankZeroError, OffloadError, SyncError) as error:
            self.recorder.note(f"engines at rollout.urls may be left without memory or weights: {error}")

    def _revived(self, error: SyncError) -> bool:
        return self.world.from_main("starting the engine again", lambda: self._generator.engine.revive(error))

    @property
    def engines(self) -> dict[str, float]:
        """As a metric, where they come and go: how many the run has, as rank 0 knows."""
        is_told = self.cfg.placement.is_apart and self.generator is not None
        return {"rollout/engines": len(self._generator.engine.urls)} if is_told else {}

    @property
    def engine_restarts(self) -> int:
        """So far, as rank 0 knows them."""
        return self.generator.engine.restarts.made if self.generator else 0

    def _ticker(self, total: int) -> Callable[[Sample], None]:
        self.recorder.expect(total)
        return lambda sample: self.recorder.advance()

    @property
    def _generator(self) -> Generator:
        assert self.generator is not None, "only rank 0 talks to the engine"
        return self.generator


@dataclass
class MainParts:
    """What rank 0 alone has, closed with the setup's stack; the other ranks hold one with nothing in it."""

    cfg: RLConfig
    setup: Start
    engine: Engine | None = None
    rewards: RewardManager | None = None
    generator: Generator | None = None
    nodes: NodeEngines | None = None  # every rank's

    def start_elsewhere(self) -> None:
        """Starts the engines of the other nodes, before rank 0 starts its own. Collective."""
        self.nodes = start_engines_elsewhere(self.cfg, self.setup, this_machine())

    def start(self) -> None:
        """Starts what takes its time: the reward workers, and the engine where its GPUs are not the trainer's."""
        cfg = self.cfg
        rewards = RewardManager(
            cfg.reward,
            prompt_key=cfg.data.prompt_key,
            answer_key=cfg.data.answer_key,
            data_source_key=cfg.data.data_source_key,
            max_response_tokens=cfg.rollout.sampling.max_new_tokens,
        )
        self.rewards = self.setup.stack.enter_context(contextlib.closing(rewards))
        if not placement.gpus_with_engines(cfg, this_machine()):
            self._start_engine()

    def _start_engine(self) -> Engine:
        cfg, logs = self.cfg, self.setup.run_dir / "logs"
        model, machine = cfg.model, this_machine()
        if cfg.placement.is_apart:
            engine = join_engines(cfg, self.setup.run_dir)
        else:
            engine = start_engine(
                cfg.rollout, model.path, model.dtype, logs, cfg.run.seed, machine=machine, others=self._others
            )
        self.engine = self.setup.stack.enter_context(contextlib.closing(engine))
        return engine

    @property
    def _others(self) -> Others | None:
        return self.nodes.others if self.nodes is not None else None

    def ready(self) -> tuple[tuple[str, ...], Access]:
        """Waits for the engine, which it starts first where that has waited for the models; its addresses, and what
        opens them."""
        assert self.rewards is not None
        recorder = self.setup.recorder
        engine, own = self.engine or self._start_engine(), self.cfg.placement
        for note in placement.notes(self.cfg.rollout, this_machine()) if not own.is_apart else ():
            recorder.note(note)
        many = f"{own.nodes} engine nodes (mrl serve)" if own.is_apart else f"{len(engine.urls)} engines"
        recorder.note(f"waiting for {'the engine' if len(engine.urls) == 1 else many}")
        engine.wait_ready()
        self.generator = make_generator(self.cfg, self.setup.run_dir, engine, self.rewards, recorder)
        for note in (*engine.notes, *self.generator.notes(), *model_notes(self.cfg)):
            recorder.note(note)
        return engine.urls, engine.access


def this_machine() -> Machine:
    """As rank 0 sees it."""
    return Machine.around(platform.gpu_count())


@contextlib.contextmanager
def open_rl_run(cfg: RLConfig) -> Iterator[RLRun]:
    """Builds the run on every rank; closes engine, reward workers, files and process group on any exit."""
    with started(cfg, _longest_wait(cfg)) as setup:
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
        urls, access = world.from_main("starting the engine", main.ready)
        sync = make_sync(main, models, urls, access)
        run = build_run(main, models, demonstrations, sync)
        setup.stack.callback(sync.close)
        if main.engine is not None:
            main.engine.restarts.allow(note, world.together)
        if main.rewards is not None:
            main.rewards.use_model(lambda sequences: world.together(ToScore(tuple(sequences))))
        run.memory.begin("resume")
        run.resume()
        run.memory.begin("sync")
        outlive = cfg.run.launcher == "ft" or cfg.placement.is_apart  # the ranks, with older weights
        pushed = run.push_weights(run.start_step, verify=outlive)
        if pushed.verified:
            have = "the engine has" if len(urls) == 1 else f"{len(urls)} engines have"
            note(f"{have} the weights of step {run.start_step}, all {pushed.verified} tensors")
        for line in demonstrations.notes if demonstrations is not None else []:
            note(line)
        setup.is_set_up()
        yield run


def make_sync(main: MainParts, models: Models, urls: tuple[str, ...], access: Access) -> WeightSync:
    rollout, weights = main.cfg.rollout, models.actor.exporter
    return WeightSync(
        QuantizedSource(weights) if rollout.quantization == "fp8" else weights,
        urls,
        main.cfg.sync,
        rollout.tensor,
        access=access,
        plain=ENGINES[rollout.engine].is_plain,
        guard=main.engine.check_push if main.engine is not None else None,
        nodes=main.nodes.nodes if main.nodes is not None else None,
        homes=main.nodes.all_homes(urls) if main.nodes is not None else None,
        apart=main.cfg.placement.is_apart,
    )


def build_run(main: MainParts, models: Models, demonstrations: Demonstrations | None, sync: WeightSync) -> RLRun:
    cfg, setup, kl_cfg = main.cfg, main.setup, main.cfg.algorithm.kl
    controller = kl.make_controller(
        kl_cfg.controller, coef=kl_cfg.coef, target=kl_cfg.target, horizon_samples=kl_cfg.horizon_samples
    )
    scores = ScoreControl(cfg.algorithm)
    replay = Replay(cfg.replay, cfg.run.seed, setup.world) if cfg.replay is not None else None
    states: dict[str, Kept] = {"kl_controller": controller, "score_moments": scores.moments}
    kept = replay.buffer if replay is not None else None
    engines = Engines(setup.world, RELEASED_PARTS[cfg.rollout.release], main.engine)
    base = setup.begin(models.actor, models.saved, states, kept, MemoryOrder(ORDER, models.learners, engines))
    base.speed.watch(models.critic, models.ref)
    return RLRun(
        **vars(base),
        critic=models.critic,
        ref=models.ref,
        reward_model=models.reward,
        ema=models.ema,
        kl_controller=controller,
        scores=scores,
        generator=main.generator,
        replay=replay,
        demonstrations=demonstrations,
        sync=sync,
        mismatch=MismatchLimits(cfg.rollout.mismatch, setup.recorder.note),
    )


def make_generator(
    cfg: RLConfig, run_dir: Path, engine: Engine, rewards: RewardManager, recorder: Recorder | SilentRecorder
) -> Generator:
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
    check = row_check(cfg.reward, cfg.data)
    train = PromptDataset(cfg.data.train, cfg.data, tokenizer, check=check)
    held_out = cfg.data.validation
    validation = PromptDataset(held_out, cfg.data, tokenizer, check=check) if held_out else None
    return Generator(cfg, run_dir, engine, rewards, recorder.note, tokenizer, train, validation)


def _longest_wait(cfg: RLConfig) -> float:
    """Seconds that rank 0's sampling may take: every request in turn, each up to its own time-out, and
    all restarts of engines."""
    samples = max(most_samples_per_step(cfg), cfg.validation.prompts)
    rounds = math.ceil(samples / cfg.rollout.concurrent_requests)
    return (
        cfg.run.timeout_s
        + cfg.rollout.startup_timeout_s
        + rounds * cfg.rollout.request_timeout_s
        + cfg.rollout.max_restarts * (cfg.rollout.startup_timeout_s + cfg.rollout.request_timeout_s)
        + longest_wait_s(cfg.reward, samples)
        + (cfg.placement.wait_s if cfg.placement.is_apart else 0.0)
    )
