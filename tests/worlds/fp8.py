"""Run under torchrun: emulated fp8 layers under many layouts, and the state of delayed scaling across a checkpoint.

Usage: fp8.py WORK_DIR DENSE_MODEL MOE_MODEL RESULT_JSON LAYOUT [LAYOUT ...]. `one` (in a world of one process) writes
the references; `moe:LAYOUT` uses the MoE model; `resume:LAYOUT` saves and resumes in new learners. RESULT_JSON gets
{layout: {recipe: [relative loss error, relative error of all gradients, worst of a tensor]}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from checkpoint_tools import error, save, train, weights_of  # noqa: E402
from gradients import Result, everywhere, parse  # noqa: E402

from mrl import checkpoint  # noqa: E402
from mrl.config.schema import FP8Config, OptimizerConfig, PrecisionConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.models import fp8_layers  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.trainers.shared.lm_head_quantization_error import lm_head_quantization_error  # noqa: E402

RECIPES = {
    "none": FP8Config(),
    "current": FP8Config(recipe="current", emulate=True),
    "delayed": FP8Config(recipe="delayed", emulate=True, history=4),
    "blockwise": FP8Config(recipe="blockwise", emulate=True),
    "mxfp8": FP8Config(recipe="mxfp8", emulate=True),
    "blockwise with head": FP8Config(recipe="blockwise", emulate=True, head=True),
}
LENGTHS = [(16, 48), (8, 24), (32, 64), (16, 48)]  # prompt and response tokens: in sum 256, two blocks


def rollout_of(vocab: int) -> Rollout:
    g = torch.Generator().manual_seed(0)
    prompts, responses = (torch.tensor(x) for x in zip(*LENGTHS, strict=True))
    total, n = int((prompts + responses).sum()), len(LENGTHS)
    return Rollout(
        step=0,
        tokens=torch.randint(0, vocab, (total,), generator=g),
        seq_lens=prompts + responses,
        prompt_lens=prompts,
        group=torch.arange(n),
        scores=torch.zeros(n),
        rollout_log_probs=-torch.rand(int(responses.sum()), generator=g),
    )


def learner_of(meshes: Meshes, model: str, layout: str, fp8: FP8Config, lr: float, seed: int = 3) -> Learner:
    mesh = meshes.get(parse(layout))
    settings = TrainConfig(
        parallel=mesh.cfg,
        max_tokens_per_microbatch=256,
        optimizer=OptimizerConfig(lr=lr),
        precision=PrecisionConfig(fp8=fp8),
    )
    arch = load_arch(model)
    return Learner("policy", arch, model, settings, mesh, dtype=torch.float32, seed=seed, from_scratch=True)


def gradients(learner: Learner, updates: int) -> Result:
    """Returns loss and gradients after `updates` updates with learning rate 0, which change only the scaling state."""
    rollout = rollout_of(learner.arch.vocab_size)
    weights = torch.full((rollout.num_response_tokens,), 1 / rollout.num_response_tokens)
    for i in range(updates + 1):
        metrics = learner.backward(
            rollout, range(len(LENGTHS)), losses.cross_entropy(weights), 1.0, full_gradients=i == updates
        )
        if i < updates:
            learner.step()
    return metrics["loss"], everywhere(learner, lambda p: p.main_grad)


def head_errors(meshes: Meshes, model: str, layout: str) -> dict[str, Any]:
    """Returns the lm_head quantization error as reported, and measured by models that differ only in the head."""
    own, plain = (
        learner_of(meshes, model, layout, RECIPES[name], 0.0) for name in ("blockwise with head", "blockwise")
    )
    rollout = rollout_of(own.arch.vocab_size)
    first = range(rollout.response_lens[0])
    gap = (own.log_probs(rollout, 0.7)[0] - plain.log_probs(rollout, 0.7)[0])[first].abs()
    return {
        "reported": [*lm_head_quantization_error(own, rollout, 0.7).values()],
        "by two models": [float(gap.mean()), float(gap.max())],
        "without": lm_head_quantization_error(plain, rollout, 0.7),
    }


def compare(got: Result, want: Result) -> list[float]:
    ratios = [float((g - want[1][n]).norm() / (want[1][n].norm() + 1e-12)) for n, g in got[1].items()]
    total = torch.stack([(g - want[1][n]).norm() for n, g in got[1].items()]).norm()
    whole = torch.stack([tensor.norm() for tensor in want[1].values()]).norm()
    return [abs(got[0] - want[0]) / abs(want[0]), float(total / whole), max(ratios)]


def memories(learner: Learner) -> list[torch.Tensor]:
    return [scales.state() for _, scales in fp8_layers._remembering(learner.bare)]


def resume(meshes: Meshes, work: Path, model: str, layout: str) -> dict[str, Any]:
    """Compares three updates, a checkpoint and two more with five: weights and scaling state, if any."""
    found: dict[str, Any] = {}
    for name in ("delayed", "blockwise"):
        whole = {"actor": learner_of(meshes, model, layout, RECIPES[name], 2e-2)}
        train(whole, range(3))
        before = memories(whole["actor"])
        whole["actor"].log_probs(rollout_of(whole["actor"].arch.vocab_size), 1.0)  # each rank sees different tokens
        saved = save(work / f"{name}_{layout}", 3, whole, {}, keep_last=1)
        at_save = memories(whole["actor"])
        train(whole, range(3, 5))
        fresh = {"actor": learner_of(meshes, model, layout, RECIPES[name], 2e-2, seed=9)}
        checkpoint.load(saved, fresh)
        loaded = memories(fresh["actor"])
        same = len(loaded) == len(at_save) and all(map(torch.equal, loaded, at_save))
        train(fresh, range(3, 5))
        same_end = all(map(torch.equal, memories(fresh["actor"]), memories(whole["actor"])))
        found[name] = {
            "weights": error(weights_of(fresh), weights_of(whole)),
            "memory": same and same_end,
            "passes": all(map(torch.equal, before, at_save)),
            "scales": len({float(scale) for state in loaded for scale in state[3:6]}),
        }
    return found


def main() -> None:
    work, dense, moe, result, *layouts = sys.argv[1:]
    platform.init_process_group(120)
    meshes, found = Meshes(120), {}
    for layout in layouts:
        kind, _, name = layout.rpartition(":")
        if kind == "resume":
            found[layout] = resume(meshes, Path(work), dense, name)
            continue
        model, reference = (moe, "moe.pt") if kind == "moe" else (dense, "dense.pt")
        got = {
            recipe: gradients(learner_of(meshes, model, name, fp8, 0.0), updates=2 if recipe == "delayed" else 0)
            for recipe, fp8 in RECIPES.items()
        }
        heads = head_errors(meshes, model, name)
        if name == "one":
            torch.save(got, Path(work, reference))
            found[layout] = {"head": heads} | {recipe: compare(got[recipe], got["none"]) for recipe in got}
        else:
            want = torch.load(Path(work, reference))
            found[layout] = {"head": heads} | {recipe: compare(got[recipe], want[recipe]) for recipe in got}
    if rank() == 0:
        Path(result).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
