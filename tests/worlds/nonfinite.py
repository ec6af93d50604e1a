"""Run under torchrun with 4 processes: updates with a non-finite loss or gradient, under several layouts.

Usage: nonfinite.py JOBS RESULTS. JOBS: JSON list of {name, model, layout, dtype, role}; the models' output at token
POISON is NaN. RESULTS: {name: {case: {skipped, unchanged, samples}}} with each rank's own values. "afterwards" is true
if the next finite update equals that of a learner without a non-finite one; "unknown ids" is the error for tokens
without an embedding.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from mrl.algo import aggregate  # noqa: E402
from mrl.config.schema import (  # noqa: E402
    KLConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValueLossConfig,
)
from mrl.config.sections.policy import policy_loss  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, Loss, losses  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402

POISON = 77
BAD_SAMPLE = 5
LENGTHS = [(3, 9), (5, 2), (7, 30), (4, 1), (6, 17), (2, 5), (11, 12), (3, 3)]  # prompt, response tokens


def make_rollout(seed: int, poisoned: bool = False) -> Rollout:
    g = torch.Generator().manual_seed(seed)
    prompts, responses = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    seq_lens = prompts + responses
    tokens = torch.randint(POISON + 1, 300, (int(seq_lens.sum()),), generator=g)
    if poisoned:
        tokens[int(seq_lens[:BAD_SAMPLE].sum())] = POISON
    return Rollout(
        step=0,
        tokens=tokens,
        seq_lens=seq_lens,
        prompt_lens=prompts,
        group=torch.arange(len(LENGTHS)),
        scores=torch.zeros(len(LENGTHS)),
        rollout_log_probs=-torch.rand(int(responses.sum()), generator=g),
    )


def make_loss(role: str, rollout: Rollout, bad_target: bool = False) -> Loss:
    g = torch.Generator().manual_seed(1)
    targets = torch.randn(rollout.num_response_tokens, generator=g)
    if bad_target:
        targets[int(rollout.response_lens[:BAD_SAMPLE].sum())] = math.inf
    weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
    if role == "critic":
        return losses.value(ValueLossConfig(), torch.zeros_like(targets), targets, weights, weights)
    flat = losses.PolicyTargets(targets, weights, weights, weights)
    return losses.policy(policy_loss(), KLConfig(), 0.0, flat)


def attempt(learner: Learner, rollout: Rollout, loss: Loss) -> dict[str, float]:
    return learner.backward(rollout, range(rollout.num_samples), loss, 1.0) | learner.step()


def state(learner: Learner) -> list[torch.Tensor]:
    """Returns the bytes of this rank's weights, main weights, Adam's state and schedule."""
    tensors = [p.detach() for chunk in learner.bare for p in chunk.parameters()]
    for part in learner.optimizer.chained_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                adam = part.optimizer.state[parameter]
                tensors += [parameter.detach(), *(torch.as_tensor(adam[name]) for name in sorted(adam))]
            tensors.append(torch.tensor([group["lr"], float(group.get("step", 0))]))
    tensors.append(torch.tensor([learner.schedule.num_steps]))
    return [tensor.clone().contiguous().flatten().view(torch.uint8) for tensor in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def poison_gradient(learner: Learner, parameter: str, rank_of_it: bool) -> Callable[[], None]:
    """Makes a tensor's gradient NaN, on this rank if `rank_of_it`. Returns a function that removes the fault."""
    if not rank_of_it:
        return lambda: None
    named = {name: p for chunk in learner.bare for name, p in chunk.named_parameters()}
    found = next(p for name, p in named.items() if parameter in name)
    return found.register_hook(lambda grad: grad * math.nan).remove


def everywhere(value: Any) -> list[Any]:
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def run(job: dict[str, Any], meshes: Meshes) -> dict[str, Any]:
    role, mesh = job["role"], meshes.get(ParallelConfig(**job["layout"]))
    train = TrainConfig(
        parallel=mesh.cfg, max_tokens_per_microbatch=40, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5)
    )

    def build() -> Learner:
        arch, dtype = load_arch(job["model"]), getattr(torch, job["dtype"])
        return Learner(role, arch, job["model"], train, mesh, dtype=dtype, seed=3)

    learner, rollout = build(), make_rollout(seed=0)
    good, unpoison = make_loss(role, rollout), lambda: None
    attempt(learner, rollout, good)
    results: dict[str, Any] = {}
    cases = ["output", "target", "gradient"] + ["copy"] * (mesh.tp > 1 and not mesh.cfg.sequence)
    for case in cases:
        before = state(learner)
        bad_rollout = make_rollout(seed=0, poisoned=case == "output")
        if case in ("gradient", "copy"):
            name = "linear_proj.weight" if case == "gradient" else "layernorm.weight"
            unpoison = poison_gradient(learner, name, rank() == dist.get_world_size() - 1)
        metrics = attempt(learner, bad_rollout, make_loss(role, rollout, bad_target=case == "target"))
        results[case] = {
            "skipped": everywhere(metrics["skipped"]),
            "unchanged": everywhere(same(before, state(learner))),
            "samples": learner.last_outputs.nonfinite_samples(rollout),
            "finite loss": math.isfinite(metrics["loss"]),
        }
        unpoison()
    twin = build()
    for each in (learner, twin, twin):
        metrics = attempt(each, rollout, good)
        assert metrics["skipped"] == 0, metrics
    results["afterwards"] = everywhere(same(state(learner), state(twin)))
    results["unknown ids"] = everywhere([refusal(learner, good, token) for token in (learner.arch.vocab_size, -1)])
    return results


def refusal(learner: Learner, loss: Loss, token: int) -> str:
    rollout = make_rollout(seed=0)
    rollout.tokens[int(rollout.seq_lens[:2].sum()) + 1] = token
    try:
        attempt(learner, rollout, loss)
    except ValueError as error:
        return str(error)
    return "trained on it"


def main() -> None:
    platform.init_process_group(300.0)
    meshes = Meshes(300.0)
    results = {job["name"]: run(job, meshes) for job in json.loads(Path(sys.argv[1]).read_text())}
    if rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


main()
