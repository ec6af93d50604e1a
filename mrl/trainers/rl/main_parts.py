"""Parts of an RL run that exist on rank 0 only: engines, reward workers, prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mrl import platform
from mrl.agents.runner import AgentRunner
from mrl.config import placement
from mrl.config.derived import Machine
from mrl.config.schema import AgentConfig, RLConfig
from mrl.config.trainers.rl import counts_turns, most_tokens
from mrl.data import Tokenizer, conversation, read_template_variables
from mrl.data.open_data import open_prompts
from mrl.families import engine_arch
from mrl.inference.access import Access
from mrl.inference.engine import Engine
from mrl.inference.launch import cpu_threads, started_with
from mrl.inference.start import Others, join_engines, start_engine
from mrl.inference.teacher_engine import TeacherEngine
from mrl.reward.check import row_check
from mrl.reward.manager import RewardManager
from mrl.trainers.rl.generate import Generator
from mrl.trainers.rl.longest_wait import longest_turn
from mrl.trainers.rl.models import notes as model_notes
from mrl.trainers.rl.nodes import NodeEngines, start_engines_elsewhere
from mrl.trainers.rl.teacher_engines import check_teacher_engines, open_teacher_engines
from mrl.trainers.shared.run import RunSetup
from mrl.weights.sync.transports import begin_early


@dataclass(frozen=True)
class Ready:
    """Engines that are ready: their addresses, what opens them, the tensor-parallel ranks of each, and whether they
    compute as exactly as the trainer."""

    urls: tuple[str, ...]
    access: Access
    tensor: int
    is_exact: bool


@dataclass
class MainParts:
    """Rank 0's parts, closed with the setup's stack; the instances of other ranks are empty.

    adapter: the one that this is for, where a run trains several
    """

    cfg: RLConfig
    setup: RunSetup
    engine: Engine | None = None
    rewards: RewardManager | None = None
    generator: Generator | None = None
    nodes: NodeEngines | None = None  # every rank's
    teacher_engines: dict[str, TeacherEngine] = field(default_factory=dict)
    adapter: str = ""

    def note(self, line: str) -> None:
        """Shows a line, with the name of the adapter if this is for one of several."""
        self.setup.recorder.note(f"{self.adapter}: {line}" if self.adapter else line)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that the actor learns to end with; none on other ranks than 0."""
        if self.generator is None:
            return ()
        return (*self.cfg.rollout.sampling.stop_token_ids, self.generator.tokenizer.eos_id)

    def start_elsewhere(self) -> None:
        """Starts the engines of the other nodes, before rank 0 starts its own. Collective."""
        self.nodes = start_engines_elsewhere(self.cfg, self.setup, this_machine())

    def start(self) -> None:
        """Starts what takes its time: the engine where its GPUs are not the trainer's, and the reward workers."""
        self.start_engine_early()
        self.start_rewards()

    def start_engine_early(self) -> None:
        if not placement.gpus_with_engines(self.cfg, this_machine()):
            self._start_engine()

    def start_rewards(self) -> None:
        cfg = self.cfg
        rewards = RewardManager(
            cfg.reward,
            prompt_key=cfg.data.prompt_key,
            answer_key=cfg.data.answer_key,
            data_source_key=cfg.data.data_source_key,
            max_response_tokens=cfg.rollout.sampling.max_new_tokens,
        )
        self.rewards = self.setup.stack.enter_context(contextlib.closing(rewards))

    def _start_engine(self) -> Engine:
        cfg, logs = self.cfg, self.setup.run_dir / "logs"
        model, machine = cfg.model, this_machine()
        if cfg.placement.is_apart:
            engine = join_engines(cfg, self.setup.run_dir)
        else:
            settings, files = started_with(cfg), (model.path, model.dtype, logs)
            engine = start_engine(settings, *files, cfg.run.seed, machine=machine, others=self._others)
        self.engine = self.setup.stack.enter_context(contextlib.closing(engine))
        return engine

    @property
    def _others(self) -> Others | None:
        return self.nodes.others if self.nodes is not None else None

    def ready(self) -> Ready:
        """Waits for the engine, which it starts first where that has waited for the models, and opens the generator."""
        engines = self.ready_engine()
        self.open_generator()
        return engines

    def ready_engine(self) -> Ready:
        recorder = self.setup.recorder
        engine, own = self.engine or self._start_engine(), self.cfg.placement
        found = placement.notes(self.cfg.rollout, this_machine(), own.nodes_per_engine)
        for note in found if not own.is_apart else ():
            recorder.note(note)
        if not (own.is_apart or self.cfg.rollout.urls or this_machine().gpus):
            threads = cpu_threads(self.cfg.rollout, engine_arch(self.cfg.model.path), this_machine())
            recorder.note(f"engines on this machine's CPU: {self.cfg.rollout.servers}, threads of each: {threads}")
        many = f"{own.nodes} engine nodes (mrl serve)" if own.is_apart else f"{len(engine.urls)} engines"
        recorder.note(f"waiting for {'the engine' if len(engine.urls) == 1 else many}")
        begin_early(self.cfg.sync.transport)
        self.teacher_engines = open_teacher_engines(self.cfg)
        for teacher in self.teacher_engines.values():
            self.setup.stack.enter_context(contextlib.closing(teacher))
        check_teacher_engines(self.cfg, self.teacher_engines)
        engine.wait_ready()
        engine.check_room(max(most_tokens(cfg) for cfg in self.cfg.policies))
        if self.cfg.actor.routing_replay == "engine":
            engine.check_experts()
        for note in (*engine.pool.notes, *model_notes(self.cfg)):
            recorder.note(note)
        is_as_exact = is_exact(self.cfg) and engine.computes_in == {("cpu", "float32")}
        return Ready(engine.urls, engine.pool.access, engine.pool.tensor, is_as_exact)

    def open_generator(self) -> None:
        assert self.rewards is not None and self.engine is not None
        self.generator = make_generator(self.cfg, self.setup.run_dir, self.engine, self.rewards, self.note)
        self.generator.adapter = self.adapter
        self.generator.is_active = self.rewards.on_scored = self.setup.world.activity.note
        if self.cfg.agent is not None:
            agents = make_agents(self.cfg, self.cfg.agent, self.generator.tokenizer)
            self.generator.agents = self.setup.stack.enter_context(contextlib.closing(agents))
        self.generator.open_scheduler(self.setup.world.activity)
        self.setup.stack.callback(self.engine.close_dispatcher)
        for line in self.generator.notes():
            self.note(line)


def is_exact(cfg: RLConfig) -> bool:
    """Returns True if the actor computes in float32 on CPUs, where only the order of sums may differ."""
    return (
        platform.device().type == "cpu"
        and cfg.model.dtype == "float32"
        and cfg.actor.precision.fp8.recipe == "none"
        and cfg.rollout.quantization == "none"
    )


def make_agents(cfg: RLConfig, agent: AgentConfig, tokenizer: Tokenizer) -> AgentRunner:
    data = cfg.data
    stops = (*cfg.rollout.sampling.stop_token_ids, tokenizer.eos_id)
    by_turn = counts_turns(cfg)
    return AgentRunner(
        agent,
        tokenizer,
        stops,
        cfg.data.chat_template,
        by_turn,
        lambda prompt: (
            conversation(prompt.row[data.prompt_key], prompt.row, data),
            read_template_variables(prompt.row, data),
        ),
        longest_turn(cfg),
    )


def this_machine() -> Machine:
    """Returns the machine as rank 0 sees it."""
    return Machine.from_environment(platform.gpu_count())


def make_generator(
    cfg: RLConfig, run_dir: Path, engine: Engine, rewards: RewardManager, note: Callable[[str], None]
) -> Generator:
    sets = open_prompts(cfg, row_check(cfg.reward, cfg.data))
    train = sets["data.train"]
    return Generator(cfg, run_dir, engine, rewards, note, train.tokenizer, train, sets.get("data.validation"))
