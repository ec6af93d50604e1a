"""The Python API as a user runs it: the examples in one process and at TP2 x PP2, and the ways a script's run ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from mrl.observe import read_metrics
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.runs import results, train
from tests.helpers.sft_config import write
from tests.helpers.world import run_world

pytestmark = pytest.mark.longest

ROOT = Path(__file__).parents[3]
RUN_S = 600.0
TWO_RANKS = {"parallel": {"tensor": 2}}
EXACT = ("actor/loss", "actor/grad_norm", "reward/mean")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def python(folder: Path, *arguments: object, ranks: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` in the folder, as `ranks` torchrun ranks if there are any."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )


def example(name: str, folder: Path, *arguments: object, ranks: int = 0) -> str:
    done = python(folder, ROOT / "examples" / name, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def script(folder: Path, *lines: str) -> Path:
    file = folder / "script.py"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def grpo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the example in one process."""
    folder = tmp_path_factory.mktemp("grpo")
    shown = example("grpo_script.py", folder, tiny_models("llama"), folder / "runs")
    assert "after 5 steps" in shown
    return folder


def test_a_script_s_run_is_that_of_the_command(grpo: Path) -> None:
    """A script's run equals `mrl train` with the configuration that the run wrote, bit for bit."""
    run_dir = grpo / "runs/grpo"
    train(grpo, run_dir / "config.yaml", "run.name=command")
    assert results(run_dir) == results(grpo / "runs/command")
    assert max(results(run_dir)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 4])
def test_four_ranks_learn_the_same(grpo: Path, tiny_models: TinyModels, tmp_path: Path, ranks: int) -> None:
    """Four ranks give the metrics of one process, started by the trainer and by torchrun."""
    example("grpo_script.py", tmp_path, tiny_models("llama"), tmp_path / "runs", 2, 2, ranks=ranks)
    alone, four = read_metrics(grpo / "runs/grpo"), read_metrics(tmp_path / "runs/grpo")
    for one, other in zip(alone, four, strict=True):
        for name in EXACT:
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name


STEPS = """
import json, sys
sys.path.insert(0, sys.argv[3])
from mrl import GRPOTrainer
from grpo_script import lower_case
from mrl.config.tree import read

config = read(sys.argv[1])[0].plain()
config["run"] |= {"name": "stepwise"}
with GRPOTrainer(config, reward_fn=lower_case) as trainer:
    losses = []
    for _ in range(3):
        rollout = trainer.generate()
        metrics = trainer.train_step(rollout)
        trainer.sync_weight()
        losses.append([metrics["actor/grad_norm"], rollout.scores.mean().item()])
    path = trainer.save_checkpoint(save_as_hf=True)
    assert trainer.train_step_num == 3 and path.name == "step_3" and (path / "complete").exists(), path
    assert (trainer.run_dir / "hf_step_3" / "config.json").exists()
    try:
        trainer.validate()
    except ValueError as error:
        assert "data.validation" in str(error)
    result = trainer.fit()
assert result.steps == 5, result
print(json.dumps(losses))
"""


def test_step_by_step_is_fit(grpo: Path, tmp_path: Path) -> None:
    run_dir = grpo / "runs/grpo"
    shown = run_world(1, str(script(tmp_path, STEPS)), run_dir / "config.yaml", tmp_path, ROOT / "examples")
    found, whole = json.loads(shown.splitlines()[-1]), results(run_dir)
    for step, (norm, reward) in enumerate(found, 1):
        assert norm == pytest.approx(whole[step]["actor/grad_norm"], rel=1e-6)
        assert reward == pytest.approx(whole[step]["reward/mean"], rel=1e-6)
    stepwise = results(run_dir.parent / "stepwise")
    assert {step: row["reward/mean"] for step, row in stepwise.items()} == {
        step: row["reward/mean"] for step, row in whole.items()
    }


@pytest.mark.parametrize(
    ("ranks", "forked"),
    [pytest.param(0, False, marks=pytest.mark.slow), pytest.param(4, False, marks=pytest.mark.slow), (4, True)],
)
def test_a_loop_of_one_s_own_learns_as_the_built_in_one(
    grpo: Path, tiny_models: TinyModels, tmp_path: Path, ranks: int, forked: bool
) -> None:
    """A user's loop gives the losses of the built-in one: in one process, under torchrun, and in forked ranks."""
    layout = ("2", "2") if ranks else ()
    if forked:
        shown = run_world(ranks, str(ROOT / "examples/own_loop.py"), tiny_models("llama"), *layout)
    else:
        shown = example("own_loop.py", tmp_path, tiny_models("llama"), *layout, ranks=ranks)
    own = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    parallel = ["actor.parallel.tensor=2", "actor.parallel.pipeline=2"] if ranks else []
    overrides = [f"run.name=built_in_{ranks}_{forked}", "data.shuffle=false", *parallel]
    train(tmp_path, grpo / "runs/grpo/config.yaml", *overrides)
    built_in = results(grpo / f"runs/built_in_{ranks}_{forked}")
    assert len(own) == 5
    for row in own:
        other = built_in[row["step"]]
        assert row["loss"] == pytest.approx(other["actor/loss"], abs=1e-6)
        assert row["grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-6, abs=1e-6)
        assert row["reward"] == pytest.approx(other["reward/mean"], abs=1e-6)


SESSION = """
import sys
import torch
from mrl.api import Session

sections = {
    "critic": {"optimizer": {"lr": 1e-2}},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_loss": True, "coef": 0.1}},
    "checkpoint": {"every_steps": 1},
    "run": {"name": "session", "root": sys.argv[2], "trackers": []},
}
settings = dict(lr=1e-3, dtype="float32", max_new_tokens=8, engine="transformers", root=sys.argv[2], sections=sections)
asked = ["1 + 1 =", "2 + 2 =", "3 + 3 ="]

def policy_loss(log_probs, entropy, batch):
    return -log_probs.sum(), log_probs.numel()

with Session.from_model(sys.argv[1], **settings) as s:
    samples = s.engine.generate(asked, n=2)
    assert [each.request.group for each in samples] == [0, 0, 1, 1, 2, 2]
    for sample in samples:
        sample.score = 1.0
    rollout = s.batch(samples)
    count = rollout.num_response_tokens
    before, goal = s.policy.log_probs(rollout), torch.ones(count)
    assert before.shape == (count,) and torch.equal(before, s.ref.log_probs(rollout)), "first weights"

    def value_loss(values, batch):
        return (values - batch.take(goal)).square().sum(), values.numel()

    errors = [s.critic.update(rollout, value_loss)["loss"]]
    assert abs(errors[0] - float((s.critic.values(rollout) - 1).square().mean())) < 1e-5
    for _ in range(4):
        s.critic.update(rollout, value_loss)
        s.critic.optim_step()
    assert float((s.critic.values(rollout) - 1).square().mean()) < errors[0]

    found = s.policy.update(rollout, policy_loss)
    assert abs(found["loss"] + float(before.mean())) < 1e-5, found
    assert s.policy.optim_step()["grad_norm"] > 0
    after = s.policy.log_probs(rollout)
    assert after.mean() > before.mean() and torch.equal(before, s.ref.log_probs(rollout))
    try:
        s.policy.update(rollout, lambda log_probs, entropy, batch: (log_probs.sum(), 0))
    except ValueError as error:
        print(error)
    s.sync()
    s.log({"mine": 2.5})
    path, values = s.save(export=True), s.critic.values(rollout)
    assert path.name == "step_1" and (path / "complete").exists() and (path.parents[1] / "hf_step_1").is_dir()

with Session.from_model(sys.argv[1], **settings) as s:
    assert s.num_steps == 1
    assert torch.equal(s.policy.log_probs(rollout), after) and torch.equal(s.critic.values(rollout), values)
    assert torch.equal(s.ref.log_probs(rollout), before)
print("resumed")
"""


def session(folder: Path, program: str, *arguments: Path) -> list[str]:
    """Runs a program in one process with preloaded imports, and returns the lines that it prints."""
    done = zygote.run("tests.helpers.code", program, *arguments, cwd=folder, timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def test_a_session_s_critic_and_reference_and_what_it_keeps(tiny_models: TinyModels, tmp_path: Path) -> None:
    shown = session(tmp_path, SESSION, tiny_models("llama"), tmp_path / "runs")
    assert "the denominators of a loss function must have a positive sum, got 0" in shown
    assert shown[-1] == "resumed"
    assert read_metrics(tmp_path / "runs/session")[-1]["mine"] == 2.5


TAUGHT = """
import sys
from mrl.api import Session

teacher = {"path": sys.argv[3], "divergence": "forward_kl", "coef": 2.0, "policy_coef": 0.0}
sections = {"teacher": teacher, "run": {"name": "taught", "root": sys.argv[2], "trackers": []}}
settings = dict(lr=3e-3, dtype="float32", max_new_tokens=8, engine="transformers", root=sys.argv[2], sections=sections)

with Session.from_model(sys.argv[1], **settings) as s:
    samples = s.engine.generate(["1 + 1 =", "2 + 2 =", "3 + 3 ="], n=4)
    for sample in samples:
        sample.score = 0.0
    rollout = s.batch(samples)
    kl = []
    for _ in range(12):
        found = s.policy.update(rollout, lambda log_probs, entropy, batch: (log_probs.sum(), log_probs.numel()))
        assert abs(found["loss"] - 2.0 * found["distill/kl"]) < 1e-4, found
        s.policy.optim_step()
        kl.append(found["distill/kl"])
    assert kl[-1] < 0.6 * kl[0], kl
    of_teacher = s.teacher.log_probs(rollout)
    far = (of_teacher - rollout.rollout_log_probs).abs().mean()
    assert (of_teacher - s.policy.log_probs(rollout)).abs().mean() < far
print("taught")
"""


def test_a_session_with_a_teacher_learns_from_it(tiny_models: TinyModels, tmp_path: Path) -> None:
    teacher = tiny_models("llama", seed=4, hidden_size=96, initializer_range=0.01)
    student = tiny_models("qwen2", tied=True)
    assert session(tmp_path, TAUGHT, student, tmp_path / "runs", teacher)[-1] == "taught"


def assert_callbacks_see_the_run(shown: str, runs: Path) -> None:
    assert [line.partition(":")[0] for line in shown.splitlines() if " samples, best score" in line] == [
        f"step {n}" for n in range(1, 5)
    ]
    assert "4 steps" in shown and shown.count("validation after step 2:") == 1
    assert f"saved {runs}/ppo/checkpoints/step_4" in shown


@pytest.mark.parametrize("ranks", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_ppo_with_callbacks_on_four_ranks(tiny_models: TinyModels, tmp_path: Path, ranks: int) -> None:
    """PPO with callbacks runs on four ranks, started by the trainer and by torchrun."""
    shown = example("ppo_with_callbacks.py", tmp_path, tiny_models("llama"), tmp_path / "runs", 2, 2, ranks=ranks)
    assert_callbacks_see_the_run(shown, tmp_path / "runs")


@pytest.mark.slow
def test_callbacks_see_a_run_in_one_process_and_may_end_it(tiny_models: TinyModels, tmp_path: Path) -> None:
    shown = example("ppo_with_callbacks.py", tmp_path, tiny_models("llama"), tmp_path / "runs")
    assert_callbacks_see_the_run(shown, tmp_path / "runs")
    lines = (ROOT / "examples/ppo_with_callbacks.py").read_text().replace("StopAtReward(0.9)", "StopAtReward(-1.0)")
    file = script(tmp_path, lines.replace('"name": "ppo"', '"name": "stopped"'))
    done = python(tmp_path, file, tiny_models("llama"), tmp_path / "runs")
    assert done.returncode == 0 and "after 1 steps" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "runs/stopped/checkpoints/step_1/complete").exists(), "the last step is saved"


def kernel(folder: Path, cells: list[Any], monkeypatch: pytest.MonkeyPatch) -> NotebookClient:
    """Returns the cells in a Jupyter kernel of this environment, which is not started yet."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=cells)
    return NotebookClient(notebook, timeout=RUN_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}})


def shown_by(client: NotebookClient) -> str:
    return "".join(str(output.get("text", "")) for cell in client.nb.cells for output in cell.outputs)


def test_the_notebook_runs(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", str(tiny_models("llama")))
    monkeypatch.setenv("ROOT", str(tmp_path / "runs"))
    cells = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4).cells
    client = kernel(tmp_path, [cell for cell in cells if cell.cell_type == "code"], monkeypatch)
    client.execute()
    assert "step 6/6" in shown_by(client)


@pytest.mark.slow
def test_a_notebook_s_interrupt_ends_all_ranks(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = sft_lines(tmp_path, tiny_models("llama"), "SFTTrainer('config.yaml').fit()", actor=TWO_RANKS)
    cells = [nbformat.v4.new_code_cell(source) for source in (lines, "print('the kernel goes on')")]
    client = kernel(tmp_path, cells, monkeypatch)
    with client.setup_kernel():
        process = psutil.Process(client.km.provisioner.pid)
        ranks: list[psutil.Process] = []

        def interrupt() -> None:
            end = time.monotonic() + RUN_S
            while "step 2/" not in shown_by(client) and time.monotonic() < end:
                time.sleep(0.1)
            ranks.extend(process.children(recursive=True))
            asyncio.run(client.km.interrupt_kernel())

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(cells[0], 0)
        thread.join()
        assert len(ranks) >= 2 and psutil.wait_procs(ranks, 30)[1] == []
        client.execute_cell(cells[1], 1)
    assert "the kernel goes on" in shown_by(client)


# ---- how runs end


def sft_lines(folder: Path, model: Path, *lines: str, **sections: Any) -> str:
    """Writes config.yaml and returns the program."""
    write(folder, model, **{"run": {"steps": 10_000}, "validation": {"patience": 10_000}, **sections})
    return "\n".join(["import time", "from mrl import SFTTrainer, TrainerCallback, TrainingFailed", *lines])


def test_trainers_one_after_the_other_leave_no_more_threads_than_two_do(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    lines = [
        "import os",
        "for name in 'abcd':",
        "    with SFTTrainer(CONFIG | {'run': CONFIG['run'] | {'name': name}}) as trainer:",
        "        trainer.init_workers()",
        "        trainer.fit()",
        "    del trainer",
        "    print('threads', len(os.listdir('/proc/self/task')))",
    ]
    program = sft_lines(tmp_path, tiny_models("llama"), *lines, run={"steps": 1})
    file = script(tmp_path, "import yaml", "CONFIG = yaml.safe_load(open('config.yaml'))", program)
    done = python(tmp_path, file)
    assert done.returncode == 0, done.stderr[-4000:]
    threads = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("threads ")]
    assert len(threads) == 4 and max(threads[2:]) <= threads[1] + 4, "gloo has two threads for each of some 20 groups"


def test_an_exception_in_a_callback_of_one_rank_ends_the_run(tiny_models: TinyModels, tmp_path: Path) -> None:
    lines = [
        "class Broken(TrainerCallback):",
        "    def on_step_end(self, state, metrics):",
        "        if state.step == 2 and not state.is_main:",
        "            raise ValueError('no more')",
        "try:",
        "    SFTTrainer('config.yaml', callbacks=[Broken()]).fit()",
        "except TrainingFailed as error:",
        "    print('caught', error.exit_code, error)",
    ]
    file = script(tmp_path, sft_lines(tmp_path, tiny_models("llama"), *lines, actor=TWO_RANKS))
    done = python(tmp_path, file)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "caught 1 Broken.on_step_end failed at step 2: ValueError: no more" in done.stdout


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_the_script_ends_all_ranks(tiny_models: TinyModels, tmp_path: Path, number: signal.Signals) -> None:
    """A signal to the script ends all ranks. With SIGTERM the run saves first."""
    lines = [
        "try:",
        "    SFTTrainer('config.yaml').fit()",
        "except KeyboardInterrupt:",
        "    print('interrupted', flush=True)",
        "except TrainingFailed as error:",
        "    print('caught', error.exit_code, flush=True)",
    ]
    sections = {"actor": TWO_RANKS, "checkpoint": {"every_steps": 5000}}
    file = script(tmp_path, sft_lines(tmp_path, tiny_models("llama"), *lines, **sections))
    shown = tmp_path / "shown"
    with shown.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(file)], cwd=tmp_path, env=environment(), stdout=out, stderr=out, start_new_session=True
        )
    end = time.monotonic() + RUN_S
    while "step 2/" not in shown.read_text():
        assert process.poll() is None and time.monotonic() < end, shown.read_text()[-4000:]
        time.sleep(0.1)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.send_signal(number)
    assert process.wait(RUN_S) == 0
    assert ("interrupted" if number == signal.SIGINT else "caught 75") in shown.read_text()
    assert ("on a signal: step" in shown.read_text()) == (number == signal.SIGTERM)
    assert psutil.wait_procs(ranks, 30)[1] == []
