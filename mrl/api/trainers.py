"""Trainers as classes. They run the loop that `mrl train` runs, in this process or in ranks that they start."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mrl.api import inputs, rank
from mrl.api.program import run_program
from mrl.commands import shared, world
from mrl.commands.train import COMPILED
from mrl.config.derived import Machine
from mrl.config.loader import load
from mrl.config.problems import ConfigError, Problem
from mrl.config.trainers.base import AnyConfig, Config
from mrl.config.trainers.table import TRAINERS, trainer_of
from mrl.config.tree import Source, name_of
from mrl.imports import importing
from mrl.ports import is_a_rank, world_problem
from mrl.trainers.shared.callbacks import TrainerCallback

if TYPE_CHECKING:
    from mrl.core import Rollout

SIGINT_CODE = 130


class TrainingFailed(RuntimeError):
    """A run that the trainer started has failed. exit_code: as of `mrl train`; 75: it can be resumed"""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class TrainingResult:
    """Outcome of `fit`.

    run_dir: the run directory
    steps: number of completed steps of the run
    metrics: the last row of metrics.jsonl
    """

    run_dir: Path
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Base class of the trainers.

    `fit` trains to the end. The other methods train step by step, in this process. As a context manager, the trainer
    closes what it has opened. Under torchrun or ft_launcher, where every rank makes the trainer, each method is
    collective.

    Args:
        config: a YAML file, its content as a dict, or a configuration object. In a dict `trainer` may be left out.
        reward_fn: the reward, with the signature of `reward.function`: (prompt, response, row) -> float or dict.
        train_dataset: rows for `data.train`: a `datasets.Dataset`, a list of dicts, a finite iterator, or a path. They
            are written to RUN_DIR/inputs.
        val_dataset: the same for `data.validation`.
        callbacks: see `mrl.TrainerCallback`.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        TypeError: callbacks that are no list of TrainerCallback objects.
    """

    trainer: ClassVar[str]  # the configuration's

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | AnyConfig,
        *,
        reward_fn: Callable[..., Any] | str | None = None,
        train_dataset: inputs.Rows | None = None,
        val_dataset: inputs.Rows | None = None,
        callbacks: Iterable[TrainerCallback] = (),
    ) -> None:
        if isinstance(config, AnyConfig):
            config = config.model_dump(mode="json")
        self._source: Source = {"trainer": self.trainer, **config} if isinstance(config, Mapping) else config
        self._overrides = inputs.overrides(self._source, reward_fn, train_dataset, val_dataset)
        self._callbacks = () if isinstance(callbacks, TrainerCallback) else tuple(callbacks)
        if isinstance(callbacks, TrainerCallback) or not all(isinstance(c, TrainerCallback) for c in self._callbacks):
            raise TypeError(f"callbacks must be a list of objects of TrainerCallback classes, got {callbacks!r}")
        self._loop: Any = None
        self.cfg = self._load()

    @property
    def run_dir(self) -> Path:
        """The run directory, `run.root`/`run.name`."""
        return Path(self.cfg.run.root) / self.cfg.run.name

    @property
    def train_step_num(self) -> int:
        """Number of completed steps, including those before a resume. Builds the run if that has not been done."""
        return int(self._opened().num_steps)

    def init_workers(self) -> Self:
        """Builds the run in this process: models, engines and data, resumed from the last checkpoint.

        Returns:
            The trainer.

        Raises:
            TrainingFailed: the layout needs more processes than there are, or the machine is not ready.
        """
        needed = Machine.for_launch(self.cfg).world_size
        if not is_a_rank() and needed > 1:
            raise TrainingFailed(
                f"the configuration needs {needed} ranks, and this process is one: call fit(), which starts them, or "
                f"start this script with torchrun --nproc-per-node {needed}"
            )
        self._prepare()
        with importing():
            make_loop = trainer_of(self.cfg).load_loop()
        self._loop = make_loop(self.cfg, self._callbacks).init_workers()
        return self

    def fit(self) -> TrainingResult:
        """Trains to the last step.

        In a process of torchrun or ft_launcher, or after a step in this process, this process trains. Elsewhere the
        trainer starts the ranks that the layout needs, and waits for them.

        Returns:
            The run directory, and the metrics of the last step.

        Raises:
            TrainingFailed: the run has failed; the message is that of `mrl train`.
            KeyboardInterrupt: Ctrl-C; all ranks have ended.
        """
        if self._loop is not None:
            self._loop.fit()
        elif is_a_rank():
            self._prepare()
            world.train(self.cfg, self._callbacks)
        else:
            self._launch()
        return self.result()

    def result(self) -> TrainingResult:
        """Returns the last step and its metrics, as the run directory has them."""
        from mrl.observe import read_metrics

        rows = read_metrics(self.run_dir) if (self.run_dir / "metrics.jsonl").exists() else []
        return TrainingResult(self.run_dir, int(rows[-1]["step"]), rows[-1]) if rows else TrainingResult(self.run_dir)

    def train_step(self) -> Mapping[str, float]:
        """Trains one step, with the validation that is due; saves nothing.

        Returns:
            The metrics of the step.
        """
        metrics: Mapping[str, float] = self._opened().train_step()
        return metrics

    def validate(self) -> Mapping[str, float]:
        """Validates on `data.validation`.

        Returns:
            The metrics, whose names begin with `validation`.

        Raises:
            ValueError: there are no held-out rows.
        """
        metrics: Mapping[str, float] = self._opened().validation()
        return metrics

    def save_checkpoint(self, save_as_hf: bool = False) -> Path:
        """Saves a checkpoint, from which `fit` and `mrl train` resume.

        Args:
            save_as_hf: also write the weights to RUN_DIR/hf_step_N, or with LoRA the adapters to
                RUN_DIR/adapter_step_N.

        Returns:
            The path of the complete checkpoint.
        """
        path: Path = self._opened().save_checkpoint(save_as_hf)
        return path

    def close(self) -> None:
        """Closes models, engines and files in this process; saves nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(*error)

    def _check(self, cfg: AnyConfig) -> Iterator[Problem]:
        """Yields why this class cannot train by a configuration."""
        if not isinstance(cfg, TRAINERS[self.trainer].schema):
            yield Problem(("trainer",), f"{type(self).__name__} needs {self.trainer}, got {cfg.trainer}")

    def _load(self) -> AnyConfig:
        if is_a_rank() and (problem := world_problem()):
            raise TrainingFailed(problem)
        machine: dict[str, Any] = {"planned": world.machine_on_nodes(1)}
        cfg = load(self._source, self._overrides, **({"joined": world.joined_machine()} if is_a_rank() else machine))
        if problems := list(self._check(cfg)):
            raise ConfigError(name_of(self._source), problems)
        return cfg

    def _opened(self) -> Any:
        if self._loop is None:
            self.init_workers()
        return self._loop

    def _prepare(self) -> None:
        """Prepares this process for training."""
        from mrl.resilience import preemption
        from mrl.resilience.rank import set_up_process

        os.environ.setdefault(*COMPILED)
        if is_a_rank():
            set_up_process()
            preemption.close_on_signal()
        self._preflight(world.joined_machine() if is_a_rank() else Machine.for_launch(self.cfg, world.gpus()))

    def _preflight(self, machine: Machine) -> None:
        with _stderr() as said:
            found = shared.has_problems(self.cfg, machine)
        if found:
            raise TrainingFailed(said.getvalue().strip())

    def _launch(self) -> None:
        """Starts the ranks and waits for them."""
        os.environ.setdefault(*COMPILED)
        file = inputs.make_folder(self.run_dir) / "rank.pickle"
        rank.write(file, self._source, self._overrides, self._callbacks)
        code, said = run_program([sys.executable, "-m", "mrl.api.rank", str(file.absolute())])
        if code == SIGINT_CODE:
            raise KeyboardInterrupt
        if code:
            lines = [line.removeprefix("mrl: ").removeprefix("error: ") for line in said.splitlines()]
            raise TrainingFailed("\n".join(lines) or f"exit code {code}", code)


class SFTTrainer(Trainer):
    """Supervised fine-tuning, `trainer: sft`."""

    trainer = "sft"


class DPOTrainer(Trainer):
    """Preference learning by DPO and its kin, `trainer: dpo`."""

    trainer = "dpo"


class RewardTrainer(Trainer):
    """Reward models, `trainer: reward_model`."""

    trainer = "reward_model"


class DDPOTrainer(Trainer):
    """Reinforcement learning of diffusion models, `trainer: ddpo`."""

    trainer = "ddpo"


class DiffusionSFTTrainer(Trainer):
    """Denoising of given images, `trainer: diffusion_sft`."""

    trainer = "diffusion_sft"


class RLTrainer(Trainer):
    """Reinforcement learning of language models by any advantage estimator, `trainer: rl`.

    Step by step: `generate`, `train_step`, `sync_weight`.
    """

    trainer = "rl"
    estimator: ClassVar[str | None] = None  # algorithm.adv_estimator that the class needs

    def _check(self, cfg: AnyConfig) -> Iterator[Problem]:
        yield from super()._check(cfg)
        algorithm = cfg.algorithm_used()
        if algorithm is not None and algorithm.adv_estimator != (self.estimator or algorithm.adv_estimator):
            what = f"{type(self).__name__} needs {self.estimator}, got {algorithm.adv_estimator}"
            yield Problem(("algorithm.adv_estimator",), f"{what}: change it, or use RLTrainer")

    def generate(self) -> Rollout:
        """Generates and scores the samples of the next step. With `rollout.max_staleness`, later ones are started too.

        Returns:
            The samples as flat tensors, equal on every rank.
        """
        rollout: Rollout = self._opened().generate()
        return rollout

    def train_step(self, rollout: Rollout | None = None) -> Mapping[str, float]:
        """Makes all updates of a step. The engines keep their weights until `sync_weight`.

        With several adapters (section `adapters`) a step has no parts: it samples, trains and syncs all of them.

        Args:
            rollout: what `generate` has returned, perhaps with other scores; None: it is generated here.

        Returns:
            The metrics of the step.
        """
        if rollout is None and isinstance(self.cfg, Config) and self.cfg.adapter_configs():
            return super().train_step()
        metrics: Mapping[str, float] = self._opened().learn(self.generate() if rollout is None else rollout)
        return metrics

    def sync_weight(self) -> Mapping[str, float]:
        """Gives the engines the weights of the last step.

        Returns:
            The metrics of the weight sync.
        """
        metrics: Mapping[str, float] = self._opened().sync_weight()
        return metrics


class PPOTrainer(RLTrainer):
    """PPO with a critic: `trainer: rl` with `algorithm.adv_estimator: gae`."""

    estimator = "gae"


class GRPOTrainer(RLTrainer):
    """GRPO: `trainer: rl` with `algorithm.adv_estimator: grpo`."""

    estimator = "grpo"


class _Both(io.StringIO):
    """Text that also goes to the present stderr."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self._shown = shown

    def write(self, text: str) -> int:
        self._shown.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._shown.flush()


@contextlib.contextmanager
def _stderr() -> Iterator[io.StringIO]:
    """Keeps what the block prints to stderr."""
    with contextlib.redirect_stderr(_Both(sys.stderr)) as both:
        yield both
