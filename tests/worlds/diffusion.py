"""Three updates of each of several tiny diffusion policies. Arguments: OUT CASES, where CASES is a JSON list of
`Case`s.

Rank 0 writes OUT: for each case, by its name, the rewards, the optimizer moments after the first update, and the
learner's final state.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl import platform
from mrl.config.sections.diffusion import (
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionTrainConfig,
    SamplerConfig,
)
from mrl.config.sections.models import OptimizerConfig
from mrl.diffusion import nets
from mrl.diffusion.conditioning import PromptRow
from mrl.diffusion.ddpo import reference_of
from mrl.diffusion.learner import DiffusionLearner
from mrl.diffusion.pipeline import Pipeline
from mrl.diffusion.sample import draw, share
from mrl.diffusion.sharding import local
from mrl.diffusion.update import Policy, chosen_steps, make_update
from mrl.parallel import rank


@dataclass
class Case:
    """train: the section `actor`; at_once: number of images that are generated together"""

    name: str
    model: str
    images: int
    train: dict[str, Any]
    at_once: int = 64
    kl_coef: float = 0.0


def main() -> None:
    out, cases = Path(sys.argv[1]), [Case(**each) for each in json.loads(sys.argv[2])]
    platform.init_process_group(60)
    torch.set_num_threads(1)
    results = {case.name: run(case) for case in cases}
    if rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


def run(case: Case) -> dict[str, Any]:
    torch.manual_seed(3)
    model, train = DiffusionModelConfig(path=case.model), DiffusionTrainConfig.model_validate(case.train)
    pipeline = Pipeline.load(model, train)
    sampler, loss = SamplerConfig(steps=4, guidance=3.0, batch=case.at_once), DiffusionLossConfig(kl_coef=case.kl_coef)
    policy = Policy.of(pipeline, sampler, loss, train.micro_batch, reference_of(model, train, loss, pipeline))
    learner = DiffusionLearner(pipeline.net, OptimizerConfig(lr=1e-3))
    results: dict[str, Any] = {"rewards": [], "metrics": []}
    for step in range(2):
        one_step(case, policy, learner, step, results)
    state = learner.state_dict()
    with torch.no_grad():
        for parameter in learner.parameters:
            parameter.zero_()
    learner.load_state_dict(state if rank() == 0 else None)
    again = learner.state_dict()
    for kind in ("weights", "exp_avg", "exp_avg_sq") if rank() == 0 else ():
        assert all(torch.equal(value, again[kind][name]) for name, value in state[kind].items()), kind
    whole = nets.weights(pipeline.net)
    return {**results, **state, "whole": whole, "own": sum(local(p).numel() for p in learner.parameters)}


def one_step(case: Case, policy: Policy, learner: DiffusionLearner, step: int, results: dict[str, Any]) -> None:
    mine, rewards = share(case.images), torch.zeros(case.images)
    conditioning = policy.pipeline.conditioning.encode([PromptRow("", i % 3, {}) for i in mine])

    def score(ids: range, images: torch.Tensor) -> None:
        rewards[ids.start : ids.stop] = images.mean((1, 2, 3))

    data = draw(policy.pipeline, policy.steps, policy.sampler, mine, conditioning, (5, step), score)
    dist.all_reduce(rewards)
    results["rewards"].append(rewards)
    advantages = (rewards - rewards.mean()) / rewards.std()
    for ids in (range(5), range(5, case.images)) if step == 0 else (range(case.images),):
        places = {i: chosen_steps(policy.steps.counted, 0.75, (5, step, i)) for i in ids}
        results["metrics"].append(make_update(policy, learner, data, advantages, places))
        if "first" not in results:
            results["first"] = learner.state_dict().get("exp_avg")


if __name__ == "__main__":
    main()
