"""Speed of kernels, updates and export, next to limits measured in the same process: matrix products and copies."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from mrl import platform

platform.install()

from mrl.algo import aggregate  # noqa: E402
from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Meshes  # noqa: E402
from mrl.weights.sync.payload import Bucket, plan_buckets  # noqa: E402
from mrl.weights.sync.transports import Deadline, Engines, SenderLocation, Transport  # noqa: E402
from mrl.weights.sync.transports.base import double_buffer, largest_bucket_bytes  # noqa: E402
from mrl.weights.sync.weight_sync import BucketFiller  # noqa: E402
from tools.gpu.kernel_checks import head, head_by_torch, token_kernels  # noqa: E402
from tools.gpu.stage import ROOT, Check, Numbers, Setting  # noqa: E402
from tools.gpu.timing import DTYPE, ROUNDS, copied_bytes_per_s, gemm_flops_per_s, rounds_of, seconds  # noqa: E402

BUCKET_BYTES = 512 << 20
PUSH_S = 600.0
MODELS = ROOT / "yaml_configs" / "models"


def limits(setting: Setting) -> Numbers:
    numbers = {"GEMM TFLOP/s": gemm_flops_per_s(setting) / 1e12, "copy GB/s": copied_bytes_per_s(setting) / 1e9}
    if platform.gpu_count():
        host = torch.zeros(1 << 28, dtype=torch.uint8, pin_memory=True)
        on_device = host.to(platform.device())
        numbers["from pinned host memory GB/s"] = host.nbytes / seconds(lambda: on_device.copy_(host), ROUNDS) / 1e9
        numbers["to pinned host memory GB/s"] = host.nbytes / seconds(lambda: host.copy_(on_device), ROUNDS) / 1e9
    return numbers


def learner_of(model: Path, train: TrainConfig) -> Learner:
    """Returns a policy with random weights and the sizes in a directory's config.json."""
    if not torch.distributed.is_initialized():
        platform.init_process_group(120.0)
        atexit.register(torch.distributed.destroy_process_group)
    mesh = Meshes(120.0).get(ParallelConfig())
    return Learner("policy", load_arch(str(model)), str(model), train, mesh, dtype=DTYPE, seed=1, from_scratch=True)


@cache
def learner(layers: str, rehearsal: bool) -> Learner:
    """Returns a policy with Qwen3-0.6B's sizes; in a rehearsal, with sort-20m's."""
    train = TrainConfig(layers=layers, max_tokens_per_microbatch=16384)  # type: ignore[arg-type]
    return learner_of(MODELS / ("sort-20m" if rehearsal else "Qwen3-0.6B"), train)


def update_numbers(actor: Learner, count: int, length: int, rounds: int) -> Numbers:
    """Times an update over `count` sequences of `length` tokens, of which half are response tokens."""
    rollout = rollout_of(count, length, actor.arch.vocab_size)
    loss = losses.cross_entropy(rollout.flat(aggregate.token_weights("token-mean", rollout.response_mask)))

    def work() -> None:
        actor.backward(rollout, range(count), loss, 1.0)
        actor.step()

    busy = platform.busy_seconds()
    spent = seconds(work, rounds)
    busy = (platform.busy_seconds() - busy) / (rounds + 1)  # the warm-up round included
    return {"tokens": count * length, "s": spent, "passes s": busy, "tokens/s": count * length / spent}


def update(layers: str) -> Check:
    """Returns a check that times an update over 16,384 tokens."""

    def check(setting: Setting) -> Numbers:
        actor = learner(layers, setting.rehearsal)
        platform.reset_peak_memory()
        numbers = update_numbers(actor, *((2, 16) if setting.rehearsal else (16, 1024)), rounds_of(setting))
        parameters = sum(p.numel() for chunk in actor.bare for p in chunk.parameters())
        flops = 6.0 * parameters * numbers["tokens/s"]
        numbers |= {"layers": actor.bare[0].config.transformer_impl, "TFLOP/s by 6 N": flops / 1e12}
        numbers |= {"of the GEMM rate": flops / gemm_flops_per_s(setting)}
        return numbers | {"peak GB": platform.peak_memory_bytes() / 1e9}

    return check


def rollout_of(count: int, length: int, vocabulary: int) -> Rollout:
    return Rollout(
        step=0,
        tokens=torch.randint(vocabulary, (count * length,)),
        seq_lens=torch.full((count,), length),
        prompt_lens=torch.full((count,), length // 2),
        group=torch.arange(count),
        scores=torch.zeros(count),
        rollout_log_probs=torch.zeros(count * (length - length // 2)),
    )


class _Discard(Transport):
    """A transport that discards its buckets."""

    name = "discard"

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        def allocate() -> torch.Tensor:
            return torch.empty(largest_bucket_bytes(buckets), dtype=torch.uint8, device=platform.device())

        self._flats = double_buffer(allocate, buckets)

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return next(self._flats)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        pass


def sync(setting: Setting) -> Numbers:
    """Times the trainer's side of a weight sync: export under Hugging Face names into buckets; nothing is sent."""
    actor = learner("local", setting.rehearsal)
    metas = actor.exporter.metas()
    buckets = plan_buckets(metas, BUCKET_BYTES)
    transport = _Discard(Engines((), 1, Deadline(PUSH_S)), SenderLocation(0, platform.device(), None))
    transport.prepare(buckets)

    def work() -> None:
        filler = BucketFiller(transport, buckets, None)
        for name, tensor in actor.exporter.stream():
            filler.add(name, tensor)
        filler.delivered()
        filler.check_done()

    nbytes = sum(bucket.nbytes for bucket in buckets)
    rate = nbytes / seconds(work, rounds_of(setting))
    return {"GB": nbytes / 1e9, "GB/s": rate / 1e9, "of a copy": rate / copied_bytes_per_s(setting)}


CHECKS: dict[str, Check] = {
    "limits": limits,
    "head, forward and backward": head,
    "head in the torch form": head_by_torch,
    "advantages and loss of 8M tokens": token_kernels,
    "update of a 0.6B model, local layers": update("local"),
    "trainer's side of a push": sync,
    "update of a 0.6B model, the machine's layers": update("auto"),
}
