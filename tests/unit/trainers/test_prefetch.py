"""The thread that generates the next batch."""

from __future__ import annotations

import threading
import time

import pytest

from mrl.config.schema import RLConfig
from mrl.core import Rollout
from mrl.rollout import LacksWeights, RolloutError
from mrl.trainers.rl.ahead import Ahead
from mrl.trainers.rl.longest_wait import longest_wait
from mrl.trainers.rl.sampler import Drawn
from mrl.trainers.shared.heartbeat import Activity


def drawn(step: int) -> Drawn:
    return Drawn(Rollout.of(step, [[1]], [[2, 3]]), {"reward/mean": 0.5}, [{"row": {"a": 1}}], {"step": step + 1})


def nothing(*arguments: object) -> None:
    pass


def test_what_was_drawn_ahead_is_kept_until_it_is_taken() -> None:
    ahead = Ahead(nothing, nothing, nothing, Activity(60.0))
    assert ahead.state_dict() == {"ahead": None}
    take = ahead.begin(lambda: drawn(3))
    assert ahead.wait() == []
    state = ahead.state_dict()
    other = Ahead(nothing, nothing, nothing, Activity(60.0))
    other.load_state_dict(state)
    again = other.begin(lambda: drawn(99))()
    assert again.metrics.pop("perf/generate_s") >= 0
    assert (again.rollout.step, again.metrics, again.rows, again.loads) == (3, *list(vars(drawn(3)).values())[1:])
    take()
    assert ahead.state_dict() == {"ahead": None}, "a checkpoint would have samples that are learnt already"
    assert other.begin(lambda: drawn(4))().rollout.step == 4


def test_the_thread_reports_in_the_main_thread_and_asks_no_rank_for_weights() -> None:
    heard: list[tuple[str, threading.Thread]] = []
    given_to: list[str] = []
    ahead = Ahead(
        lambda line: heard.append((line, threading.current_thread())), given_to.append, nothing, Activity(60.0)
    )

    def work() -> Drawn:
        ahead.say("an engine is started again")
        ahead.give_weights("http://one")
        raise AssertionError("it went on")

    take = ahead.begin(work)
    assert ahead.wait() == ["http://one"] and given_to == []
    assert heard == [("an engine is started again", threading.main_thread())]
    with pytest.raises(LacksWeights, match="waits for its weights"):
        take()
    ahead.give_weights("http://two")
    assert given_to == ["http://two"]

    ahead.begin(lambda: drawn(1 // 0))
    with pytest.raises(ZeroDivisionError):
        ahead.wait()


def test_samples_that_do_not_come_are_waited_for_as_long_as_they_may_take() -> None:
    cut = threading.Event()
    ahead = Ahead(nothing, nothing, cut.set, Activity(0.05))
    take = ahead.begin(lambda: drawn(int(cut.wait(60))))
    for waits in (ahead.wait, take):
        with pytest.raises(RolloutError, match=r"of the next step are not there, and no .* has come for 0.05 s"):
            waits()
    ahead.close()


def test_samples_that_come_one_after_the_other_are_waited_for_however_many_they_are() -> None:
    """And the limit does not grow with them: 1,024 prompts may hang no longer than 4."""
    activity = Activity(0.3)
    ahead = Ahead(nothing, nothing, nothing, activity)

    def work() -> Drawn:
        for _ in range(8):
            time.sleep(0.1)
            activity.note()
        return drawn(3)

    assert ahead.begin(work)().rollout.step == 3
    few, many = (
        RLConfig.model_validate(
            {
                **{"trainer": "rl", "run": {"name": "run"}, "model": {"path": "-"}, "data": {"train": "-"}},
                **{"reward": {"function": "exact_match"}, "algorithm": {"adv_estimator": "grpo"}},
                "batch": {"prompts_per_step": prompts, "samples_per_prompt": 16},
            }
        )
        for prompts in (4, 1024)
    )
    assert longest_wait(few) == longest_wait(many) == 600.0 + 600.0, "run.timeout_s, and the longest of the others"


def test_a_run_that_ends_cuts_the_thread_off() -> None:
    cut = threading.Event()

    def work() -> Drawn:
        assert cut.wait(60)
        raise RuntimeError("cut off")

    ahead = Ahead(nothing, nothing, cut.set, Activity(60.0))
    ahead.begin(work)
    ahead.close()
    assert not any(thread.name == "sampling ahead" for thread in threading.enumerate())
