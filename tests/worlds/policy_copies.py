"""Run under torchrun with 4 processes: copies of a learner's weights (averages and references), under several layouts.

Usage: policy_copies.py WORK_DIR DENSE_MODEL MOE_MODEL REWARD_MODEL ONE_WITHOUT_HEAD. Prints one JSON object per case:
{"case": ..., ...}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_tools import Weights, World, error, report, save, stored_difference, train, weights_of
from gradients import everywhere, make_rollout
from transformers import AutoModelForSequenceClassification

from mrl import checkpoint, platform
from mrl.config.schema import KLConfig, ParallelConfig, RLConfig, TrainConfig
from mrl.config.sections.policy import policy_loss
from mrl.families import load_arch
from mrl.learner import Learner, LossTerm, losses
from mrl.learner.losses import PolicyTargets
from mrl.learner.optimizer import main_parameters
from mrl.learner.policy_copy import PolicyCopy
from mrl.parallel import gather
from mrl.trainers.rl.models import build_models
from mrl.trainers.shared.references import RefreshedReference
from mrl.weights.errors import WeightError
from tests.helpers.slow import RUN_SLOW, slow_cases

SHARE = 0.25


def masters(learner: Learner) -> Weights:
    """Returns the optimizer's float32 weights in float64, by parameter, for this rank's shards."""
    return {str(i): main.double() for i, (_, main) in enumerate(main_parameters(learner.optimizer))}


def shown(copy: PolicyCopy) -> Weights:
    """Returns the copy's gathered weights by Hugging Face name, after they are put into the model."""
    with copy.in_place() as learner:
        return weights_of({"actor": learner})


def average(world: World, case: str, layout: str, model: str, dtype: torch.dtype) -> None:
    """Compares a moving average with the recursion in float64, and its learner with one without a copy."""
    learner, twin = (world.learner("policy", model, layout, 1, dtype) for _ in range(2))
    copies = {offload: PolicyCopy(learner, offload=offload) for offload in (False, True)}
    want = masters(learner)
    for update in range(5):
        for each in (learner, twin):
            train({"actor": each}, range(update, update + 1))
        want = {n: (1 - SHARE) * w + SHARE * masters(learner)[n] for n, w in want.items()}
        for copy in copies.values():
            copy.follow(SHARE)
    weights = [*map(shown, copies.values()), weights_of({"actor": learner}), weights_of({"actor": twin})]
    got = {str(i): kept.double() for i, kept in enumerate(copies[True].kept.values())}
    worst = max(float((got[n] - w).abs().max() / w.abs().max()) for n, w in want.items()) if want else 0.0
    report(
        case,
        average=max(gather(worst)),
        apart=error(weights[0], weights[2]),
        offloaded=error(weights[0], weights[1]),
        learner=error(weights[2], weights[3]),
    )


def shares(world: World, dense: str) -> None:
    """Reports that with data parallelism the ranks hold one copy of the weights together, not one each."""
    copy = PolicyCopy(world.learner("policy", dense, "dp4", 1), offload=True)
    whole = sum(parameter.numel() for parameter in copy.learner.bare[0].parameters())
    report("parts", kept=gather(sum(kept.numel() for kept in copy.kept.values())), whole=whole)


def taken_over(world: World, dense: str) -> None:
    """Checks that a refreshed reference gives the learner's log-probs at the time of the refresh."""
    learner = world.learner("policy", dense, "tp2.pp2", 1)
    copy, rollout = PolicyCopy(learner, offload=False), make_rollout(learner.arch.vocab_size)
    at_start = learner.log_probs(rollout, 0.7)[0]
    train({"actor": learner}, range(2))
    after_two = learner.log_probs(rollout, 0.7)[0]
    stays = torch.equal(copy.log_probs(rollout, 0.7)[0], at_start)
    copy.follow(1.0)
    train({"actor": learner}, range(2, 4))
    report(
        "refresh",
        stays=stays,
        refreshed=torch.equal(copy.log_probs(rollout, 0.7)[0], after_two),
        learner_is_elsewhere=float((learner.log_probs(rollout, 0.7)[0] - after_two).abs().max()),
    )


def terms(world: World, case: str, layout: str, model: str) -> None:
    """Compares one update of two losses, over different samples and temperatures, with one update of each."""
    learner = world.learner("policy", model, layout, 1)
    vocab = learner.arch.vocab_size
    a, b = make_rollout(vocab), make_rollout(vocab, seed=5).pick(torch.tensor([7, 2, 4]))
    flat = torch.full((a.num_response_tokens,), 1 / a.num_response_tokens)
    noise = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(3))
    loss = losses.policy(policy_loss(entropy_coef=0.1), KLConfig(), 0.0, PolicyTargets(noise, flat, flat, flat))
    extra = losses.ptx(torch.full((b.num_response_tokens,), 1 / b.num_response_tokens), 0.5)

    def gradients(*args: Any, **more: Any) -> tuple[dict[str, float], Weights]:
        metrics = learner.backward(*args, full_gradients=True, **more)
        return metrics, everywhere(learner, lambda p: p.main_grad)

    first, of_first = gradients(a, range(10), loss, 0.7, entropy_grad=True)
    second, of_second = gradients(b, range(3), extra, 1.0)
    both, of_both = gradients(a, range(10), loss, 0.7, entropy_grad=True, also=[LossTerm(b, range(3), extra, 1.0)])
    want = {"loss": first["loss"] + second["loss"], "ptx/loss": second["ptx/loss"]}
    report(
        case,
        gradients=error(of_both, {n: g + of_second[n] for n, g in of_first.items()}),
        apart=error(of_both, of_first),
        metrics=max(abs(both[n] - x) for n, x in (first | want).items()),
        coefficient=second["loss"] / second["ptx/loss"],
        seen=bool(
            torch.equal(learner.last_outputs.log_probs(a)[1], torch.ones(a.num_response_tokens, dtype=torch.bool))
        ),
    )


def wiring(world: World, dense: str) -> None:
    """Reports the copies that a configuration creates, and those that a checkpoint would hold."""
    base = {
        "trainer": "rl", "run": {"name": "-"}, "model": {"path": dense, "from_scratch": True, "dtype": "float32"},
        "actor": {"parallel": {"tensor": 2}}, "data": {"train": "-"}, "batch": {"prompts_per_step": 1}, "reward": {},
        "algorithm": {"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.1}}, "ema": {"decay": 0.5},
    }  # fmt: skip
    found = {}
    for policy in ("ema", "refreshed", "frozen"):
        ref = {"policy": policy} | ({"refresh_every_steps": 2} if policy == "refreshed" else {})
        models = build_models(RLConfig.model_validate(base | {"ref": ref}), world)  # type: ignore[arg-type]
        assert models.ref is not None and models.ema is not None
        rollout = make_rollout(models.actor.arch.vocab_size)
        steps = [models.actor.log_probs(rollout, 1.0)[0]]
        for step in range(1, 3):
            train({"actor": models.actor}, range(step, step + 1))
            models.ema.after_update()
            if isinstance(models.ref, RefreshedReference):
                models.ref.after_step(step)
            steps.append(models.actor.log_probs(rollout, 1.0)[0])
        reference = models.ref.log_probs(rollout, 1.0)[0]
        found[policy] = {
            "saved": sorted(models.saved),
            "is average": models.ref is models.ema,
            "is the actor of step": [step for step, of_actor in enumerate(steps) if torch.equal(reference, of_actor)],
        }
    report("wiring", **found)


def reward_model(world: World, path: str, headless: str) -> None:
    """Compares a critic that starts from a reward model with transformers."""
    mesh = world.meshes.get(ParallelConfig(tensor=2, pipeline=2))
    train_cfg = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=128)

    def critic(where: str) -> Learner:
        return Learner("critic", load_arch(where), where, train_cfg, mesh, dtype=torch.float32, seed=1)

    learner = critic(path)
    rollout = make_rollout(learner.arch.vocab_size)
    values = learner.values(rollout)
    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    want = []
    for tokens, prompt in zip(rollout.tokens.split(rollout.seq_lens.tolist()), rollout.prompt_lens, strict=True):
        with torch.no_grad():
            want.append(theirs.score(theirs.model(tokens[None]).last_hidden_state)[0, prompt - 1 : -1, 0])
    message = "no error"
    try:
        critic(headless)
    except WeightError as raised:
        message = str(raised)
    gap = float((values - torch.cat(want)).abs().max())
    report("reward model", gap=gap, largest=float(values.abs().max()), headless=message)


def saved(world: World, case: str, model: str, layouts: list[str], dtype: torch.dtype) -> None:
    """Saves under the first layout, loads under each layout, and continues as the uninterrupted run does."""

    def make(layout: str, seed: int) -> tuple[Learner, PolicyCopy]:
        learner = world.learner("policy", model, layout, seed, dtype)
        return learner, PolicyCopy(learner, offload=layout != layouts[0])

    def go_on(learner: Learner, copy: PolicyCopy) -> Weights:
        train({"actor": learner}, range(3, 5))
        copy.follow(SHARE)
        return shown(copy)

    learner, copy = make(layouts[0], 1)
    train({"actor": learner}, range(3))
    copy.follow(SHARE)
    kept = {"tensors": [torch.arange(3)], "step": 3}
    path = save(world.work / case, 3, {"actor": learner, "ema": copy}, {"step": 3}, keep_last=1, kept=kept)
    at_save, at_end = shown(copy), go_on(learner, copy)
    for layout in layouts:
        fresh, fresh_copy = make(layout, 99)
        before = error(shown(fresh_copy), at_save)
        checkpoint.load(path, {"actor": fresh, "ema": fresh_copy})
        again = save(world.work / f"{case}_{layout}", 3, {"actor": fresh, "ema": fresh_copy}, {}, keep_last=1)
        report(
            f"{case} {layout}",
            before=before,
            loaded=error(shown(fresh_copy), at_save),
            stored=stored_difference(path, again, fresh.arch.vocab_size),
            continued=error(go_on(fresh, fresh_copy), at_end),
            kept=[int(x) for x in checkpoint.load_samples(path)["tensors"][0]],
        )


def main() -> None:
    work, dense, moe, reward, headless = sys.argv[1:]
    platform.init_process_group(120)
    world = World(Path(work), dense, moe, dense)
    average(world, "TP2 x PP2", "tp2.pp2", dense, torch.float32)
    average(world, "DP4, bfloat16", "dp4", dense, torch.bfloat16)
    if RUN_SLOW:
        average(world, "EP2 x DP2", "ep2", moe, torch.float32)
    for layout in ("cp2.dp2", *slow_cases("tp2.pp2", "pp2.vpp2")):
        terms(world, f"two losses {layout}", layout, dense)
    shares(world, dense)
    wiring(world, dense)
    reward_model(world, reward, headless)
    taken_over(world, dense)
    saved(world, "dense", dense, ["tp2.pp2", "dp4"], torch.float32)
    if RUN_SLOW:
        saved(world, "moe", moe, ["ep2", "tp2.ep2"], torch.float32)
        saved(world, "bfloat16", dense, ["dp4"], torch.bfloat16)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
