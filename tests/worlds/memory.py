"""Run under torchrun with 4 processes: steps of runs that differ only in what they offload to host memory.

Usage: memory.py WORK_DIR DENSE_MODEL MOE_MODEL. Prints one JSON object per case: {"case": ..., ...}; see
tests/distributed/learner/test_memory.py for the expected values.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_tools import World, report, save, train, weights_of
from gradients import make_rollout, parse

from mrl import checkpoint, platform
from mrl.config.schema import RewardModelConfig, RLConfig
from mrl.core import Rollout
from mrl.learner import Learner
from mrl.learner.memory import LEVELS
from mrl.learner.optimizer import main_parameters
from mrl.parallel import gather, rank
from mrl.trainers.rl.loop import experience_of, update
from mrl.trainers.rl.memory_order import ORDER
from mrl.trainers.rl.models import MovingAverage, build_models
from mrl.trainers.rl.reward_scores import score
from mrl.trainers.shared.memory import PhaseMemoryManager, offload_new_model
from tests.helpers.bare_run import bare_run, passes_of
from tests.helpers.slow import RUN_SLOW, slow_cases

OFFLOADS = ("none", "optimizer", "all")
STEPS, SAVED_AFTER = (3, 2) if RUN_SLOW else (2, 1)
SEQUENCES = Rollout.of(0, [[5], [9]], [[6, 7, 8], [10, 11]])
OPTIMIZER = {"lr": 2e-2, "warmup_steps": 4, "weight_decay": 0.1}
Bytes = dict[str, int]


class Watched(PhaseMemoryManager):
    """Records the bytes that each model has on the device at the beginning of each phase."""

    def begin(self, phase: str) -> None:
        super().begin(phase)
        if phase not in self.seen:
            self.seen[phase] = {name: sum(parts(each).values()) for name, each in self._learners.items()}
            self.everything[phase] = everything()

    def __init__(self, learners: dict[str, Learner]) -> None:
        super().__init__(ORDER, learners)
        self.seen: dict[str, Bytes] = {}
        self.everything: dict[str, int] = {}


def live(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Returns the bytes of the tensors' storages, by storage."""
    return {storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}


def all_tensors(learner: Learner) -> Iterator[torch.Tensor]:
    yield from (p.detach() for chunk in learner.bare for p in chunk.parameters())
    if learner.trainable:
        for part in learner.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    yield main.detach()
                    yield from (torch.as_tensor(x) for _, x in sorted(part.optimizer.state[main].items()))


def parts(learner: Learner) -> Bytes:
    """Returns the bytes that this rank's model holds on the device now."""
    parameters = live(p for chunk in learner.bare for p in chunk.parameters())
    if not learner.trainable:
        return {"parameters": sum(parameters.values()), "gradients": 0, "optimizer": 0}
    buffers = [b for chunk in learner.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    assert live(b.param_data for b in buffers) == parameters
    optimizer = {}
    for part in learner.optimizer.chained_optimizers:
        states = [x for state in part.optimizer.state.values() for x in state.values() if x.dim()]
        optimizer |= live([*states, *(main for _, main in main_parameters(learner.optimizer))])
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(live(b.grad_data for b in buffers).values()),
        "optimizer": sum(size for storage, size in optimizer.items() if storage not in parameters),
    }


def everything() -> int:
    """Returns the bytes of all tensors of the process except those offloaded to host memory."""
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor | platform.OffloadBuffer)]
    rooms = [room._buffer for room in found if isinstance(room, platform.OffloadBuffer) and room._buffer is not None]
    kept = live(x for x in found if isinstance(x, torch.Tensor) and x.device.type == "cpu")
    return sum(kept.values()) - sum(live(rooms).values())


class Job:
    """The models of a run, and its steps without an engine."""

    def __init__(self, world: World, settings: dict[str, Any], offload: str) -> None:
        cfg = RLConfig.model_validate(settings)
        self.before = everything()
        given = {"offload": offload}
        own = {"ref": cfg.ref.model_copy(update={"offload": "all" if offload == "all" else "none"})}
        own |= {name: each.model_copy(update=given) for name in ("actor", "critic") if (each := getattr(cfg, name))}
        self.cfg = cfg.model_copy(update=own)
        self.models = build_models(self.cfg, world)  # type: ignore[arg-type]
        judge = Learner(
            "critic", self.models.actor.arch, cfg.model.path, self.cfg.actor, self.models.actor.mesh,
            dtype=getattr(torch, cfg.model.dtype), seed=9, from_scratch=True, trainable=False,
        )  # fmt: skip
        offload_new_model("reward", judge)
        self.memory = Watched(self.models.learners | {"reward": judge})
        run = bare_run(self.cfg, self.models.actor, self.models.critic)
        own = {"ref": self.models.ref, "ema": self.models.ema, "passes": passes_of(self.cfg, self.models)}
        self.run = replace(run, reward_model=judge, memory=self.memory, **own)
        self.metrics: list[dict[str, float]] = []

    @property
    def saved(self) -> dict[str, Any]:
        return dict(self.models.saved)

    def step(self, number: int) -> None:
        run = self.run
        self.memory.begin("rollout")
        rollout = replace(make_rollout(run.actor.arch.vocab_size, seed=number), step=number)
        with self.memory.during("scoring"):
            scores = score(run.reward_model, RewardModelConfig(path="-"), SEQUENCES)
        self.memory.begin("experience")
        experience, metrics = experience_of(run, rollout, True)
        metrics |= update(run, experience, True)
        self.memory.begin("sync")
        pushed = [weights_of({"actor": run.actor})]
        if isinstance(self.models.ema, MovingAverage):
            with self.models.ema.in_place():  # as a validation of the average does
                pushed.append(weights_of({"actor": run.actor}))
                with self.memory.during("validation"):
                    pass
                pushed.append(weights_of({"actor": run.actor}))
            pushed.append(weights_of({"actor": run.actor}))
        sums = {f"push {i}": sum(float(t.double().abs().sum()) for t in w.values()) for i, w in enumerate(pushed)}
        self.metrics.append(metrics | sums | {f"score {i}": x for i, x in enumerate(scores)})

    def bits(self) -> str:
        """Returns a digest of this rank's weights, main weights and moments, wherever they are."""
        found = hashlib.sha256()
        for learner in self.models.learners.values():
            for tensor in all_tensors(learner):
                found.update(learner.memory.read(tensor).contiguous().view(-1).view(torch.uint8).clone().numpy())
        return found.hexdigest()

    def beyond(self) -> Bytes:
        """Returns by phase the bytes of tensors that did not exist before the models, do not belong to them, and are
        not the average's, which is in host memory."""
        average = sum(live(self.models.ema.kept.values()).values()) if self.models.ema else 0
        seen, everything = self.memory.seen, self.memory.everything
        return {phase: everything[phase] - sum(seen[phase].values()) - self.before - average for phase in seen}


def settings(model: str, layout: str, dtype: str, *, critic: bool) -> dict[str, Any]:
    each = {"parallel": parse(layout).model_dump(), "optimizer": OPTIMIZER, "max_tokens_per_microbatch": 128}
    by_critic = {"adv_estimator": "gae", "lam": 0.95, "kl": {"use_in_reward": True, "coef": 0.1}}
    by_group = {"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.1}}
    return {
        "trainer": "rl", "run": {"name": "-"}, "model": {"path": model, "from_scratch": True, "dtype": dtype},
        "actor": each, "critic": each if critic else None, "data": {"train": "-"}, "reward": {},
        "batch": {"prompts_per_step": 5, "samples_per_prompt": 2, "samples_per_minibatch": 5, "epochs_per_step": 2},
        "algorithm": by_critic if critic else by_group,
        "ema": None if critic else {"decay": 0.5}, "ref": {"policy": "frozen" if critic else "ema"},
    }  # fmt: skip


def variants(world: World, case: str, make: Callable[[str], Job], offloads: tuple[str, ...], resumes: bool) -> None:
    """Runs the same steps with every offload. Then resumes the first's checkpoint with the last, and the reverse."""
    paths: dict[str, Path] = {}
    want: list[dict[str, float]] = []
    bits = ""
    for offload in offloads:
        job = make(offload)
        for step in range(STEPS):
            if step == SAVED_AFTER and offload != "optimizer" and resumes:
                job.memory.begin("validation")  # a run may be stopped when it ends: all is offloaded
                paths[offload] = save(world.work / case / offload, step, job.saved, {}, keep_last=9)
            job.step(step)
        want, bits = want or job.metrics, bits or job.bits()
        report(
            f"{case}, {offload}",
            metrics=job.metrics == want,
            bits=all(gather(job.bits() == bits)),
            seen=job.memory.seen,
            beyond=job.beyond(),
            parts={name: parts_of(each) for name, each in job.memory._learners.items()},
            moved=job.memory.metrics(),
        )
        del job
    for old, new in ((offloads[0], offloads[-1]), (offloads[-1], offloads[0])) if resumes else ():
        job = make(new)
        job.memory.begin("resume")
        checkpoint.load(paths[old], job.saved)
        held = {name: sum(parts(each).values()) for name, each in job.memory._learners.items()}
        for step in range(SAVED_AFTER, STEPS):
            job.step(step)
        same = all(gather(job.bits() == bits))
        report(f"{case}, {old} to {new}", metrics=job.metrics == want[SAVED_AFTER:], bits=same, held=held)


def parts_of(learner: Learner) -> Bytes:
    """Returns the bytes of the model's parts with all of them on the device."""
    before = learner.memory.move(LEVELS[-1])
    found = parts(learner)
    learner.memory.move(before)
    return found


def said(action: Callable[[], Any]) -> str:
    """Returns the error of an action, which must be the same on all ranks."""
    try:
        action()
        message = "no error"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    messages = gather(message)
    assert len(set(messages)) == 1, messages
    return message


def refusals(job: Job) -> None:
    """Reports the errors of operations on an offloaded model, and of a rank without host memory."""
    actor, rollout = job.run.actor, make_rollout(job.run.actor.arch.vocab_size)
    job.memory.begin("rollout")
    found = {
        "log_probs": said(lambda: actor.log_probs(rollout, 1.0)),
        "export": said(lambda: list(actor.exporter.stream())),
        "update": said(lambda: train({"actor": actor}, range(1))),
        "step": said(actor.step),
        "average": said(lambda: job.models.ema.in_place().__enter__() if job.models.ema else None),
    }
    job.memory.begin("experience")
    found["update without the optimizer"] = said(lambda: train({"actor": actor}, range(1)))
    job.memory.begin("actor_update")
    room = platform.OffloadBuffer.offload
    if rank() == 2:
        platform.OffloadBuffer.offload = no_host_memory  # type: ignore[method-assign]
    found["no host memory"] = said(lambda: job.memory.begin("critic_update"))
    platform.OffloadBuffer.offload = room  # type: ignore[method-assign]
    report("refusals", **found)


def no_host_memory(*_: Any, **__: Any) -> int:
    raise RuntimeError("out of host memory")


def main() -> None:
    work, dense, moe = sys.argv[1:]
    platform.init_process_group(120)
    world = World(Path(work), dense, moe, dense)
    jobs = {
        "PPO, TP2 x PP2, float32": settings(dense, "tp2.pp2", "float32", critic=True),
        "GRPO, TP2 x DP2, bfloat16": settings(dense, "tp2", "bfloat16", critic=False),
        **dict(slow_cases(("PPO, experts, bfloat16", settings(moe, "ep2", "bfloat16", critic=True)))),
    }
    for number, (case, of_case) in enumerate(jobs.items()):
        offloads = OFFLOADS if number == 0 or (RUN_SLOW and number == 1) else ("none", "all")
        variants(world, case, partial(Job, world, of_case), offloads, resumes=number == 0 or RUN_SLOW)
    refusals(Job(world, jobs["GRPO, TP2 x DP2, bfloat16"], "all"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
