"""The recipe of docs/extending.md for a policy loss or an advantage estimator, in a user's file or in mrl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.algo import advantages, custom, policy_loss
from mrl.algo.policy_loss import TokenLoss, with_metrics
from mrl.config import resume
from mrl.config.schema import RLConfig
from mrl.preflight.inputs import check_user_functions
from mrl.resilience import preemption
from mrl.user_functions import FunctionError
from tests.helpers.recipe import section
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import ROOT, run_world

LAYOUTS = ("cp2", "pp2", *slow_cases("tp2", "dp2"))
Results = dict[str, tuple[float, float, str, dict[str, float], dict[str, float]]]


def recipe() -> tuple[str, ...]:
    """Returns the code blocks of the recipe."""
    return tuple(re.findall(r"```python\n(.*?)```", section("A policy loss or an advantage estimator"), re.DOTALL))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the file of the recipe."""
    found = tmp_path_factory.mktemp("own") / "mine.py"
    found.write_text(recipe()[0])
    return found


# --- by file.py:name


@pytest.fixture(scope="module")
def results(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("own_algorithms")
    size = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 313}
    model = make_tiny(root / "model", "llama", tied=True, weights=False, **size)
    for processes, layouts in ((1, ("one",)), (2, LAYOUTS)):
        run_world(processes, "own_algorithms.py", model, file, root / "one.pt", root / "result.json", *layouts)
    return json.loads((root / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_their_gradients_and_metrics_equal_one_process(results: Results, layout: str) -> None:
    loss_error, gradient_error, worst, metrics, before = results[layout]
    assert loss_error < 1e-5 and gradient_error < 1e-5, (loss_error, gradient_error, worst)
    assert 0 < metrics["actor/gate"] < 1 and "actor/clipfrac" in metrics
    assert metrics == pytest.approx(before, rel=1e-4, abs=1e-6)


def configuration(train: str = "-", **algorithm: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            "trainer": "rl",
            "run": {"name": "own"},
            "model": {"path": "-"},
            "data": {"train": train},
            "reward": {"function": "exact_match"},
            "batch": {"prompts_per_step": 4},
            "algorithm": algorithm,
        }
    )


def test_another_function_or_option_is_another_run(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    mine = {"adv_estimator": "grpo", "policy_loss": {"function": "mine.py:loss", "options": {"slope": 2.0}}}
    stored = resume.snapshot(configuration(str(data), **mine))

    def changes(**other: Any) -> list[str]:
        return [str(change) for change in resume.compare(stored, configuration(str(data), **mine | other))]

    assert changes() == []
    key = "algorithm.policy_loss"
    assert changes(policy_loss={"function": "other.py:loss", "options": {"slope": 2.0}}) == [
        f'{key}.function: "mine.py:loss" -> "other.py:loss"'
    ]
    assert changes(policy_loss={"function": "mine.py:loss"}) == [f'{key}.options: {{"slope": 2.0}} -> {{}}']
    assert changes(policy_loss={"loss_mode": "gspo"}) == [f'{key}.loss_mode: "function" -> "gspo"']
    assert resume.is_key(RLConfig, f"{key}.function") and resume.is_key(RLConfig, "algorithm.advantage.options")
    assert not resume.is_key(RLConfig, f"{key}.functions")


def test_a_checkpoint_by_former_names_and_former_defaults(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    stored = resume.snapshot(configuration(str(data), adv_estimator="grpo"))
    stored["config"]["algorithm"] |= {"gamma": 1.0, "lam": 1.0, "gpg_f_norm": 1.0}
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "tau_pos": 1.0}
    stored["config"]["algorithm"]["policy_loss"] |= {"loss_mode": "dppo_tv", **bounds}
    now = configuration(str(data), adv_estimator="grpo", policy_loss={"loss_mode": "dppo_tv", "divergence_low": 0.2})
    changes = [str(change) for change in resume.compare(stored, now)]
    assert changes == ["algorithm.policy_loss.divergence_high: 0.2 -> 0.15"]


LOSSES = {  # text of the file -> error
    "def f(inputs): return inputs.log_probs": "must return a TokenLoss, got Tensor",
    "def f(inputs): return TokenLoss(inputs.log_probs.sum())": "tensor of the inputs' shape [6], got shape []",
    "def f(inputs): return TokenLoss(inputs.log_probs * float('nan'))": "value is NaN or infinite at 6 of 6 places",
    "def f(inputs): return TokenLoss(inputs.advantages)": "does not depend on log_probs",
    "def f(inputs): return TokenLoss(inputs.log_probs, metrics={'gate': inputs.advantages})": "declares the metrics []",
    "def f(inputs): return TokenLoss(inputs.log_probs * gone)": "NameError: name 'gone' is not defined",
    "def f(inputs): return TokenLoss((inputs.log_ratio - inputs.log_ratio.detach()).sqrt())": "missing or not finite",
    "def f(inputs): return TokenLoss(inputs.log_probs, metrics={'ratio': inputs.log_probs})": "declares the metrics []",
    "def f(inputs): return TokenLoss(inputs.log_probs * inputs.advantages.mul_(2))": "changes advantages in place",
    "def f(inputs): return TokenLoss(inputs.log_probs * inputs.old_log_probs.zero_())": "changes old_log_probs in",
    "def f(inputs): return TokenLoss(inputs.log_probs * 1j)": "value has complex numbers",
    "def f(inputs): raise SystemExit(0)": "calls sys.exit(0)",
    "from torch import relu as f": "TypeError: relu()",
    "import gone": "importing",
    "f = 3": "is a int, not a function",
}


@pytest.mark.parametrize("text", LOSSES)
def test_a_loss_that_cannot_be_used_is_one_error_before_a_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"from mrl.algo.policy_loss import TokenLoss\n{text}\n")
    cfg = configuration(adv_estimator="grpo", policy_loss={"function": f"{path}:f"})
    with pytest.raises(FunctionError) as error:
        check_user_functions(cfg.algorithm, has_values=False)
    said = str(error.value)
    assert said.startswith("algorithm.policy_loss.function '") and LOSSES[text] in said and "\n" not in said


@pytest.mark.parametrize("text", ["def f(inputs): {}", "def f(inputs): return None\n{}"])
def test_a_signal_in_the_midst_of_a_user_s_loss_ends_the_run_as_a_signal_does(text: str, tmp_path: Path) -> None:
    """A signal during a user's loss ends the run with the signal's exit code, not as an error of the loss. From the
    exit code a scheduler knows whether to restart the run."""
    path, kill = tmp_path / "slow.py", "__import__('os').kill(__import__('os').getpid(), 15)"
    path.write_text(text.format(kill))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        preemption.close_on_signal()
        with pytest.raises(SystemExit) as stopped:
            custom.load_custom_loss(f"{path}:f", {})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stopped.value.code == 128 + 15


ESTIMATES = {
    "return t.token_rewards": "must return (advantages, returns), got Tensor",
    "return t.token_rewards.sum(1), t.token_rewards": "must be a tensor of the inputs' shape [4, 3], got shape [4]",
    "return t.token_rewards, t.token_rewards / 0": "returns is NaN or infinite at",
    "return t.token_rewards.mul_(2), t.token_rewards": "changes token_rewards in place",
    "return t.token_rewards, t.mask.fill_(True) * 1.0": "changes mask in place",
    "return t.token_rewards * 1j, t.token_rewards": "advantages has complex numbers",
    "raise SystemExit(0)": "calls sys.exit(0)",
    "return t.values, t.values": "advantages must be a tensor of the inputs' shape [4, 3], got NoneType",
}


@pytest.mark.parametrize("text", ESTIMATES)
def test_an_estimator_that_cannot_be_used_is_one_error_before_a_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"def f(t): {text}\n")
    with pytest.raises(FunctionError) as error:
        check_user_functions(configuration(advantage={"function": f"{path}:f"}).algorithm, has_values=False)
    said = str(error.value)
    assert said.startswith("algorithm.advantage.function '") and ESTIMATES[text] in said


def test_an_estimator_gets_the_values_of_a_critic(tmp_path: Path) -> None:
    path = tmp_path / "critic.py"
    path.write_text("def f(t): return t.values, t.values\n")
    estimator = custom.load_custom_estimator(f"{path}:f", {}, has_values=True)
    ones = torch.ones(2, 3)
    adv, _ = advantages.compute(
        estimator, token_rewards=ones, response_mask=ones.tril(1), group=torch.zeros(2, dtype=torch.long), values=ones
    )
    assert torch.equal(adv, ones.tril(1)), "0 outside the mask, whatever the function gives there"


def test_what_fails_later_is_the_same_error(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "from mrl.algo.policy_loss import TokenLoss\n"
        "def f(t): return TokenLoss(t.log_probs / (t.log_probs.numel() != 2))\n"
    )
    loss = custom.load_custom_loss(f"{path}:f", {})
    two = torch.ones(2)
    with pytest.raises(FunctionError, match=r"late.py:f': value is NaN or infinite at 2 of 2 places"):
        policy_loss.compute(loss, log_probs=two, old_log_probs=two, advantages=two, weights=two)


def test_metrics_of_every_loss_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match="every loss has a metric clipfrac, entropy"):
        with_metrics("clipfrac", "gate", "entropy")(lambda inputs: TokenLoss(inputs.log_probs))
    with pytest.raises(ValueError, match="every loss has a metric grad_norm, loss, off_policy_masked"):
        with_metrics("loss", "grad_norm", "off_policy_masked")
    with pytest.raises(ValueError, match="'a b' is no name of a metric"):
        with_metrics("gate", "a b")


def test_a_metric_named_like_a_part_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "hides.py"
    path.write_text(
        "from mrl.algo.policy_loss import TokenLoss, with_metrics\n"
        "@with_metrics('value')\n"
        "def f(t): return TokenLoss(t.log_probs / 0, metrics={'value': t.advantages})\n"
    )
    with pytest.raises(FunctionError, match="value is NaN or infinite at"):
        custom.load_custom_loss(f"{path}:f", {})


# --- in mrl itself

ESTIMATOR = '''class Toy(EstimatorOptions, name="toy"):
    """Scores above a floor."""

    floor: float = 0.0  # what is taken off
'''
ESTIMATOR_FUNCTION = """

from mrl.algo.advantages import ESTIMATORS, AdvantageInputs


@ESTIMATORS.register("toy")
def floored(t: AdvantageInputs, floor: float) -> tuple:
    scores = (t.token_rewards.sum(1, keepdim=True) - floor).expand_as(t.mask)
    return scores, scores
"""
PROGRAM = """
import sys
from mrl.cli import main

assert main(["config", "algorithm.policy_loss"]) == main(["config", "algorithm.floor"]) == 0
assert "torch" not in sys.modules
import torch
from mrl.algo import advantages, policy_loss
from mrl.config.sections.policy import policy_loss as section

loss = section(loss_mode="toy", slope=3)
x = torch.ones(2)
value, metrics = policy_loss.compute(
    loss.loss_mode, log_probs=x, old_log_probs=x, advantages=x, weights=x, **loss.own_options
)
print("loss", value.item(), metrics["gate"].item(), loss.aggregation)
ones = torch.ones(2, 3)
adv, _ = advantages.compute("toy", token_rewards=ones, response_mask=ones, group=x.long())
print("advantages", adv.unique().item())
"""


def append(path: Path, text: str) -> None:
    path.write_text(f"{path.read_text()}\n\n{text}")


def test_one_of_mrl_s_own(tmp_path: Path) -> None:
    """A loss within mrl itself needs a new file, the line that imports it, and a class of options."""
    mrl = shutil.copytree(ROOT / "mrl", tmp_path / "mrl", ignore=shutil.ignore_patterns("__pycache__"))
    _, options, function = recipe()
    append(mrl / "options" / "losses.py", options)
    append(mrl / "options" / "estimators.py", ESTIMATOR)
    (mrl / "algo" / "toy.py").write_text(function + ESTIMATOR_FUNCTION)
    room = mrl / "algo" / "__init__.py"
    room.write_text(room.read_text().replace("    token_rewards,\n", "    token_rewards,\n    toy,\n"))
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    assert "\nwith loss_mode: toy\n" in made.stdout and "\nslope: 1  # number > 0\n" in made.stdout
    assert "algorithm.floor: 0  # number; trainer: rl; only with adv_estimator: toy\n" in made.stdout
    said = dict(line.split(" ", 1) for line in made.stdout.splitlines()[-2:])
    assert said == {"loss": "-2.0 2.0 seq-mean-token-mean", "advantages": "3.0"}
