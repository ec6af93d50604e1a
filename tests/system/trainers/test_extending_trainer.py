"""A user's own trainer as docs/extending.md describes it: its configuration, its loop, and a row in the table.

The trainer is in this file. It minimizes the mean log-likelihood of the answers, so that the model forgets them.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from mrl import cli
from mrl.config import manual
from mrl.config.checks.base import Archs
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.loader import ConfigError, load
from mrl.config.problems import Problem
from mrl.config.trainers.base import Config, DataUse
from mrl.config.trainers.table import TRAINERS, Trainer
from mrl.options.base import PositiveInt
from tests.helpers import zygote

ROOT = Path(__file__).parents[3]

# ---- mrl/config/trainers/forget.py


class ForgetConfig(Config):
    """`trainer: forget`: the answers become less likely."""

    trainer: Literal["forget"]  # answers become less likely
    samples_per_step: PositiveInt  # rows of one update

    def data_uses(self) -> dict[str, DataUse]:
        return {"data": DataUse(self.data, self.samples_per_step)}

    def summary(self) -> list[tuple[str, str]]:
        return [("step", f"{self.samples_per_step} samples to forget")]


def check(cfg: ForgetConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from check_shares(cfg, machine, "samples_per_step", cfg.samples_per_step)
    if cfg.actor.optimizer.lr == 0:
        yield Problem(("actor.optimizer.lr", "trainer"), "at 0 nothing would be forgotten")


# ---- mrl/trainers/forget.py


def make_loop(cfg: ForgetConfig, callbacks: Any) -> Any:
    """Returns the loop. In a user's file it is a class at top level; here that would import Megatron."""
    from mrl.trainers.shared.loop import Loop

    class ForgetLoop(Loop[Any]):
        open = staticmethod(lambda: open_run(cfg))

        def step(self, step: int) -> Any:
            return train_step(self.run, self.run.data.sft_rollout(step, cfg.samples_per_step, cfg.run.seed))

    return ForgetLoop(cfg, callbacks)


@contextlib.contextmanager
def open_run(cfg: ForgetConfig) -> Iterator[Any]:
    from mrl.data import PromptDataset, load_tokenizer
    from mrl.trainers.shared.models import build_learner
    from mrl.trainers.shared.run import Run, set_up_run

    @dataclass
    class ForgetRun(Run):
        data: Any

    with set_up_run(cfg) as start:
        actor = build_learner(cfg, start.world, "policy", None, cfg.actor)
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
        data = PromptDataset(cfg.data.train, cfg.data, tokenizer, require_answer=True)
        run = ForgetRun(**vars(start.begin(actor)), data=data)
        run.resume()
        start.is_set_up()
        yield run


def train_step(run: Any, batch: Any) -> Any:
    from mrl.algo import aggregate
    from mrl.learner import losses
    from mrl.trainers.shared.updates import named

    stats, samples = run.checkpointer.new_stats(batch.step + 1), range(batch.num_samples)
    with run.phase("update", stats):
        weights = batch.flat(aggregate.token_weights("token-mean", batch.response_mask))
        metrics = run.actor.backward(batch, samples, losses.cross_entropy(-weights), temperature=1.0)
        metrics |= run.actor.step()
        run.updates.note("actor", run.actor, batch, samples, metrics)
        run.updates.end_of_step(batch.step + 1)
    stats.metrics |= named("actor", metrics)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


# ---- the row of mrl/config/trainers/table.py

ROW = Trainer(ForgetConfig, f"{__name__}:make_loop", check)


@pytest.fixture
def config(tmp_path: Path, tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(TRAINERS, "forget", ROW)
    rows = ({"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(4))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "trainer": "forget",
        "run": {"name": "run", "root": str(tmp_path / "runs"), "steps": 2, "trackers": []},
        "model": {"path": str(tiny_models("llama")), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 1e-3}},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 32},
        "checkpoint": {"every_steps": 1},
        "samples_per_step": 4,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optimizer.lr=0.0", "actor.optimizer.lr: at 0 nothing would be forgotten"),
        ("run.nproc=8", "samples_per_step: 4 samples are fewer than the 8 data-parallel replicas"),
        ("samples_per_stepp=4", "did you mean samples_per_step?"),
        ("reward={function: exact_match}", "reward: unknown key"),
        ("resilience.timeouts_s.rollout=1.0", "forget does not generate"),
        ("data.validation=train.jsonl", "only data of generated responses is validated"),
        ("data.answer_key=result", "has no 'result'"),
        ("data.max_prompt_tokens=512", "leave no room for answers"),
        ("actor.optimizer.decay=linear", "required by linear decay"),
        ("trainer=forgett", "must be one of rl, sft, dpo, reward_model, ddpo, diffusion_sft, forget"),
    ],
)
def test_its_configuration_is_checked_by_its_own_rules_and_by_those_of_all(
    config: Path, override: str, said: str
) -> None:
    launcher = ["run.launcher=ft"] if override.startswith("resilience") else []
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(config, [override, *launcher])


def test_what_the_command_shows_of_it_is_its_own_answer(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "data.train: 4 prompts" in shown and "tokens of prompt, answer and EOS" in shown
    assert re.search(r" 2\.00 .*train\.jsonl", shown), "epochs: two steps of four of the four rows"
    manual.manual.cache_clear()
    try:
        assert manual.text("samples_per_step").splitlines()[0].endswith("trainer: forget")
        assert "sft, dpo, reward_model, forget" in manual.text("actor.optimizer.lr")
    finally:
        manual.manual.cache_clear()


def test_it_trains_saves_and_goes_on(config: Path) -> None:
    shown = train(config)
    assert "step  4 samples to forget" in shown and "actor  one replica over 1 rank" in shown
    assert "resuming from" in train(config, "run.steps=3")
    run_dir = config.parent / "runs" / "run"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    losses = [row["actor/loss"] for row in rows]
    assert losses[0] > losses[1] > losses[2], "every step sees all rows: what it forgot is less likely in the next"
    assert (run_dir / "checkpoints" / "step_3" / "complete").is_file()


def train(config: Path, *overrides: str) -> str:
    """Trains on the one rank of `mrl train`, with the row in the table, and returns its output."""
    from mrl.ports import free_port

    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    own = ("tests.system.trainers.test_extending_trainer", "train", config)
    done = zygote.run(*own, *overrides, timeout_s=300, **world, MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_every_row_names_a_program() -> None:
    assert all(callable(trainer.load_loop()) for trainer in TRAINERS.values() if all(map(find_spec, trainer.packages)))


def test_nobody_else_asks_which_trainer_it_is() -> None:
    """No other module asks for the trainer's type, or each new trainer would have to be added there too."""
    asks = re.compile(r"isinstance\([^)]*\b(RL|SFT)Config|\.trainer (==|!=|in|not in)\b")
    found = {str(file) for file in (ROOT / "mrl").rglob("*.py") if asks.search(file.read_text())}
    assert not found


if __name__ == "__main__":
    TRAINERS["forget"] = ROW
    sys.exit(cli.main())
