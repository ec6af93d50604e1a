"""Run under torchrun: LoRA adapters under many layouts. Prints one JSON object per case: {"case": ..., ...}.

Usage: lora.py WORK_DIR DENSE_MODEL MOE_MODEL CASE [CASE ...]. A case is `KIND LAYOUT` or `KIND=MODEL LAYOUT`. KIND is
dense, moe, experts, heads, dora, delta, dropout, critic or last (adapters in the last of four layers alone). LAYOUT is
like tp2.pp2 or tp2.pp2/full (with activation recomputation). The layout `one` writes gradients, log-probs and the
adapters after three updates; other layouts are compared with those. The case `together`, in a world of 4, checks merged
weights, the model without its adapters, memory and files.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_tools import error, report, same_everywhere, save, stored_difference
from gradients import make_rollout, parse

from mrl import checkpoint, platform
from mrl.config.schema import LoRAConfig, OptimizerConfig, ParallelConfig, TrainConfig, ValueLossConfig
from mrl.families import load_arch
from mrl.families.adapters import adapter_table
from mrl.learner import Learner, losses
from mrl.models.lora import Adapters
from mrl.parallel import Meshes, world_size
from mrl.trainers.shared.references import ActorWithoutAdapters
from mrl.weights.model.export import Exporter
from mrl.weights.model.names import named_parameters, trained_parameters
from mrl.weights.model.save_adapter import save_adapter
from tests.helpers.slow import slow_cases

Tensors = dict[str, torch.Tensor]
SOME = ("q_proj", "v_proj", "self_attn.o_proj", "down_proj")
SPECS = {
    "dense": LoRAConfig(rank=4, alpha=8),
    "moe": LoRAConfig(rank=4, alpha=8),
    "experts": LoRAConfig(rank=4, alpha=8, targets=("gate_proj", "up_proj", "down_proj")),
    "heads": LoRAConfig(rank=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    "dropout": LoRAConfig(rank=4, alpha=8, dropout=0.3),
    "dora": LoRAConfig(rank=3, alpha=4, targets=SOME, rslora=True, dora=True),
    "delta": LoRAConfig(rank=3, alpha=4, targets=("in_proj_qkv", "in_proj_b", "q_proj", "out_proj"), dora=True),
    "critic": LoRAConfig(rank=4, alpha=8),
    "last": LoRAConfig(rank=4, alpha=8, targets=("layers.3.self_attn.q_proj", "layers.3.mlp.down_proj")),
}


def build(
    model: str,
    kind: str,
    meshes: Meshes,
    layout: str,
    seed: int = 3,
    lr: float = 1e-2,
    base: Learner | None = None,
) -> Learner:
    """Builds a learner whose matrices B are not zero."""
    name, _, recompute = layout.partition("/")
    mesh = meshes.get(parse(name))
    train = TrainConfig(
        parallel=mesh.cfg,
        optimizer=OptimizerConfig(lr=lr),
        max_tokens_per_microbatch=40,
        recompute=recompute or "none",  # type: ignore[arg-type]
        lora=SPECS[kind],
    )
    role = "critic" if kind == "critic" else "policy"
    arch = load_arch(model)
    learner = Learner(role, arch, model, train, mesh, dtype=torch.float32, seed=seed, base=base)  # type: ignore[arg-type]
    randomise(learner)
    return learner


def spec_of(learner: Learner) -> Any:
    assert learner.adapters is not None
    return learner.adapters.spec


@torch.no_grad()
def randomise(learner: Learner) -> None:
    """Sets all parameters that are zero initially to the same random values under every layout."""
    table = adapter_table(learner.arch, learner.role, spec_of(learner))
    for name, parameter in trained_parameters(learner.bare):
        if name.endswith(".A") or name.endswith("magnitude"):
            continue
        row = table[name]
        stream = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
        whole = 0.1 * torch.randn(row.shapes[0], generator=stream)
        tp, tp_rank = learner.mesh.tensor_cut(row.expert)
        parameter.copy_(whole if row.tp_dim is None else whole.chunk(tp, row.tp_dim)[tp_rank])
    learner.optimizer.reload_model_params()


def whole(learner: Learner, read: Callable[[torch.nn.Parameter], torch.Tensor] | None = None) -> Tensors:
    """Returns `read` of all trained parameters under PEFT's names; without `read`, the merged weights."""
    with learner.active():
        exporter = learner.exporter
        if read is not None:
            exporter = Exporter(learner.bare, learner.arch, learner.mesh, lora=spec_of(learner), read=read)
        mine = {name: tensor.clone() for name, tensor in exporter.stream()}
    boxes: list[Tensors] = [{} for _ in range(world_size())]
    torch.distributed.all_gather_object(boxes, mine)
    return {name: tensor for box in boxes for name, tensor in box.items()}


def update(learner: Learner, number: int = 0) -> float:
    rollout = make_rollout(learner.arch.vocab_size, number)
    n = rollout.num_response_tokens
    weights = torch.full((n,), 1 / n)
    noise = torch.randn(n, generator=torch.Generator().manual_seed(number))
    value = losses.value(ValueLossConfig(), torch.zeros(n), noise, weights, weights)
    loss = losses.cross_entropy(weights, seed=number) if learner.role == "policy" else value
    return learner.backward(rollout, range(rollout.num_samples), loss, 1.0, full_gradients=True)["loss"]


def measured(learner: Learner) -> dict[str, Any]:
    rollout = make_rollout(learner.arch.vocab_size)
    out = learner.values(rollout) if learner.role == "critic" else learner.log_probs(rollout, 1.0)[0]
    loss = update(learner)
    gradients = whole(learner, lambda p: p.main_grad)
    norm = learner.step()["grad_norm"]
    for number in (1, 2):
        update(learner, number)
        learner.step()
    after = whole(learner, torch.Tensor.detach)
    return {"out": out, "loss": torch.tensor(loss), "norm": torch.tensor(norm), "gradients": gradients, "after": after}


def layouts(meshes: Meshes, work: Path, model: str, case: str, kind: str, layout: str) -> None:
    got = measured(build(model, kind, meshes, layout))
    file = work / f"{kind}_{Path(model).name}.pt"
    if layout == "one":
        torch.save(got, file)
        return
    want = torch.load(file)
    gaps = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in ("out", "loss", "norm")}
    gradients, after = (error(got[name], want[name]) for name in ("gradients", "after"))
    report(case, **gaps, gradients=gradients, after=after, smallest=smallest(got["gradients"]))


def smallest(gradients: Tensors) -> float:
    return min(float(gradient.norm()) for gradient in gradients.values())


def together(meshes: Meshes, work: Path, dense: str) -> None:
    merged(meshes, work, dense, "dense", "tp2.pp2")
    merged(meshes, work, dense, "dora", "tp2.cp2")
    files(meshes, work, dense)
    for layout in ("tp2.pp2", "tp2.dp2", *slow_cases("pp2.vpp2.dp2", "tp2.cp2/full")):
        shared(meshes, work, dense, layout)
    for kind in ("dora", *slow_cases("last")):
        resumed(meshes, work, dense, kind)


def merged(meshes: Meshes, work: Path, model: str, kind: str, layout: str) -> None:
    """Compares the adapted model with a model of the merged weights, and its base with the model without adapters."""
    learner = build(model, kind, meshes, layout)
    plain = TrainConfig(parallel=parse(layout), max_tokens_per_microbatch=40)
    arch, rollout = learner.arch, make_rollout(learner.arch.vocab_size)
    alone = Learner("policy", arch, model, plain, learner.mesh, dtype=torch.float32, seed=1, trainable=False)
    before = {name: p.detach().clone() for name, p in named_parameters(learner.bare)}
    with_adapters = learner.log_probs(rollout, 1.0)[0]
    whole(learner)
    untouched = all(torch.equal(before[name], p) for name, p in named_parameters(learner.bare))
    off = ActorWithoutAdapters(learner).log_probs(rollout, 1.0)[0]
    base = alone.log_probs(rollout, 1.0)[0]
    again = learner.log_probs(rollout, 1.0)[0]
    with torch.no_grad():
        for name, parameter in named_parameters(alone.bare):
            parameter.copy_(dict(merged_parameters(learner))[name])
    gap = float((alone.log_probs(rollout, 1.0)[0] - with_adapters).abs().max())
    buffers = sum(buffer.numel for chunk in learner.chunks for buffer in chunk.buffers)
    report(
        f"merged {kind}",
        gap=gap,
        moved=float((with_adapters - base).abs().max()),
        off_is_base=torch.equal(off, base),
        on_again=torch.equal(again, with_adapters),
        untouched=untouched,
        buffer=buffers,
        parameters=sum(p.numel() for chunk in learner.bare for p in chunk.parameters()),
        trained=sum(p.numel() for _, p in trained_parameters(learner.bare)),
    )


def shared(meshes: Meshes, work: Path, model: str, layout: str) -> None:
    """Trains two learners of one base in turn, saves them after two updates and loads them into two others. Compares
    each with its training alone."""

    def train(learners: list[Learner], numbers: range) -> None:
        for number in numbers:
            for place, learner in enumerate(learners):
                update(learner, 10 * place + number)
                learner.step()

    def pair(seed: int) -> list[Learner]:
        base = build(model, "dense", meshes, layout, seed)
        return [base, build(model, "dora", meshes, layout, seed, base=base)]

    alone = [build(model, kind, meshes, layout) for kind in ("dense", "dora")]
    both, rollout = pair(3), make_rollout(alone[0].arch.vocab_size)
    train(alone, range(2))
    train(both, range(2))
    named = {f"adapters/{place}": learner for place, learner in enumerate(both)}
    path = save(work / f"shared_{layout.replace('/', '_')}", 2, named, {}, keep_last=1)
    loaded = pair(99)
    checkpoint.load(path, dict(zip(named, loaded, strict=True)))
    found = {}
    for name, learners in (("both", both), ("loaded", loaded)):
        train(learners, range(2, 4))
        found[name] = [whole(learner, torch.Tensor.detach) for learner in learners]
    train(alone, range(2, 4))
    want = [whole(learner, torch.Tensor.detach) for learner in alone]
    outs = [learner.log_probs(rollout, 1.0)[0] for learner in (*both, *alone)]
    base = [ActorWithoutAdapters(learner).log_probs(rollout, 1.0)[0] for learner in both]
    report(
        f"shared {layout}",
        is_one_model=both[0].bare is both[1].bare,
        same={name: [equal(*each) for each in zip(got, want, strict=True)] for name, got in found.items()},
        same_outputs=[torch.equal(outs[place], outs[2 + place]) for place in range(2)],
        same_base=torch.equal(*base),
        apart=float((outs[0] - outs[1]).abs().max()),
    )


def equal(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def merged_parameters(learner: Learner) -> list[tuple[str, torch.Tensor]]:
    adapters = learner.adapters
    assert isinstance(adapters, Adapters)
    return [(name, adapters.merged(parameter)) for name, parameter in named_parameters(learner.bare)]


def write(file: Path, tensors: Tensors) -> None:
    if torch.distributed.get_rank() == 0:
        torch.save(tensors, file)


def files(meshes: Meshes, work: Path, model: str) -> None:
    """Writes the files that PEFT reads, and the log-probs that it must compute."""
    last = slow_cases(("last", "tp2.pp2"))
    for kind, layout in (("dense", "tp2.pp2"), ("dora", "tp2.dp2"), ("critic", "pp2.dp2"), *last):
        learner = build(model, kind, meshes, layout)
        adapters = learner.adapters
        assert adapters is not None
        of = learner.bare, learner.arch, learner.mesh, adapters.spec
        save_adapter(*of, work / f"peft_{kind}", base_name="tiny", base_digest=adapters.base)
        rollout = make_rollout(learner.arch.vocab_size)
        out = learner.values(rollout) if kind == "critic" else learner.log_probs(rollout, 1.0)[0]
        seen = {"tokens": rollout.tokens, "lens": rollout.seq_lens, "prompts": rollout.prompt_lens}
        write(work / f"peft_{kind}.pt", {"out": out, "weights": whole(learner), **seen})


def resumed(meshes: Meshes, work: Path, model: str, kind: str) -> None:
    """Saves under one layout after two updates, and resumes under it and another."""
    first = build(model, kind, meshes, "tp2.pp2")

    def train(learner: Learner, numbers: range) -> None:
        for number in numbers:
            update(learner, number)
            learner.step()

    train(first, range(2))
    path = save(work / f"saved_{kind}", 2, {"actor": first}, {"step": 2}, keep_last=1)
    at_save = whole(first, torch.Tensor.detach)
    write(work / f"at_save_{kind}.pt", at_save)
    train(first, range(2, 4))
    at_end = whole(first, torch.Tensor.detach)
    size = sum(file.stat().st_size for file in (path / "actor").glob("*.distcp"))
    for layout in ("tp2.pp2", "pp2.vpp2"):
        fresh = build(model, kind, meshes, layout, seed=99)
        checkpoint.load(path, {"actor": fresh})
        again = save(work / f"saved_{kind}_{layout}", 2, {"actor": fresh}, {}, keep_last=1)
        loaded = error(whole(fresh, torch.Tensor.detach), at_save)
        stored = stored_difference(path, again, fresh.arch.vocab_size)
        train(fresh, range(2, 4))
        continued = error(whole(fresh, torch.Tensor.detach), at_end)
        report(f"resumed {kind} {layout}", loaded=loaded, stored=stored, continued=continued, size=size)
    other = build(model, kind, meshes, "dp4")
    assert other.adapters is not None
    other.adapters.base = "0" * 64
    refused = same_everywhere(lambda: checkpoint.load(path, {"actor": other}))
    plain = TrainConfig(parallel=ParallelConfig(), max_tokens_per_microbatch=40)
    full = Learner("policy", other.arch, model, plain, meshes.get(plain.parallel), dtype=torch.float32, seed=1)
    report(f"refused {kind}", base=refused, full=same_everywhere(lambda: checkpoint.load(path, {"actor": full})))


def main() -> None:
    work, dense, moe, *cases = sys.argv[1:]
    platform.init_process_group(300)
    meshes = Meshes(300)
    for case in cases:
        if case == "together":
            together(meshes, Path(work), dense)
            continue
        named, _, layout = case.partition(" ")
        kind, _, model = named.partition("=")
        layouts(meshes, Path(work), model or (moe if kind in ("moe", "experts") else dense), case, kind, layout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
