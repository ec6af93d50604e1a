"""The trainer's log-probs of tokens that engines sampled. Usage: main_job.py JOBS RESULTS

JOBS: JSON list of {name, model, temperature, samples: [{prompt, response, log_probs, experts}]}, experts [tokens, MoE
layers, experts per token] or null. RESULTS: {name: [max |engine - trainer|, the same with the trainer at another
temperature, the share of experts that the engine chose differently or null]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.parallel import Meshes  # noqa: E402


def rollout_of(samples: list[dict[str, Any]]) -> Rollout:
    prompts = torch.tensor([len(s["prompt"]) for s in samples])
    return Rollout(
        step=0,
        tokens=torch.tensor([token for s in samples for token in (*s["prompt"], *s["response"])]),
        seq_lens=prompts + torch.tensor([len(s["response"]) for s in samples]),
        prompt_lens=prompts,
        group=torch.arange(len(samples)),
        scores=torch.zeros(len(samples)),
        rollout_log_probs=torch.tensor([x for s in samples for x in s["log_probs"]]),
    )


def chosen_otherwise(actor: Learner, rollout: Rollout, samples: list[dict[str, Any]]) -> float | None:
    """Returns the share of different experts, over all tokens except each sample's last, which is never an input."""
    if actor.replay is None:
        return None
    with actor.replay.recording():
        actor.log_probs(rollout, 1.0)
    lasts = rollout.seq_lens.cumsum(0) - 1
    theirs = torch.cat([torch.tensor(sample["experts"]) for sample in samples])
    same = (theirs[..., :, None] == actor.replay.recorded(rollout).long()[..., None, :]).any(-1)
    same[lasts] = True
    return float((~same).float().mean())


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    platform.init_process_group(120.0)
    mesh = Meshes(120.0).get(ParallelConfig())
    train = TrainConfig(max_tokens_per_microbatch=400)
    results: dict[str, list[float | None]] = {}
    for job in jobs:
        model = job["model"]
        actor = Learner(
            "policy",
            load_arch(model),
            model,
            train,
            mesh,
            dtype=torch.float32,
            seed=0,
            trainable=False,
            replays=job["samples"][0]["experts"] is not None,
        )
        rollout = rollout_of(job["samples"])
        results[job["name"]] = [
            float((actor.log_probs(rollout, t)[0] - rollout.rollout_log_probs).abs().max())
            for t in (job["temperature"], job["temperature"] * 1.1)
        ] + [chosen_otherwise(actor, rollout, job["samples"])]
    Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


main()
