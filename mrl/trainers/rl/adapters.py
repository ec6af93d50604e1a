"""A run of several LoRA adapters of one frozen base model (`adapters`).

Each adapter is trained as in a run of it alone: it has prompts, rewards, samples, gradients and an optimizer of its
own. What they share does not change a bit of any: the base model, the engines, which sample for all of them at once,
and the weight syncs, which send all of them together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mrl import platform
from mrl.config import placement
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import needs_ref
from mrl.core import Rollout, StepStats
from mrl.inference.protocol import RELEASED_PARTS
from mrl.learner import Learner
from mrl.parallel import world_size
from mrl.trainers.rl import loop
from mrl.trainers.rl.longest_wait import longest_wait
from mrl.trainers.rl.main_parts import MainParts, this_machine
from mrl.trainers.rl.make_sync import make_sync
from mrl.trainers.rl.memory_order import ORDER, Engines
from mrl.trainers.rl.mismatch import MismatchLimits
from mrl.trainers.rl.models import Models
from mrl.trainers.rl.passes import StepPasses
from mrl.trainers.rl.run import RLRun, make_kl_controller
from mrl.trainers.rl.scores import ScoreControl
from mrl.trainers.shared.callbacks import Callbacks
from mrl.trainers.shared.checkpoints import Stateful
from mrl.trainers.shared.memory import PhaseMemoryManager
from mrl.trainers.shared.models import build_learner
from mrl.trainers.shared.references import ActorWithoutAdapters
from mrl.trainers.shared.run import Run, RunSetup, set_up_run
from mrl.trainers.shared.speed import Speed
from mrl.trainers.shared.updates import Updates
from mrl.trainers.shared.world import World
from mrl.weights.sync.engine_sync import EngineSync

FOLDER = "adapters"  # in the run directory and in checkpoints


@dataclass
class AdaptersRun(Run):
    """adapters: the run of each adapter, by name. They share everything that is not the adapter's own."""

    cfg: RLConfig
    adapters: Mapping[str, RLRun]

    def train_step(self, step: int) -> StepStats:
        """Runs one step of every adapter: sample for all, train one after the other, sync all."""
        stats, started, restarts = self.checkpointer.new_stats(step + 1), time.monotonic(), self._first.engine_restarts
        own = {name: StepStats(step + 1) for name in self.adapters}
        with self.phase("rollout", stats):
            self.world.from_main("rollout", lambda: self._start_sampling(step))
        rollouts: dict[str, Rollout] = {}
        for name, run in self.adapters.items():
            with self._only(name):
                rollouts[name] = loop.generate(run, step, own[name])
        loads = self.world.from_main("rollout", lambda: self._load_metrics(step))
        for name, run in self.adapters.items():
            with self._only(name):
                loop.learn(run, step, rollouts[name], own[name])
        with self.phase("sync", stats):
            stats.metrics |= self.sync(step + 1)
        self._add(stats, own)
        for metric in ("reward/mean", "response/mean_tokens"):
            stats.metrics[metric] = sum(each.metrics[metric] for each in own.values()) / len(own)
        seconds, tokens = time.monotonic() - started, sum(each.num_response_tokens for each in rollouts.values())
        stats.metrics |= loads | self.speed.metrics(stats, rollouts[next(iter(rollouts))], tokens, seconds)
        stats.metrics["rollout/engine_restarts"] = self._first.engine_restarts - restarts
        for name, run in self.adapters.items():
            if (step + 1) % run.cfg.validation.every_steps == 0 or step + 1 == run.cfg.run.steps:
                self._validate(name, step + 1, stats)
        self.phase.end_of_step(stats)
        self.recorder.log(stats)
        return stats

    def validate_at_start(self) -> None:
        """Validates the adapters whose configuration asks for it before the first step, and logs that as step 0."""
        stats = StepStats(0)
        for name, run in self.adapters.items():
            if run.cfg.validation.at_start:
                self._validate(name, 0, stats)
        if stats.metrics:
            self.recorder.log(stats)

    def finish(self) -> None:
        super().finish()
        for run in self.adapters.values():
            run.updates.end_of_run()

    def set_callbacks(self, callbacks: Callbacks) -> None:
        super().set_callbacks(callbacks)
        for run in self.adapters.values():
            run.set_callbacks(callbacks)

    def release_resources(self) -> None:
        self._first.release_resources()

    @property
    def _first(self) -> RLRun:
        return next(iter(self.adapters.values()))

    def sync(self, version: int, *, verify: bool = False) -> dict[str, float]:
        """Gives the engines all adapters."""
        report = self._first.sync_weights(version, verify=verify)
        for run in self.adapters.values():
            run.synced_version = version
        return report.metrics()

    def _start_sampling(self, step: int) -> None:
        generators = [run.generator for run in self.adapters.values() if run.generator is not None]
        generators[0].engine.take_loads()  # a validation's
        for generator in generators:
            generator.scheduler.start(step)

    def _load_metrics(self, step: int) -> dict[str, float]:
        assert self._first.generator is not None
        return self._first.generator.load_metrics(step, self.run_dir)

    def _validate(self, name: str, step: int, stats: StepStats) -> None:
        own = StepStats(step)
        with self._only(name):
            loop.validate(self.adapters[name], step, own)
        self._add(stats, {name: own})

    @contextlib.contextmanager
    def _only(self, name: str) -> Iterator[None]:
        """Names the adapter in errors, and for callbacks."""
        self.callbacks.state.adapter = name
        try:
            yield
        except Exception as error:
            error.args = (f"adapter {name}: {error}",)
            raise
        finally:
            self.callbacks.state.adapter = ""

    @staticmethod
    def _add(stats: StepStats, own: Mapping[str, StepStats]) -> None:
        """Adds adapters' metrics as NAME/METRIC, and their seconds to those of the step."""
        for name, each in own.items():
            stats.metrics |= {f"{name}/{metric}": value for metric, value in each.metrics.items()}
            for phase, seconds in each.seconds.items():
                stats.seconds[phase] = stats.seconds.get(phase, 0.0) + seconds


@contextlib.contextmanager
def open_adapters_run(cfg: RLConfig) -> Iterator[AdaptersRun]:
    """Builds the run on every rank; closes engine, reward workers, files and process group on any exit."""
    each = cfg.adapter_configs()
    with set_up_run(cfg, max(map(longest_wait, each.values()))) as setup:
        world, main = setup.world, MainParts(cfg, setup)
        mains = {name: MainParts(own, _own_setup(setup, own, name), adapter=name) for name, own in each.items()}

        def start() -> None:
            main.start_engine_early()
            for own in mains.values():
                (own.setup.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
                own.start_rewards()

        def open_generators() -> None:
            for own in mains.values():
                own.engine = main.engine
                own.open_generator()

        waits = world.any(bool(placement.gpus_with_engines(cfg, this_machine())))
        if not waits:
            main.start_elsewhere()
        world.from_main("starting the run", start)
        models = _build_models(each, world)
        platform.release_cached_memory()
        world.any(False)  # all ranks are here: what is free on their GPUs now is what an engine there counts with
        if waits:
            main.start_elsewhere()
        engines = world.from_main("starting the engine", main.ready_engine)
        world.from_main("opening the data of the adapters", open_generators)
        sync = make_sync(main, {name: own.actor for name, own in models.items()}, engines)
        setup.stack.callback(sync.close)
        run = _begin(main, mains, models, sync, is_exact=engines.is_exact)
        if main.engine is not None:

            def tell(line: str) -> None:
                world.activity.note()
                setup.recorder.note(line)

            main.engine.pool.restarts.allow(tell, world.together)
        run.memory.begin("resume")
        run.resume()
        run.memory.begin("sync")
        run.sync(run.start_step, verify=cfg.run.launcher == "ft")
        setup.is_set_up()
        yield run


def _own_setup(setup: RunSetup, cfg: RLConfig, name: str) -> RunSetup:
    """Returns the setup of one adapter, whose files are in RUN_DIR/adapters/NAME."""
    return replace(setup, cfg=cfg, run_dir=setup.run_dir / FOLDER / name)


def _build_models(each: Mapping[str, RLConfig], world: World) -> dict[str, Models]:
    """Builds the base model once, and the adapters, whose reference is the base model."""
    found: dict[str, Models] = {}
    base: Learner | None = None
    for name, cfg in each.items():
        replays = cfg.actor.routing_replay != "off"
        actor = build_learner(cfg, world, "policy", None, cfg.actor, replays=replays, base=base)
        found[name] = Models(actor, None, ActorWithoutAdapters(actor) if needs_ref(cfg) else None, None, None)
        base = base or actor
    return found


def _begin(
    main: MainParts, mains: Mapping[str, MainParts], models: Mapping[str, Models], sync: EngineSync, *, is_exact: bool
) -> AdaptersRun:
    """Returns the run at step 0. A checkpoint holds the state of all adapters."""
    cfg, setup, world = main.cfg, main.setup, main.setup.world
    actors = {name: own.actor for name, own in models.items()}
    controllers = {name: make_kl_controller(own.cfg.algorithm.kl) for name, own in mains.items()}
    scores = {name: ScoreControl(own.cfg.algorithm) for name, own in mains.items()}
    updates = {
        name: Updates(own.setup.run_dir, cfg.run.max_nonfinite_steps, setup.recorder, writes=world.is_main)
        for name, own in mains.items()
    }
    states: dict[str, Stateful] = {}
    for name in mains:
        states[f"{FOLDER}/{name}/kl_controller"] = controllers[name]
        states[f"{FOLDER}/{name}/score_moments"] = scores[name].moments
        states[f"{FOLDER}/{name}/updates"] = updates[name]
    first = next(iter(actors.values()))
    memory = PhaseMemoryManager(
        ORDER, {"actor": first}, Engines(world, RELEASED_PARTS[cfg.rollout.release], main.engine)
    )
    parts = {f"{FOLDER}/{name}": actor for name, actor in actors.items()}
    ends = {f"{FOLDER}/{name}": own.end_tokens for name, own in mains.items()}
    base = setup.begin(first, parts, states, memory=memory, end_tokens=ends)
    speed = Speed(world_size())
    speed.watch(*actors.values())
    runs = {}
    for name, own in mains.items():
        shared = vars(base) | {"cfg": own.cfg, "run_dir": own.setup.run_dir, "actor": actors[name], "speed": speed}
        limits = MismatchLimits(own.cfg.rollout.mismatch, own.note, is_exact)
        runs[name] = RLRun(
            **shared | {"updates": updates[name]},
            critic=None,
            ref=models[name].ref,
            reward_model=None,
            ema=None,
            teachers={},
            teacher_engines={},
            kl_controller=controllers[name],
            scores=scores[name],
            generator=own.generator,
            replay=None,
            passes=StepPasses.make(own.cfg, models[name], world.together),
            demonstrations=None,
            sync=sync,
            mismatch=limits,
        )
    return AdaptersRun(**vars(base) | {"speed": speed}, adapters=runs)
