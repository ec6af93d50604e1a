"""Run under torchrun: the gradients of a user's own policy loss with the advantages of a user's own estimator.

Usage: own_algorithms.py MODEL_DIR FILE REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. FILE defines `loss` and
`estimator`. The layout `one` writes the reference; for the others RESULT_JSON gets {layout: [relative loss error, worst
relative gradient error, its tensor, the loss's metrics, those in the reference]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mrl import platform

platform.install()

from mrl.config.schema import RLConfig, TrainConfig  # noqa: E402
from mrl.learner import losses  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.trainers.rl.experience import forward_passes, make_experience  # noqa: E402
from mrl.trainers.rl.policy_update import policy_targets  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402
from tests.worlds.gradients import TEN_STEPS, TIMEOUT_S, build, compare, everywhere, make_rollout, parse  # noqa: E402

Result = tuple[dict[str, float], dict[str, torch.Tensor]]


def gradients(model_dir: str, file: str, meshes: Meshes, layout: str) -> Result:
    """Returns (metrics, full gradients by Hugging Face name) of the second update, in which the ratios are not 1."""
    mesh = meshes.get(parse(layout))
    actor = build("policy", model_dir, mesh, TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=40))
    rollout = make_rollout(actor.arch.vocab_size)
    algorithm = {
        "advantage": {"function": f"{file}:estimator", "options": {"decay": 0.9}},
        "policy_loss": {"function": f"{file}:loss", "options": {"slope": 0.2}},
        "old_log_probs": "engine",
    }
    cfg = RLConfig.model_validate(TEN_STEPS | {"algorithm": algorithm})
    experience = make_experience(cfg.algorithm, rollout, forward_passes(cfg.algorithm, rollout, 1.0, actor), 0.0)
    samples = range(rollout.num_samples)
    targets = policy_targets(bare_run(cfg, actor, None), experience, 1)
    loss = losses.policy(cfg.algorithm.policy_loss, cfg.algorithm.kl, 0.0, targets)
    metrics = actor.backward(rollout, samples, loss, 1.0, full_gradients=True)
    return metrics, everywhere(actor, lambda parameter: parameter.main_grad)


def main() -> None:
    model_dir, file, reference_file, result_file, *layouts = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    meshes, results = Meshes(TIMEOUT_S), {}
    for layout in layouts:
        metrics, found = gradients(model_dir, file, meshes, layout)
        if layout == "one":
            torch.save((metrics, found), reference_file)
        else:
            before, want = torch.load(reference_file)
            errors = compare((metrics["loss"], found), (before["loss"], want))
            own = {name: value for name, value in metrics.items() if name.startswith("actor/")}
            results[layout] = [*errors, own, {name: before.get(name) for name in own}]
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
