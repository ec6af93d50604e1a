"""Run under torchrun: loss and every gradient of actor and critic under many layouts, and ten complete PPO steps.

Usage: gradients.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...]. A layout is like tp2.pp2 (data parallelism
fills the world), tp2.pp2/full (with activation recomputation), dp4/overlap (gradient reduction overlaps the backward
pass) or `one`, which writes the reference file. `ten:A,B` trains ten steps under the layouts A and B from the same
rollouts and compares the weights. RESULT_JSON gets {layout: {case: [relative loss error, worst relative gradient error,
its tensor]}}. `--` and the same arguments for another model may follow.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mrl import platform

platform.install()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from mrl.algo import Sequences, aggregate  # noqa: E402
from mrl.config.schema import (  # noqa: E402
    KLConfig,
    OptimizerConfig,
    ParallelConfig,
    RLConfig,
    TrainConfig,
    ValueLossConfig,
)
from mrl.config.sections.policy import policy_loss  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import ModelArch, load_arch  # noqa: E402
from mrl.learner import Learner, Loss, learner, losses, optimizer  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from mrl.trainers.rl.experience import forward_passes, make_experience  # noqa: E402
from mrl.trainers.rl.loop import update  # noqa: E402
from mrl.weights.model.export import Exporter  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

TIMEOUT_S = 600  # of a collective; on a busy machine eight processes start minutes apart
Result = tuple[float, dict[str, torch.Tensor]]
KEYS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "vpp": "virtual_pipeline",
        "etp": "expert_tensor", "first": "first_stage_layers", "last": "last_stage_layers"}  # fmt: skip
SEQ = [(9, 9), (9, 2), (7, 30), (7, 1), (6, 17), (2, 5), (15, 6), (15, 3), (8, 12), (8, 7)]  # prompt, response tokens


POLICY_CASES = (
    ("ppo", policy_loss(entropy_coef=0.01), KLConfig()),
    (
        "grpo",
        policy_loss(loss_agg_mode="seq-mean-token-mean", off_policy_mask_threshold=0.02),
        KLConfig(use_in_loss=True, penalty="k3", coef=0.1, bias_correction=True),
    ),
    ("gspo", policy_loss(loss_mode="gspo", clip_ratio_low=0.2, clip_ratio_high=0.2), KLConfig()),
    ("geo_mean", policy_loss(loss_mode="geo_mean", clip_ratio_low=0.2, clip_ratio_high=0.2), KLConfig()),
)
SEQUENCE_CASES = ("gspo", "geo_mean")
TEN_STEPS = {
    "trainer": "rl",
    "run": {"name": "ten"},
    "model": {"path": "-"},
    "data": {"train": "-"},
    "reward": {"function": "exact_match"},
    "batch": {"prompts_per_step": 5, "samples_per_prompt": 2, "samples_per_minibatch": 5},
    "algorithm": {"adv_estimator": "gae", "lam": 0.95},
}


def parse(layout: str) -> ParallelConfig:
    values: dict[str, int] = {}
    for part in [] if layout == "one" else layout.split("."):
        name = part.rstrip("0123456789")
        values[KEYS.get(name, name)] = int(part[len(name) :])
    values.pop("dp", None)
    return ParallelConfig(**values | {"sequence": bool(values.get("sequence", 1))})  # type: ignore[arg-type]


def make_rollout(vocab: int, seed: int = 0) -> Rollout:
    """Returns a rollout in groups of two. The two prompts of a group are equal if they have the same length."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = (torch.tensor(x) for x in zip(*SEQ, strict=True))
    tokens = torch.randint(0, vocab, (int((prompts + responses).sum()),), generator=g)
    samples = tokens.split((prompts + responses).tolist())
    for one, other, of_one, of_other in zip(samples[::2], samples[1::2], prompts[::2], prompts[1::2], strict=True):
        if of_one == of_other:
            other[:of_one] = one[:of_one]
    return Rollout(
        step=0,
        tokens=tokens,
        seq_lens=prompts + responses,
        prompt_lens=prompts,
        group=torch.arange(len(SEQ)) // 2,
        scores=torch.randn(len(SEQ), generator=g),
        rollout_log_probs=-torch.rand(int(responses.sum()), generator=g) * 3,
    )


def make_trajectories(rollout: Rollout) -> Rollout:
    """Returns the rollout as trajectories: two of five tokens are the policy's, the others the environment's; sample 4
    ends with tokens of the environment."""
    place = torch.arange(rollout.tokens.numel())
    after_prompt = torch.cat([torch.arange(n) >= p for n, p in zip(rollout.seq_lens, rollout.prompt_lens, strict=True)])
    drawn = after_prompt & (place % 5 < 2)
    drawn[int(rollout.seq_lens[:5].sum()) - 4 : int(rollout.seq_lens[:5].sum())] = False
    return replace(rollout, action_mask=drawn, rollout_log_probs=torch.zeros(int(drawn.sum())))


def make_several(told: Rollout) -> Rollout:
    """Returns the trajectories with the longer ones split into two or three sequences."""
    assert told.action_mask is not None
    counts, lens = [], []
    for length, drawn in zip(told.seq_lens.tolist(), told.action_mask.split(told.seq_lens.tolist()), strict=True):
        free = (~drawn).nonzero().flatten().tolist()
        cuts = [0, *sorted({free[i] for i in (len(free) // 2, -4) if length > 14 and free[i] > 0}), length]
        counts.append(len(cuts) - 1)
        lens += [b - a for a, b in itertools.pairwise(cuts)]
    assert max(counts) == 3 and min(counts) == 1
    return replace(told, sequence_counts=torch.tensor(counts), sequence_lens=torch.tensor(lens))


def advantages_of(rollout: Rollout) -> torch.Tensor:
    return torch.randn(rollout.num_response_tokens, generator=torch.Generator().manual_seed(2))


def plain_gradient(rollout: Rollout) -> Loss:
    """Returns the loss -advantage * log-prob, averaged over the policy's tokens."""
    n, advantages = rollout.num_response_tokens, advantages_of(rollout)
    equal = torch.full((n,), 1 / n)
    targets = losses.PolicyTargets(
        advantages=advantages,
        policy_weights=equal,
        weights=equal,
        mean_weights=equal,
        old_log_probs=None,
        ref_log_probs=None,
        sequences=Sequences.of_mask(rollout.response_mask),
    )
    return losses.policy(policy_loss(loss_mode="gpg"), KLConfig(), 0.0, targets)


def plain_loop(model_dir: str, weights: dict[str, torch.Tensor], rollout: Rollout) -> Result:
    """Returns the same loss and its gradients from transformers, one sequence and one token at a time."""
    assert rollout.action_mask is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.get_input_embeddings().padding_idx = None  # it would hide the gradient of a row that the rollouts contain
    advantages, total, at = advantages_of(rollout), torch.zeros(()), 0
    lengths = (rollout.seq_lens if rollout.sequence_lens is None else rollout.sequence_lens).tolist()
    for ids, drawn in zip(rollout.tokens.split(lengths), rollout.action_mask.split(lengths), strict=True):
        log_probs = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
        for place in drawn.nonzero().flatten().tolist():
            total = total - advantages[at] * log_probs[place - 1, ids[place]]
            at += 1
    loss = total / at
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cases(rollout: Rollout, actor: Learner) -> dict[str, tuple[str, Loss, bool]]:
    """Returns name -> (role, loss, True if the entropy takes a gradient)."""
    g = torch.Generator().manual_seed(1)
    n = rollout.num_response_tokens
    noise = torch.randn(4, n, generator=g)
    keep = torch.rand(n, generator=g) < 0.9  # drops whole responses too: the one-token response
    log_probs, _ = actor.log_probs(rollout, 0.7)
    out: dict[str, tuple[str, Loss, bool]] = {}
    for name, cfg, kl in POLICY_CASES:
        mask = rollout.response_mask
        counted = rollout.dense(keep) if name in SEQUENCE_CASES else mask
        weights = rollout.flat(aggregate.token_weights(cfg.aggregation, counted))
        targets = losses.PolicyTargets(
            advantages=noise[0],
            policy_weights=weights * (noise[3].exp() if name in SEQUENCE_CASES else 1),
            weights=weights,
            mean_weights=rollout.flat(aggregate.token_weights("token-mean", mask)),
            old_log_probs=log_probs + 0.2 * noise[1],
            ref_log_probs=log_probs + 0.3 * noise[2] if kl.use_in_loss else None,
            sampling_log_probs=log_probs + 0.3 * noise[3] if cfg.off_policy_mask_threshold is not None else None,
            sequences=Sequences.of_mask(mask, counted, actor.total_over_context),
        )
        out[name] = ("policy", losses.policy(cfg, kl, kl.coef, targets), cfg.entropy_coef > 0)
    weights = rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask))
    old = 0.1 * noise[3]
    out["critic"] = ("critic", losses.value(ValueLossConfig(), old, old + noise[0], weights, weights), False)
    return out


def gradients(learner: Learner, rollout: Rollout, loss: Loss, entropy_grad: bool) -> Result:
    """Returns (loss, full gradients by Hugging Face name)."""
    metrics = learner.backward(
        rollout, range(rollout.num_samples), loss, 0.7, entropy_grad=entropy_grad, full_gradients=True
    )
    return metrics["loss"], everywhere(learner, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))


def everywhere(learner: Learner, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the result of `read` for every parameter, gathered and under Hugging Face names, on every rank."""
    with learner.mesh.active():
        exporter = Exporter(learner.bare, learner.arch, learner.mesh, read=read)
        mine = {name: tensor.clone() for name, tensor in exporter.stream()}
    boxes: list[dict[str, torch.Tensor]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(boxes, mine)
    return {name: tensor for box in boxes for name, tensor in box.items()}


def overlap(option: str) -> str:
    """Makes the learners built next overlap gradient reduction with the backward pass, in small buckets, as on GPUs, if
    `option` is "overlap". Returns the remaining option."""
    wanted = option == "overlap"
    learner.sums_overlap = lambda mesh: wanted  # type: ignore[attr-defined]
    vars(optimizer)["DistributedDataParallelConfig"] = partial(DistributedDataParallelConfig, bucket_size=20_000)
    return "" if wanted else option


def no_exchange(*args: object) -> None:
    raise AssertionError("stages ask each other for shapes that both know")


def jobs() -> list[list[str]]:
    """Returns the parts of the command line that `--` separates."""
    return [list(part) for is_end, part in itertools.groupby(sys.argv[1:], "--".__eq__) if not is_end]


def main() -> None:
    P2PCommunicator._communicate_shapes = no_exchange
    platform.init_process_group(TIMEOUT_S)
    meshes = Meshes(TIMEOUT_S)
    for model_dir, reference_file, result_file, *layouts in jobs():
        compare_layouts(meshes, model_dir, reference_file, result_file, layouts)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def compare_layouts(meshes: Meshes, model_dir: str, reference_file: str, result_file: str, layouts: list[str]) -> None:
    arch = load_arch(model_dir)
    reference = {} if layouts == ["one"] else torch.load(reference_file)
    results: dict[str, dict[str, list[object]]] = {}
    for layout in layouts:
        if layout.startswith("ten:"):
            first, second = (ten_steps(model_dir, meshes, x) for x in layout[4:].split(","))
            results[layout] = {"weights": compare((0.0, first), (0.0, second))}
            continue
        name, _, recompute = layout.partition("/")
        recompute = overlap(recompute)
        mesh = meshes.get(parse(name))
        train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=56, recompute=recompute or "none")  # type: ignore[arg-type]
        got = all_gradients(model_dir, arch, mesh, train)
        if layout == "one":
            torch.save(got, reference_file)
        else:
            results[layout] = {case: compare(got[case], reference[case]) for case in got}
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()


def all_gradients(model_dir: str, arch: ModelArch, mesh: Mesh, train: TrainConfig) -> dict[str, Result]:
    actor, critic = (build(role, model_dir, mesh, train) for role in ("policy", "critic"))
    rollout = make_rollout(arch.vocab_size)
    if torch.distributed.get_world_size() == 1:  # the reference computes each sample's prompt separately
        actor.planner.shares = critic.planner.shares = False
    elif mesh.dp == mesh.cp == 1:
        batches = actor.planner.micro_batches(rollout, range(rollout.num_samples))
        assert sum(int((batch.source >= 0).sum()) for batch in batches) < rollout.tokens.numel() - 20
    found = {
        case: gradients(actor if role == "policy" else critic, rollout, loss, entropy_grad)
        for case, (role, loss, entropy_grad) in cases(rollout, actor).items()
    }
    told = make_trajectories(rollout)
    for case, some in (("trajectories", told), ("several", make_several(told))):
        found[case] = gradients(actor, some, plain_gradient(some), False)
        if torch.distributed.get_world_size() == 1 and arch.experts is None:  # the reference does not use mrl's code
            weights = everywhere(actor, torch.Tensor.detach)
            plain = plain_loop(model_dir, weights, some)
            assert max(compare(found[case], plain)[:2]) < 1e-5, compare(found[case], plain)  # type: ignore[type-var]
            found[case] = plain
    return found


def build(role: str, model_dir: str, mesh: Mesh, train: TrainConfig) -> Learner:
    learner = Learner(
        role,
        load_arch(model_dir),
        model_dir,
        train,
        mesh,
        dtype=torch.float32,
        seed=3,
        from_scratch=True,  # type: ignore[arg-type]
    )
    if role == "critic":
        show_all(learner)
    return learner


def show_all(critic: Learner) -> None:
    """Sets the value head to nonzero values; the initial zeros would give everything below it a zero gradient."""
    for chunk in critic.bare:
        if chunk.post_process:
            chunk.value_head.weight.data.copy_(torch.linspace(-1, 1, critic.arch.hidden_size)[None])
    critic.optimizer.reload_model_params()


def ten_steps(model_dir: str, meshes: Meshes, layout: str) -> dict[str, torch.Tensor]:
    """Returns the weights of actor and critic after ten PPO steps of two mini-batches each."""
    name, _, option = layout.partition("/")
    overlap(option)
    mesh = meshes.get(parse(name))
    cfg = RLConfig.model_validate(TEN_STEPS | {"actor": {"parallel": mesh.cfg}, "critic": {"parallel": mesh.cfg}})
    train = TrainConfig(
        parallel=mesh.cfg, max_tokens_per_microbatch=40, optimizer=OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
    )
    actor, critic = (build(role, model_dir, mesh, train) for role in ("policy", "critic"))
    run = bare_run(cfg, actor, critic)
    for step in range(10):
        rollout = make_rollout(actor.arch.vocab_size, seed=step)
        passes = forward_passes(cfg.algorithm, rollout, 1.0, actor, critic)
        experience = make_experience(cfg.algorithm, rollout, passes, 0.0)
        update(run, experience, trains_actor=True)
    return {
        f"{name}:{key}": tensor
        for name, learner in (("actor", actor), ("critic", critic))
        for key, tensor in everywhere(learner, torch.Tensor.detach).items()
    }


def compare(got: Result, want: Result) -> list[object]:
    assert set(got[1]) == set(want[1]), sorted(set(got[1]) ^ set(want[1]))[:5]
    errors = {n: float((g - want[1][n]).norm() / (want[1][n].norm() + 1e-9)) for n, g in got[1].items()}
    worst = max(errors, key=errors.__getitem__)
    return [abs(got[0] - want[0]) / (abs(want[0]) + 1e-9), errors[worst], worst]


if __name__ == "__main__":
    main()
