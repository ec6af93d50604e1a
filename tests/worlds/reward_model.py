"""Run under torchrun: a reward model's scores, which rank 0's reward manager requests during its own work.

Usage: reward_model.py REWARD_MODEL_DIR SEQUENCES_JSON RESULT_JSON LAYOUTS_JSON. RESULT_JSON gets a list of scores for
each layout, in the order of the sequences; `exported` beside it is the model as mrl exports it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mrl import platform

platform.install()

from mrl.config.schema import ParallelConfig, RewardConfig, TrainConfig  # noqa: E402
from mrl.core import Prompt, Request, Sample  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.reward.manager import RewardManager  # noqa: E402
from mrl.trainers.rl.reward_scores import score, to_score  # noqa: E402
from mrl.trainers.shared.world import World  # noqa: E402
from mrl.weights.model.export import save_hf  # noqa: E402


def samples(sequences: list[list[int]]) -> list[Sample]:
    """Returns the sequences as samples whose prompt is the first token."""
    made = []
    for i, (first, *response) in enumerate(sequences):
        prompt = Prompt(i, (first,), {"prompt": "p"})
        made.append(Sample(Request(i, i, prompt, i), response, [0.0] * len(response), "stop", "0", "r"))
    return made


def scores_of(world: World, model: Learner, path: str, sequences: list[list[int]]) -> list[float]:
    cfg = RewardConfig.model_validate({"manager": "model", "model": {"path": path}})
    judge = cfg.model
    assert judge is not None

    def collect() -> list[float]:
        with RewardManager(cfg) as manager:
            manager.score_model = lambda some: world.together(to_score(some, sees=False))
            made = samples(sequences)
            for one in made:
                manager.submit(one)
            manager.collect(made)
        return [one.score for one in made]

    return world.from_main("scores", collect, together=lambda asked: score(model, judge, asked.texts))


def main() -> None:
    path, sequences_json, result_json, layouts = sys.argv[1:]
    sequences = json.loads(Path(sequences_json).read_text())
    world = World(60.0, 120.0, seed=1)
    found = []
    for layout in json.loads(layouts):
        parallel = ParallelConfig.model_validate(layout)
        train = TrainConfig(parallel=parallel, max_tokens_per_microbatch=64)
        mesh = world.meshes.get(parallel)
        arch = load_arch(path)
        model = Learner("critic", arch, path, train, mesh, dtype=torch.float32, seed=1, trainable=False)
        found.append(scores_of(world, model, path, sequences))
        save_hf(model.exporter, path, Path(result_json).parent / "exported", overwrite=True)
    if world.is_main:
        Path(result_json).write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()
