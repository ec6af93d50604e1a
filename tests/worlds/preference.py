"""Losses of preference learning under many layouts: loss and every gradient.

Usage: preference.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. A layout is like tp2 (data parallelism
fills the world) or tp2/80, with at most 80 tokens per micro-batch; `one` alone writes the reference file, which
includes the inputs. RESULT_JSON gets {layout: {case: [relative loss error, worst relative gradient error, its tensor,
micro-batches, largest error of the per-token metrics]}}. `--` and the same arguments for another model may follow.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from gradients import TIMEOUT_S, compare, everywhere, jobs, parse  # noqa: E402

from mrl.algo.preference_unpaired import kl_estimate  # noqa: E402
from mrl.config.schema import DPOConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.data.preference import mismatched_pairs, with_prompts  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.learner.preference import one_pass, targets, two_pass  # noqa: E402
from mrl.options.preference import PREFERENCE_LOSSES  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from mrl.trainers.dpo.loop import DPORun, RewardShift, first_pass, with_shift  # noqa: E402

PROMPT = (3, 5, 2, 7, 4, 1, 6, 2, 3)  # tokens
RESPONSES = ((9, 2), (30, 11), (1, 17), (5, 12), (3, 21), (7, 8), (4, 4), (2, 5), (6, 1))  # chosen, rejected
GIVEN: dict[str, dict[str, Any]] = {  # options that are not the defaults
    "sigmoid": {"beta": 0.3, "label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.2},
    "hinge": {"f_divergence_type": "js_divergence"},
    "exo_pair": {"label_smoothing": 0.05},
    "aot": {"label_smoothing": 0.1},
    "simpo": {"alpha": 0.25},
    "kto": {"desirable_weight": 1.3},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss": {name: GIVEN.get(name, {})}} for name in PREFERENCE_LOSSES},
    "mixed": {"loss": {"sigmoid": {"weight": 0.8}, "bco_pair": {"weight": 0.2}, "sft": {}}},
    "ld": {"loss": {"apo_down": {}, "sigmoid_norm": {"weight": 0.5}, "sft": {"weight": 0.3}}, "ld_alpha": 0.4},
    "orpo with prompts": {"loss": {"orpo": {}, "sft": {"with_prompt": True}}},
    "prompts": {"loss": {"sigmoid": {}, "sft": {"with_prompt": True}}, "ld_alpha": 0.4},
    "weighted": {"loss": {"hinge": {}, "sft": {"weight": 0.3}}, "use_weighting": True},
    "free": {"loss": {"ipo": {}}, "reference_free": True},
}
TWICE = ("sigmoid", "ld", "prompts", "apo_zero_unpaired")  # also run in two passes, without need


def make_batch(vocab: int, unpaired: bool) -> Rollout:
    """Returns nine pairs; if `unpaired`, their responses with a label each."""
    g = torch.Generator().manual_seed(7)
    draw = lambda n: torch.randint(1, vocab, (n,), generator=g).tolist()  # noqa: E731
    prompts = [prompt for n in PROMPT for prompt in 2 * [draw(n)]]
    responses = [draw(n) for pair in RESPONSES for n in pair]
    labels = torch.arange(18) % 3 > 0 if unpaired else torch.arange(18) % 2 == 0
    return Rollout.of(0, prompts, responses, scores=labels.float())


def config(preference: dict[str, Any]) -> DPOConfig:
    rest = {"run": {"name": "-"}, "model": {"path": "-"}, "data": {"train": "-"}, "batch": {"rows_per_step": 9}}
    return DPOConfig.model_validate_json(json.dumps({"trainer": "dpo", "preference": preference, **rest}))


def build(model_dir: str, mesh: Mesh, tokens: int, seed: int, trainable: bool) -> Learner:
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=tokens)
    return Learner(
        "policy", load_arch(model_dir), model_dir, train, mesh,
        dtype=torch.float32, seed=seed, from_scratch=True, trainable=trainable,
    )  # fmt: skip


def gradients(
    cfg: DPOConfig, actor: Learner, ref: Learner, twice: bool
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Returns (loss, full gradients by Hugging Face name, metrics of tokens). twice: use two passes in any case"""
    preference = cfg.preference
    together = 1 if preference.is_unpaired else 2
    batch = make_batch(actor.arch.vocab_size, preference.is_unpaired)
    t = targets(batch, preference.loss.chosen, together, preference.ld_alpha, preference.learns_prompts)
    if preference.needs_reference:
        of = targets(batch, {}, together, preference.ld_alpha)
        t = replace(t, reference=of.sums(ref.log_probs(batch, 1.0)[0])[0])
    if preference.needs_kl:
        others = mismatched_pairs(batch, 30)
        of = targets(others, {}, 1)
        t = replace(
            t, kl=kl_estimate((of.sums(actor.log_probs(others, 1.0)[0]) - of.sums(ref.log_probs(others, 1.0)[0]))[0])
        )
    batch = with_prompts(batch) if preference.learns_prompts else batch
    if preference.couples_rows or twice or not actor.planner.fits(batch, together):
        run = object.__new__(DPORun)
        run.actor, run.cfg, run.shift = actor, cfg, RewardShift()
        t, policy = first_pass(run, batch, t)
        loss, value = two_pass(with_shift(run, t, policy), policy)
    else:
        loss, value = one_pass(t, actor.total_over_context, actor.mesh.cp), None
    metrics = actor.backward(batch, range(18), loss, 1.0, full_gradients=True)
    value = metrics["loss"] if value is None else value
    return value, everywhere(actor, lambda p: p.main_grad), {name: metrics[name] for name in t.described()}


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
        mesh = meshes.get(parse(name))
        actor, ref = (build(model_dir, mesh, int(tokens or 10_000), 3 + i, i == 0) for i in (0, 1))
        got = {case: gradients(config(keys), actor, ref, twice=False) for case, keys in CASES.items()}
        got |= {f"{case} twice": gradients(config(CASES[case]), actor, ref, twice=True) for case in TWICE}
        if layout == "one":
            batch = make_batch(actor.arch.vocab_size, False)
            made_of = {
                "given": CASES,
                "weights": [everywhere(model, torch.Tensor.detach) for model in (actor, ref)],
                "samples": batch.tokens.split(batch.seq_lens.tolist()),
                "prompt_lens": batch.prompt_lens,
            }
            torch.save({"cases": got, **made_of}, reference_file)
        want = torch.load(reference_file)["cases"]
        batches = len(actor.planner.micro_batches(make_batch(313, False), range(18), 2))
        results[layout] = {}
        for case, (*of_it, said) in got.items():
            *wanted, known = want[case.removesuffix(" twice")]
            apart = max(abs(said[name] - known[name]) for name in known)
            results[layout][case] = [*compare(tuple(of_it), tuple(wanted)), batches, apart]
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
