"""The reward pool: whatever a user's function does, the other samples are scored, and no process hangs or remains."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mrl.config.schema import RewardConfig
from mrl.core import Prompt, Request, Sample
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager

USER_FILE = """
import ctypes, os, re, subprocess, sys, time

def score(prompt, response, row):
    do = row.get("do")
    if do == "raise": raise LookupError("no luck with " + response)
    if do == "sleep": time.sleep(1000)
    if do == "regex": re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ever
    if do == "exit": os._exit(3)
    if do == "segfault": ctypes.string_at(0)
    if do == "sys.exit": sys.exit(0)
    if do == "nan": return float("nan")
    if do == "str": return "1.0"
    if do == "no score": return {"reward": 1.0}
    if do == "slow": time.sleep(0.25)
    if do == "child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(row["pid_file"], "w") as file: file.write(str(child.pid))
        time.sleep(1000)
    return {"score": float(response), "pid": os.getpid(), "torch": "torch" in sys.modules}

def length(prompt, response, row):
    return len(prompt)
"""


def sample(i: int, response: str = "", row: dict[str, object] | None = None) -> Sample:
    full = {"prompt": f"question {i}", "answer": "7", **(row or {})}
    request = Request(sample_id=i, group=i, prompt=Prompt(100 + i, (1,), full), seed=i)
    return Sample(request, [], [], "stop", "0", response or str(i))


def todo(i: int, do: str, **row: object) -> Sample:
    return sample(i, row={"do": do, **row})


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "user_reward.py"
    path.write_text(USER_FILE)
    return f"{path}:score"


def open_pool(function: str, **kwargs: object) -> RewardManager:
    return RewardManager(RewardConfig.model_validate({"function": function, "timeout_s": 20.0, **kwargs}))


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Returns True if the process ends in time. A zombie counts as ended, because its new parent may reap it late."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


HANG_S = 5.0
FAULTS = {
    "raise": r"raised:(?s:.*)user_reward.py(?s:.*)LookupError: no luck with 5",
    "sleep": r"returned nothing within 5 s \(reward.timeout_s\)",
    "regex": "returned nothing within 5 s",
    "exit": r"ended its process \(exit code 3\)",
    "segfault": r"ended its process \(signal SIGSEGV\)",
    "sys.exit": "SystemExit",
    "nan": "the score must be finite, got nan",
    "str": "the score must be a float, got str '1.0'",
    "no score": r"dict without 'score', only \['reward'\]",
}


def test_a_fault_costs_its_own_sample_only(function: str) -> None:
    samples = [sample(i) for i in range(60)]
    bad = dict(zip(range(5, 60, 6), FAULTS, strict=False))
    for i, do in bad.items():
        samples[i] = todo(i, do)
    with open_pool(function, timeout_s=HANG_S, on_error="zero") as pool:
        for one in samples:
            pool.submit(one)
        pool.collect(samples)
        assert pool.failures == len(FAULTS)
        again = [sample(i) for i in range(10)]
        pool.collect(again)
    assert [s.score for s in samples] == [0.0 if i in bad else float(i) for i in range(60)]
    assert all(bool(s.score_parts) == (i not in bad) for i, s in enumerate(samples))
    assert [s.score for s in again] == list(range(10))
    for i, one in enumerate(samples):
        who = f"{function!r} on sample {i} (row {100 + i}, prompt 'question {i}')"
        assert who in one.reward_error if i in bad else one.reward_error == "", (i, bad.get(i))


@pytest.mark.parametrize("do", [pytest.param(do, marks=[pytest.mark.slow] * (do == "regex")) for do in FAULTS])
def test_stop_names_sample_function_and_reason(function: str, do: str) -> None:
    samples = [sample(0), todo(5, do), sample(2)]
    who = re.escape(f"reward function {function!r} on sample 5 (row 105, prompt 'question 5') ")
    with open_pool(function, timeout_s=HANG_S if do in ("sleep", "regex") else 20.0) as pool:
        with pytest.raises(RewardError, match=f"{who}(?s:.*){FAULTS[do]}"):
            pool.collect(samples)
        healthy = [sample(i) for i in range(4)]
        pool.collect(healthy)
        assert [s.score for s in healthy] == [0, 1, 2, 3]


def test_calls_that_travel_in_one_message_each_have_their_own_time(function: str) -> None:
    samples = [todo(i, "slow") if i < 8 else sample(i) for i in range(28)]  # 7 slow ones share a message
    with open_pool(function, workers=1, timeout_s=1.5) as pool:
        pool.collect(samples)
    assert [s.score for s in samples] == list(range(28))


def test_order_is_kept_over_many_samples_from_several_threads(function: str) -> None:
    samples = [sample(i) for i in range(3000)]
    with open_pool(function, workers=3) as pool:
        threads = [threading.Thread(target=lambda k=k: [pool.submit(s) for s in samples[k::4]]) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        pool.collect(samples)
    assert [s.score for s in samples] == list(range(3000))
    assert not any(s.score_parts["torch"] for s in samples), "workers must start without torch"


def test_two_batches_with_the_same_sample_ids_do_not_mix(function: str) -> None:
    train, validation = [sample(i, "1") for i in range(20)], [sample(i, "2") for i in range(20)]
    with open_pool(function) as pool:
        for pair in zip(train, validation, strict=True):
            for one in pair:
                pool.submit(one)
        pool.collect(validation)
        pool.collect(train)
    assert {s.score for s in train} == {1.0} and {s.score for s in validation} == {2.0}


def test_close_leaves_nothing_behind(function: str, tmp_path: Path) -> None:
    pool = open_pool(function)
    samples = [sample(i) for i in range(200)]
    pool.collect(samples)
    pids = {int(s.score_parts["pid"]) for s in samples}
    pid_file = tmp_path / "pid"
    pool.submit(todo(0, "child", pid_file=str(pid_file)))
    pool.submit(todo(1, "regex"))
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.02)
    pids.add(int(pid_file.read_text()))
    fds = len(os.listdir("/proc/self/fd"))
    pool.close()
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) < fds
    assert not any(thread.name == "reward-pool" for thread in threading.enumerate())
    with pytest.raises(RewardError, match="pool is closed"):
        pool.submit(sample(0))


def test_close_frees_whoever_waits(function: str) -> None:
    pool = open_pool(function)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.collect([todo(0, "sleep")])
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.close()
    thread.join(20)
    assert not thread.is_alive() and len(errors) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_workers_die_with_the_trainer(function: str, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(f"""
import sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[3])!r}]
from tests.system.reward.test_reward_pool import open_pool, sample, todo
pool = open_pool({function!r}, workers=1, timeout_s=500.0)
first = sample(0)
pool.collect([first])
pool.submit(todo(1, "regex"))
time.sleep(0.3)
print(int(first.score_parts["pid"]), flush=True)
time.sleep(500)
""")
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert not gone(pid, 0.1)
        trainer.send_signal(signal.SIGKILL)
        assert gone(pid)
    finally:
        trainer.kill()
        trainer.communicate(timeout=20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(prompt, response): return 0", "must take"),
        ("import os; os._exit(4)", r"died while loading it \(exit code 4\)"),
        ("raise RuntimeError('broken file')", "broken file"),
        ("def scores(prompt, response, row): return 0", "did you mean 'scores'"),
    ],
)
def test_a_function_that_does_not_load_is_an_error_at_once(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=message):
        open_pool(f"{path}:score")
    assert not any(thread.name == "reward-pool" for thread in threading.enumerate())


def test_builtins_through_the_pool() -> None:
    responses = ["\\boxed{\\frac{14}{2}}", "it is 8", "7"]
    with open_pool("math") as pool:
        samples = [sample(i, response) for i, response in enumerate(responses)]
        pool.collect(samples)
    assert [s.score for s in samples] == [1.0, 0.0, 1.0]
    with open_pool("sorted_digits") as pool:
        one = sample(0, "21.", {"answer": "12."})
        two = sample(1, "12.", {"answer": "12."})
        pool.collect([one, two])
    assert (one.score, two.score) == (0.0, 1.0)
    assert two.score_parts == {"exact_match": 1.0, "right_positions": 1.0}


def test_math_that_would_run_for_ever_is_bounded_inside_the_worker() -> None:
    endless = sample(0, "$9^{9^{9^{9}}}$")
    quick = sample(1, "7")
    with open_pool("math", workers=1) as pool:
        pool.collect([endless, quick])
    assert quick.score == 1.0 and pool.failures == 1
    assert math.isnan(endless.score) and "math-verify took more than" in endless.left_out, (
        "not wrong, not the run's end"
    )


def test_a_truncated_response_scores_what_the_configuration_says() -> None:
    whole, cut = sample(0, "7"), sample(1, "7")
    cut.finish_reason = "length"
    with open_pool("math", workers=1, truncated_score=-0.5) as pool:
        pool.collect([whole, cut])
    assert (whole.score, cut.score) == (1.0, -0.5)


def test_prompt_text_and_keys(function: str) -> None:
    cfg = RewardConfig(function=function.replace(":score", ":length"))
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "four"}]
    with RewardManager(cfg, prompt_key="question") as pool:
        samples = [sample(0, row={"question": "seventy"}), sample(1, row={"question": chat})]
        pool.collect(samples)
        assert [s.score for s in samples] == [7, 4]
        with pytest.raises(RewardError, match=r"sample 2 \(row 102\): the row has no 'question' \(data.prompt_key\)"):
            pool.submit(sample(2))
        with pytest.raises(RewardError, match="sample 3 .* cannot be sent to a reward worker"):
            pool.submit(sample(3, row={"question": "q", "callback": lambda: None}))
    talked = sample(0, row={"messages": chat})
    talked.messages = [{"role": "assistant", "content": "no"}]
    with RewardManager(cfg, prompt_key="messages") as pool:
        pool.collect([talked])
        assert talked.score == 4, "of the row's own prompt, not of what came after it"
    with RewardManager(RewardConfig(function="exact_match"), answer_key="target") as pool:
        one = sample(0, "x", {"target": "x"})
        pool.collect([one])
        assert one.score == 1.0


def test_a_row_without_the_answer_names_the_sample() -> None:
    one = sample(4)
    del one.request.prompt.row["answer"]
    with open_pool("exact_match") as pool, pytest.raises(RewardError, match="(?s)sample 4 .*no 'answer'"):
        pool.collect([one])


def test_collect_of_nothing_returns(function: str) -> None:
    with open_pool(function) as pool:
        pool.collect([])
        assert pool.failures == 0


def test_a_worker_killed_from_outside_is_replaced(function: str) -> None:
    with open_pool(function, workers=1) as pool:
        first = sample(0)
        pool.collect([first])
        os.kill(int(first.score_parts["pid"]), signal.SIGKILL)
        samples = [sample(i) for i in range(5)]
        assert gone(int(first.score_parts["pid"]))
        pool.collect(samples)
        assert [s.score for s in samples] == list(range(5))
