"""Losses of reward models under many layouts: loss and every gradient.

Usage: reward_losses.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. A layout is like tp2 (data parallelism
fills the world) or tp2/80, with at most 80 tokens per micro-batch; `one` alone writes the reference file. RESULT_JSON
gets {layout: {case: [relative loss error, worst relative gradient error, its tensor, micro-batches]}}. `--` and the
same arguments for another model may follow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from gradients import TIMEOUT_S, compare, everywhere, jobs, parse  # noqa: E402

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.config.sections.reward_model import reward_model_training  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.families.table import HF_VALUE_BIAS  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.learner.reward import RewardTargets, one_pass, two_pass  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from mrl.trainers.reward_model.batches import score_inputs_and_targets  # noqa: E402

PROMPT = (3, 5, 2, 7, 4, 1, 6)  # tokens
RESPONSES = ((9, 2), (30, 11), (1, 17), (5, 12), (3, 21), (7, 8), (4, 4))
LISTS = (2, 3, 2, 4, 3)  # number of texts in each list
CASES: dict[str, dict[str, Any]] = {
    "bradley_terry": {"center_rewards_coefficient": 0.1, "label_smoothing": 0.1},
    "plackett_luce": {"center_rewards_coefficient": 0.1},
    "pairwise": {"center_rewards_coefficient": 0.1, "label_smoothing": 0.1},
    "regression": {},
    "process": {},
}


def make(case: str, vocab: int) -> tuple[Rollout, Rollout, RewardTargets, list[list[int]] | None]:
    """Returns (fourteen texts, the texts as model inputs, the score targets, the ends of their steps or None)."""
    g = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(1, vocab, (n,), generator=g).tolist()  # noqa: E731
    prompts = [prompt for n in PROMPT for prompt in 2 * [draw(n)]]
    responses = [draw(n) for pair in RESPONSES for n in pair]
    own = reward_model_training(loss=case, **CASES[case])
    sizes = {"pairs": 7 * (2,), "lists": LISTS}.get(own.form, 14 * (1,))
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    texts = Rollout.of(0, prompts, responses, group=group)
    steps = [sorted({1, max(1, len(text) // 2), len(text)}) for text in responses] if own.form == "steps" else None
    if own.form == "pairs":
        targets = torch.tensor(7 * [1.0, 2.0])
    elif own.form == "lists":
        targets = torch.cat([torch.randint(1, size + 1, (size,), generator=g) for size in sizes])
    else:
        count = sum(map(len, steps)) if steps else 14
        targets = (torch.arange(count) % 3 > 0).float()
    fed, held = score_inputs_and_targets(own, texts, targets, torch.rand(len(sizes), generator=g).double(), steps)
    return texts, fed, held, steps


def build(model_dir: str, mesh: Mesh, tokens: int) -> Learner:
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=tokens)
    return Learner("critic", load_arch(model_dir), model_dir, train, mesh, dtype=torch.float32, seed=3)


def gradients(case: str, actor: Learner, twice: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns (loss, full gradients by Hugging Face name). twice: two passes, though each row fits"""
    _, fed, t, _ = make(case, actor.arch.vocab_size)
    if twice or not actor.planner.fits(fed, t.together):
        loss, value = two_pass(t, actor.scores(fed)[:, t.places])
    else:
        loss, value = one_pass(t, actor.total_over_context, actor.mesh.cp), None
    metrics = actor.backward(fed, range(14), loss, 1.0, full_gradients=True)
    found = everywhere(actor, lambda p: p.main_grad)
    found.pop(HF_VALUE_BIAS, None)
    return metrics["loss"] if value is None else value, found


def main() -> None:
    platform.init_process_group(TIMEOUT_S)
    meshes = Meshes(TIMEOUT_S)
    for model_dir, reference_file, result_file, *layouts in jobs():
        compare_layouts(meshes, model_dir, reference_file, result_file, layouts)
    torch.distributed.destroy_process_group()


def compare_layouts(meshes: Meshes, model_dir: str, reference_file: str, result_file: str, layouts: list[str]) -> None:
    results: dict[str, dict[str, list[object]]] = {}
    for layout in layouts:
        name, _, tokens = layout.partition("/")
        actor = build(model_dir, meshes.get(parse(name)), int(tokens or 10_000))
        got = {case: gradients(case, actor, twice=False) for case in CASES}
        got |= {f"{case} twice": gradients(case, actor, twice=True) for case in ("bradley_terry", "process")}
        if layout == "one":
            torch.save(got, reference_file)
        want = torch.load(reference_file)
        _, fed, t, _ = make("bradley_terry", actor.arch.vocab_size)
        batches = len(actor.planner.micro_batches(fed, range(14), t.together))
        results[layout] = {case: [*compare(got[case], want[case.removesuffix(" twice")]), batches] for case in got}
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
