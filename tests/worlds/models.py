"""Run under torchrun: models built from a seed give the same log-probs, values and gradients under every layout.

Usage: models.py DENSE_DIR MOE_DIR RESULT_FILE. Rank 0 writes {check: {case: number}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from mrl.algo import log_probs  # noqa: E402
from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.core import PackedBatch, Rollout  # noqa: E402
from mrl.data.packing import pack  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.kernels.linear_logprob import linear_log_prob  # noqa: E402
from mrl.models import specs  # noqa: E402
from mrl.models.batch import ModelBatch  # noqa: E402
from mrl.models.build import build_model  # noqa: E402
from mrl.models.naming import unwrap  # noqa: E402
from mrl.parallel import Mesh, Meshes, rank  # noqa: E402
from tests.helpers.slow import RUN_SLOW, slow_cases  # noqa: E402

TEMPERATURE = 0.7
PROMPTS, LENGTHS = (3, 5, 1, 7, 2, 4), (11, 90, 2, 130, 33, 70)
ALL_BUT_LAST = tuple(n - 1 for n in LENGTHS)  # prompts after which only one token's output is needed
MICRO_BATCHES = ([0, 1, 5], [2, 3, 4])
ONE = ParallelConfig()
DENSE = {
    "tp2": ParallelConfig(tensor=2),
    "tp2 without sequence parallelism": ParallelConfig(tensor=2, sequence=False),
    "pp2": ParallelConfig(pipeline=2),
    "pp2 uneven": ParallelConfig(pipeline=2, first_stage_layers=1, last_stage_layers=3),
    "pp2 vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "cp2": ParallelConfig(context=2),
    "cp4": ParallelConfig(context=4),
    "tp2 pp2": ParallelConfig(tensor=2, pipeline=2),
    "tp2 cp2": ParallelConfig(tensor=2, context=2),
}
OF_DENSE = tuple(DENSE) if RUN_SLOW else ("pp2 uneven", "tp2 pp2", "tp2 cp2")
LEAVING = ("cp4", *slow_cases("tp2 without sequence parallelism", "cp2"))
MOE = {
    "tp2 ep2 etp2": ParallelConfig(tensor=2, expert=2, expert_tensor=2),
    "pp2 ep2 cp2": ParallelConfig(pipeline=2, expert=2, context=2),
    **dict(slow_cases(("ep2", ParallelConfig(expert=2)), ("tp2 ep2", ParallelConfig(tensor=2, expert=2)))),
}


def make_rollout(vocab: int, prompts_of: tuple[int, ...] = PROMPTS) -> Rollout:
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor(prompts_of)
    n = int((lengths - prompts).sum())
    tokens = torch.randint(3, vocab, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    return Rollout(0, tokens, lengths, prompts, torch.arange(len(LENGTHS)), torch.zeros(len(LENGTHS)), torch.zeros(n))


class Model:
    """A built model and its forward pass over the rollout, through Megatron's schedule."""

    def __init__(
        self, path: str, mesh: Mesh, role: Any = "policy", dtype: torch.dtype = torch.float32, recompute: Any = "none"
    ) -> None:
        self.mesh, self.arch = mesh, load_arch(path)
        self.rollout = make_rollout(self.arch.vocab_size)
        train = TrainConfig(parallel=mesh.cfg, recompute=recompute)
        with mesh.active():
            self.chunks = build_model(self.arch, path, train, mesh, dtype, role, seed=3)

    def batch(self, ids: list[int]) -> PackedBatch:
        return pack(self.rollout, ids, self.mesh.cp, self.mesh.cp_rank, self.mesh.cp * self.mesh.tp)

    def __call__(self, output: Any, width: int, micro_batches: Any = MICRO_BATCHES) -> torch.Tensor:
        """Returns the outputs, [width, R], the same on every rank."""
        result = torch.zeros(width, self.rollout.num_response_tokens)
        batches = [self.batch(ids) for ids in micro_batches]

        def collect(out: torch.Tensor, batch: PackedBatch, non_loss_data: bool = True) -> None:
            assert out.dtype == torch.float32 and out.shape == (width, batch.output_positions.numel())
            result[:, batch.response_indices] = out

        def step(it: Iterator[PackedBatch], model: Any) -> Any:
            b = next(it)
            made = ModelBatch.make(b, self.mesh, TEMPERATURE, output)
            return model(b.tokens, b.position_ids, None, packed_seq_params=made), partial(collect, batch=b)

        vpp = self.mesh.vpp is not None
        with self.mesh.active(), torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(batches) for _ in self.chunks] if vpp else iter(batches),
                model=self.chunks if vpp else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        dist.all_reduce(result)
        return result / (self.mesh.dp * self.mesh.tp)

    def randomise_value_head(self) -> None:
        for chunk in self.chunks:
            if hasattr(chunk, "value_head"):
                h = self.arch.hidden_size
                chunk.value_head.weight.data = torch.randn(1, h, generator=torch.Generator().manual_seed(1))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def same_for_every_layout(path: str, layouts: dict[str, ParallelConfig], meshes: Meshes) -> dict[str, float]:
    """Returns differences of log-probs and entropies, with and without gradients, and sums of squared probabilities."""

    def outputs(layout: ParallelConfig) -> torch.Tensor:
        model = Model(path, meshes.get(layout))
        return torch.cat([model("log_probs", 2), model("distribution", 4)])

    reference = outputs(ONE)
    return {name: difference(outputs(layout), reference) for name, layout in layouts.items()}


def critic(path: str, meshes: Meshes) -> dict[str, float]:
    one = Model(path, meshes.get(ONE), "critic")
    out = {"zero at first": float(one("values", 1).abs().max())}
    one.randomise_value_head()
    reference = one("values", 1)
    out["scale"] = float(reference.abs().max())
    for name in ("tp2 pp2", "tp2 cp2", *slow_cases("tp2", "pp2 vpp2")):
        model = Model(path, meshes.get(DENSE[name]), "critic")
        model.randomise_value_head()
        out[name] = difference(model("values", 1), reference)
    return out


def against_logits(path: str, meshes: Meshes) -> dict[str, float]:
    """Compares log-probs and entropies with log_softmax of the logits, and a packed batch with single samples."""
    mesh = meshes.get(ONE)
    model = Model(path, mesh)
    log_probs, entropy = model("log_probs", 2)
    distribution = model("distribution", 4)
    alone = model("log_probs", 2, [[i] for i in range(len(LENGTHS))])
    batch = model.batch(list(range(len(LENGTHS))))
    with mesh.active(), torch.no_grad():
        made = ModelBatch.make(batch, mesh, TEMPERATURE, "logits")
        logits = model.chunks[0](batch.tokens, batch.position_ids, None, packed_seq_params=made)
    wanted = (logits[:, : model.arch.vocab_size] / TEMPERATURE).log_softmax(-1)
    return {
        "log-probs": difference(log_probs[batch.response_indices], wanted.gather(1, batch.labels[:, None])[:, 0]),
        "entropy": difference(entropy[batch.response_indices], -(wanted.exp() * wanted).sum(-1)),
        "squares": difference(distribution[2][batch.response_indices], wanted.exp().square().sum(-1)),
        "likeliest": difference(distribution[3][batch.response_indices], (wanted.argmax(-1) == batch.labels).float()),
        "without gradients": difference(distribution[:2], torch.stack([log_probs, entropy])),
        "one by one": difference(torch.stack([log_probs, entropy]), alone),
    }


def large_logits(mesh: Mesh) -> dict[str, float]:
    """Returns relative errors of log-probs and entropies with the vocabulary split over two ranks. The labels and the
    largest logits are in either half, or there are equal largest logits in both."""
    logits = 100 + torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[:3, 7] = logits[3:5, 31] = 112.0
    logits[5, 3] = logits[5, 37] = 130.0
    labels = torch.tensor([7, 7, 31, 31, 31, 37])
    half = slice(20 * mesh.tp_rank, 20 * mesh.tp_rank + 20)
    found = linear_log_prob(torch.eye(6), logits[:, half].T.contiguous(), labels, 1.0, half.start, 40, mesh.tp_group)
    assert torch.equal(found[2].bool(), logits.gather(1, labels[:, None])[:, 0] == logits.amax(-1))
    wanted = log_probs.compute(logits.double(), labels)
    errors = [float(((got - want) / want).abs().max()) for got, want in zip(found[:2], wanted, strict=True)]
    return {"log-probs": errors[0], "entropies": errors[1], "highest": float(found[0].max())}


def gradients(
    path: str, mesh: Mesh, recompute: str = "none", prompts: tuple[int, ...] = PROMPTS
) -> dict[str, torch.Tensor]:
    """Returns the gradients of this rank's parameters, and the output."""
    model = Model(path, mesh, recompute=recompute)
    model.rollout = make_rollout(model.arch.vocab_size, prompts)
    batch = model.batch([0, 1, 3])
    with mesh.active():
        made = ModelBatch.make(batch, mesh, TEMPERATURE, "log_probs", entropy_grad=True)
        out = model.chunks[0](batch.tokens, batch.position_ids, None, packed_seq_params=made)
        ((out[0].sum() + 0.1 * out[1].sum()) / model.rollout.num_response_tokens).backward()
    return {name: p.grad for name, p in unwrap(model.chunks[0]).named_parameters()} | {"output": out.detach()}


def recompute(path: str, meshes: Meshes) -> dict[str, float]:
    """Compares recomputed with stored activations, also where the last layer drops unneeded tokens."""
    without = DENSE["tp2 without sequence parallelism"]
    found = {}
    for case, layout, prompts in (
        ("", DENSE["tp2"], PROMPTS),
        (" few", without, ALL_BUT_LAST),
        *slow_cases((" all", without, PROMPTS)),
    ):
        mesh = meshes.get(layout)
        stored = gradients(path, mesh, prompts=prompts)
        found |= {mode + case: apart(gradients(path, mesh, mode, prompts), stored) for mode in ("selective", "full")}
    return found


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((difference(a[name], b[name]) for name in b if b[name].numel()), default=0.0)


def leaving(path: str, meshes: Meshes) -> dict[str, float]:
    """Compares outputs and gradients of models whose last layer drops tokens with those of models that drop none.

    Returns the largest difference on any rank and the largest value. With context parallelism a rank may have no token
    whose output is needed.
    """
    found = {"largest": 0.0}
    for name, layout in {"one": ONE, **{name: DENSE[name] for name in LEAVING}}.items():
        for kind, prompts in (("few", ALL_BUT_LAST), ("all", PROMPTS)):
            made = gradients(path, meshes.get(layout), prompts=prompts)
            with patch.object(specs, "_can_leave_tokens", lambda *args, **kwargs: False):
                plain = gradients(path, meshes.get(layout), prompts=prompts)
            found[f"{name} {kind}"] = apart(made, plain)
            found["largest"] = max(found["largest"], apart(plain, {k: torch.zeros_like(v) for k, v in plain.items()}))
    of_all = torch.tensor([*found.values()])
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return dict(zip(found, of_all.tolist(), strict=True))


def bfloat16(path: str, meshes: Meshes) -> dict[str, float]:
    reference = Model(path, meshes.get(ONE))("log_probs", 2)
    one = Model(path, meshes.get(ONE), dtype=torch.bfloat16)("log_probs", 2)
    split = Model(path, meshes.get(DENSE["tp2 pp2"]), dtype=torch.bfloat16)("log_probs", 2)
    return {"one": float((one - reference).abs().mean()), "tp2 pp2": float((split - reference).abs().mean())}


def main(dense: str, moe: str, result: str) -> None:
    platform.init_process_group(300)
    meshes = Meshes(300)
    results = {
        "dense": same_for_every_layout(dense, {name: DENSE[name] for name in OF_DENSE}, meshes),
        "moe": same_for_every_layout(moe, MOE, meshes),
        "critic": critic(dense, meshes),
        "logits": against_logits(dense, meshes),
        "large logits": large_logits(meshes.get(DENSE["tp2"])),
        "recompute": recompute(dense, meshes),
        "leaving": leaving(dense, meshes),
        "bfloat16": bfloat16(dense, meshes),
    }
    if rank() == 0:
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
