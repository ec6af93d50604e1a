"""Log-probs, values, scores of pairs and every gradient of a vision-language model under many layouts, against
transformers.

Usage: vision_gradients.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. Layouts are as in gradients.py,
with /full (recomputed activations), /frozen (the vision tower) or both; `reference` writes the reference file.
RESULT_JSON gets {layout: {case: [largest difference of outputs, worst relative gradient error, its tensor]}}, and for
`wrong:LAYOUT` the error that building it raises on every rank. `--` and the same arguments for another model may
follow.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from mrl.config.sections.models import TrainConfig  # noqa: E402
from mrl.config.sections.reward_model import reward_model_training  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import FAMILIES, load_arch  # noqa: E402
from mrl.families.table import HF_VALUE_HEAD  # noqa: E402
from mrl.learner import Learner, Loss  # noqa: E402
from mrl.learner.loss_terms import LossParts  # noqa: E402
from mrl.learner.reward import RewardTargets, one_pass, two_pass  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.trainers.reward_model.batches import score_inputs_and_targets  # noqa: E402
from tests.helpers import vision_samples as samples  # noqa: E402
from tests.worlds.gradients import TIMEOUT_S, everywhere, jobs, parse  # noqa: E402

# cases of a reward model, and the layouts under which they also run; a pair has more than 60 tokens
TOKENS = {"pairs": 150, "pairs twice": 60}  # per micro-batch
PAIRED = {
    "pairs": ("one", "tp2", "tp2.sequence0", "pp2/frozen/full", "cp2", "tp2.pp2/full", "dp4/frozen"),
    "pairs twice": ("one", "cp2"),
}
Result = tuple[torch.Tensor, dict[str, torch.Tensor]]  # outputs [R], gradients by Hugging Face names


def main() -> None:
    platform.init_process_group(TIMEOUT_S)
    meshes = Meshes(TIMEOUT_S)
    for model_dir, reference_file, result_file, *layouts in jobs():
        compare_layouts(meshes, model_dir, reference_file, result_file, layouts)
    dist.destroy_process_group()


def compare_layouts(meshes: Meshes, model_dir: str, reference_file: str, result_file: str, layouts: list[str]) -> None:
    results: dict[str, object] = {}
    for layout in layouts:
        if layout == "reference":
            if rank() == 0:
                torch.save(reference(model_dir), reference_file)
            dist.barrier()
        elif layout.startswith("wrong:"):
            try:
                build("policy", model_dir, meshes, layout[6:], set())
            except ValueError as error:
                results[layout] = str(error)
        else:
            name, *options = layout.split("/")
            want = torch.load(reference_file)
            cases = ["policy", "critic", *(each for each in TOKENS if layout in PAIRED[each])]
            results[layout] = {
                case: compare(
                    one(case, model_dir, meshes, name, {*options}),
                    want[case.removesuffix(" twice")],
                    "frozen" in options,
                )
                for case in cases
            }
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    dist.barrier()


def weights_of(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, n)


def reference(model_dir: str) -> dict[str, Result]:
    seen, found, family = samples.make_seen(model_dir), {}, FAMILIES[load_arch(model_dir).family]
    for case in ("policy", "critic", "pairs"):
        model = samples.load_reference(model_dir).requires_grad_(True)
        head = torch.linspace(-1, 1, model.config.text_config.hidden_size)[None].requires_grad_(case == "pairs")
        if case == "pairs":
            out = torch.cat([samples.score(model, x, head) for x in samples.pairs_of(seen)])
            pairs(seen)[1].value(out[None].double()).backward()
        else:
            is_policy = case == "policy"
            out = torch.cat(
                [samples.log_probs(model, x) if is_policy else samples.values(model, x, head) for x in seen]
            )
            (out * weights_of(len(out))).sum().backward()
        hub = {family.in_memory(name): name for name in hub_names(model_dir)}
        gradients = {hub[name]: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[case] = out.detach(), gradients | ({HF_VALUE_HEAD: head.grad} if head.grad is not None else {})
    return found


def pairs(seen: list[samples.Seen]) -> tuple[Rollout, RewardTargets]:
    """Returns (the inputs of a reward model, the targets of its scores)."""
    texts = samples.rollout_of(samples.pairs_of(seen), per_row=2)
    targets = torch.tensor([1.0, 2.0]).repeat(len(seen))
    own = reward_model_training(loss="bradley_terry", center_rewards_coefficient=0.1)
    return score_inputs_and_targets(own, texts, targets, torch.zeros(len(seen)).double())


def hub_names(model_dir: str) -> list[str]:
    from mrl.families.table import weight_table

    return [name for row in weight_table(load_arch(model_dir)).values() for name in row.hf]


def build(case: str, model_dir: str, meshes: Meshes, layout: str, options: set[str]) -> Learner:
    mesh = meshes.get(parse(layout))
    recompute = "full" if "full" in options else "none"
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=TOKENS.get(case, 60), recompute=recompute)
    made = Learner(
        "policy" if case == "policy" else "critic",
        load_arch(model_dir),
        model_dir,
        train,
        mesh,
        dtype=torch.float32,
        seed=3,
        trains_vision="frozen" not in options,
    )
    for chunk in made.bare:
        if case != "policy" and chunk.post_process:
            chunk.value_head.weight.data.copy_(torch.linspace(-1, 1, made.arch.hidden_size)[None])
            made.optimizer.reload_model_params()
    return made


def one(case: str, model_dir: str, meshes: Meshes, layout: str, options: set[str]) -> Result:
    learner, seen = build(case, model_dir, meshes, layout, options), samples.make_seen(model_dir)
    rollout = samples.rollout_of(seen)
    stage_first = learner.mesh.pp_rank == 0
    learner.pixels = samples.pixels_of(seen) if stage_first else None  # no other stage may request pixels
    if case in TOKENS:
        rollout, held = pairs(seen)
        out = learner.values(rollout)
        fits = learner.planner.fits(rollout, held.together)
        assert fits is (case == "pairs")
        total = learner.total_over_context
        loss = one_pass(held, total, learner.mesh.cp) if fits else two_pass(held, out[None])[0]
    else:
        out = learner.log_probs(rollout, 1.0)[0] if case == "policy" else learner.values(rollout)
        weights = weights_of(len(out))
        loss = Loss(lambda v, dest: LossParts((v[0] * weights[dest]).sum(), [v[0].detach().sum()]), ("outputs",))
    learner.backward(rollout, range(rollout.num_samples), loss, 1.0, full_gradients=True)
    return out, everywhere(learner, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))


def compare(got: Result, want: Result, frozen: bool) -> list[object]:
    visual = {name for name in got[1] if "visual." in name}
    assert visual, "the tower has no gradients"
    names = {name for name in want[1] if not (frozen and name in visual)}
    assert names <= set(got[1]), sorted(names - set(got[1]))
    assert frozen is all(not got[1][name].any() for name in visual)
    # the gradient of a key's bias is 0 up to rounding, so errors are relative to the model's largest gradient too
    largest = max(float(grad.norm()) for grad in want[1].values())
    errors = {n: float((got[1][n] - want[1][n]).norm() / (want[1][n].norm() + 1e-4 * largest)) for n in names}
    worst = max(errors, key=errors.__getitem__)
    return [float((got[0] - want[0]).abs().max()), errors[worst], worst]


if __name__ == "__main__":
    main()
