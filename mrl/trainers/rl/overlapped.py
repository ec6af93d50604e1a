"""The loop of `rollout.overlap: one_step`: the samples of the next step are drawn while this one is learnt.

They are always of the weights before: exactly one step old. Nothing is in flight while weights are pushed, so nothing
depends on who was faster.
"""

from __future__ import annotations

import time

from mrl.core import StepStats
from mrl.trainers.rl.loop import learn, log, publish
from mrl.trainers.rl.run import RLRun
from mrl.trainers.rl.sampler import Pending


def begin(run: RLRun, step: int) -> Pending:
    """The samples of a step, by the weights that the engines have; waits until they are there."""
    while True:
        pending = run.sampler.start(step)
        if not run.wait_ahead():
            return pending
        run.push_again(verify=True)


def train_step(run: RLRun, step: int, pending: Pending) -> tuple[StepStats, Pending]:
    """One step: take its samples, have the next ones drawn while learning from them, give the engines the weights.
    Gives the metrics and the next step's samples; after the last step there are none, and these again."""
    cfg, phase = run.cfg, run.phase
    stats, started, restarts = run.checkpointer.new_stats(step + 1), time.monotonic(), run.engine_restarts
    with phase("rollout", stats):
        rollout, metrics = pending.result()
    stats.metrics |= metrics
    run.callbacks("on_rollout", rollout, step=step)

    is_last, lost = step + 1 == cfg.run.last_step, False
    following = pending if is_last else run.sampler.start(step + 1)
    experience = learn(run, step, rollout, stats)
    learnt = time.monotonic()
    if not is_last:
        with phase("rollout", stats):
            lost = run.wait_ahead()
    waited = time.monotonic() - learnt

    publish(run, step, stats, again=lost)
    if lost:
        run.recorder.note(f"an engine was lost: the samples of step {step + 2} are drawn anew, by the weights of now")
        with phase("rollout", stats):
            following = begin(run, step + 1)
    stats.metrics |= {"perf/train_s": learnt - started, "perf/wait_s": waited, "rollout/redrawn": float(lost)}
    log(run, step, stats, experience, rollout, started, restarts)
    return stats, following
