"""Losses of supervised fine-tuning under many layouts: loss, every gradient, and metrics of held-out rows.

Usage: imitation.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. A layout is like tp2 (data parallelism
fills the world), tp2/80, with at most 80 tokens per micro-batch, or tp2/80/full, with recomputation; `one` alone writes
the reference file. RESULT_JSON gets {layout: {case: [relative loss error, worst relative gradient error, its tensor,
micro-batches]}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mrl import platform

platform.install()

from gradients import TIMEOUT_S, Result, compare, everywhere, parse  # noqa: E402

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, Loss, losses  # noqa: E402
from mrl.learner.likelihood import likelihood, metrics  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402

LENGTHS = ((1, 11), (5, 2), (7, 30), (4, 1), (1, 17), (2, 5), (9, 21))  # tokens of the prompt and of the rest
KINDS = ["a", "b", None, "b", "a", "a", "b"]


def make_batch(vocab: int) -> Rollout:
    """Returns rows with unequal loss weights, of which some are zero; on some ranks all are zero."""
    g = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(1, vocab, (n,), generator=g).tolist()  # noqa: E731
    prompts, rest = ([draw(lens[half]) for lens in LENGTHS] for half in (0, 1))
    total = sum(len(ids) for ids in rest)
    counts = torch.where(torch.rand(total, generator=g) < 0.3, 0.0, torch.rand(total, generator=g).round() + 0.5)
    return Rollout.of(3, prompts, rest, loss_weights=counts)


def cases(batch: Rollout) -> dict[str, Loss]:
    return {
        "nll": losses.cross_entropy(batch.normalized_loss_weights),
        "dft": losses.dft(batch.normalized_loss_weights),
        "smoothed": losses.smoothed_cross_entropy(batch.normalized_loss_weights, 0.1),
        "noise": losses.cross_entropy(batch.normalized_loss_weights, noise=5.0, seed=11),
        "other noise": losses.cross_entropy(batch.normalized_loss_weights, noise=5.0, seed=12),
        "all": losses.smoothed_cross_entropy(batch.normalized_loss_weights, 0.1, noise=5.0, seed=11),
    }


def measured(learner: Learner) -> tuple[dict[str, Result], int]:
    """Returns loss and gradients by case, and the number of micro-batches."""
    batch = make_batch(learner.arch.vocab_size)
    found: dict[str, Result] = {}
    for case, loss in cases(batch).items():
        got = learner.backward(batch, range(batch.num_samples), loss, 1.0, full_gradients=True)
        found[case] = (got["loss"], everywhere(learner, lambda p: p.main_grad))
    parts = [batch.part(range(2)), batch.part(range(2, 7))]
    held_out = metrics(likelihood(learner, zip((KINDS[:2], KINDS[2:]), parts, strict=True)), "validation")
    found |= {name: (value, {}) for name, value in held_out.items()}
    return found, len(learner.planner.micro_batches(batch, range(batch.num_samples)))


def build(model_dir: str, mesh: Mesh, tokens: int, recompute: str) -> Learner:
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=tokens, recompute=recompute)  # type: ignore[arg-type]
    return Learner(
        "policy", load_arch(model_dir), model_dir, train, mesh, dtype=torch.float32, seed=3, from_scratch=True
    )


def main() -> None:
    model_dir, reference_file, result_file, *layouts = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    meshes = Meshes(TIMEOUT_S)
    results: dict[str, dict[str, list[object]]] = {}
    for layout in layouts:
        name, tokens, recompute = [*layout.split("/"), "", ""][:3]
        learner = build(model_dir, meshes.get(parse(name)), int(tokens or 10_000), recompute or "none")
        got, batches = measured(learner)
        if layout == "one":
            torch.save(got, reference_file)
        want = torch.load(reference_file)
        results[layout] = {case: [*compared(got[case], want[case]), batches, got[case][0]] for case in want}
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def compared(got: Result, want: Result) -> list[object]:
    return compare(got, want) if want[1] else [abs(got[0] - want[0]) / (abs(want[0]) + 1e-9), 0.0, ""]


if __name__ == "__main__":
    main()
