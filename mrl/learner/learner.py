"""One model under one layout: forward, loss, backward and optimizer step through Megatron's schedules.

Per-token results are flat [k, R] tensors, equal on every rank (see mrl.core.Rollout).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mrl import platform
from mrl.config.schema import TrainConfig
from mrl.core import PackedBatch, Rollout
from mrl.data.packing import require_ids
from mrl.families import ModelArch
from mrl.families.flops import BACKWARD, BACKWARD_OF_FROZEN
from mrl.families.table import Role
from mrl.learner.flop_counter import FlopCounter
from mrl.learner.loss_terms import Loss, LossParts, LossTerm
from mrl.learner.memory import LearnerMemory
from mrl.learner.micro_batches import MicroBatch, MicroBatchPlanner
from mrl.learner.muon import Muon
from mrl.learner.optimizer import (
    apply_update,
    build_optimizer,
    grad_norm,
    has_finite_gradients,
    main_parameters,
    sums_overlap,
    wrap_ddp,
)
from mrl.learner.output_accumulator import OutputAccumulator
from mrl.learner.replay import RoutingReplay
from mrl.models.batch import Images, ModelBatch, Output, on_device
from mrl.models.build import build_model
from mrl.models.fp8_layers import end_of_update, without_amax_history
from mrl.models.fp8_params import values_of
from mrl.models.lora import Adapters, attach
from mrl.models.naming import unwrap
from mrl.parallel import Mesh, communication
from mrl.weights.disk.base_digest import base_digest
from mrl.weights.model.export import Exporter
from mrl.weights.model.load import load_pretrained

PixelsOf = Callable[[Tensor], Tensor]


class Learner:
    """Actor, critic or reference model. Construction and every method are collective over the world.

    `pixels` maps a rollout's images [k, 5], as in `PackedBatch.images`, to [patches, patch values] float32; ranks of
    the first stage call it for each micro-batch.

    trains_vision: the vision tower is trained too; a frozen tower is not in the optimizer
    replays: passes use the expert routing that a rollout carries, and `replay` records routing
    `trainable=False` builds no gradient buffers and no optimizer (the reference). With `train.lora` the base model is
    frozen and `adapters` are trained; `exporter` gives the merged weights.
    base: another learner with adapters, whose frozen model this one's adapters share; nothing is built or loaded
    """

    def __init__(
        self,
        role: Role,
        arch: ModelArch,
        hf_path: str,
        train: TrainConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        seed: int,
        from_scratch: bool = False,
        allow_pickle: bool = False,
        trainable: bool = True,
        trains_vision: bool = False,
        replays: bool = False,
        base: Learner | None = None,
    ) -> None:
        self.role, self.arch, self.train, self.mesh, self.trainable = role, arch, train, mesh, trainable
        # with CP, images or replayed routing a token depends on more than its prefix, so prefixes cannot be shared;
        # gated delta nets take whole sequences
        shares = mesh.cp == 1 and arch.vision is None and arch.delta is None and not replays
        self.planner = MicroBatchPlanner(mesh, train, arch, role, shares=shares)
        self.pixels: PixelsOf | None = None
        with mesh.active():
            self.bare: list[MegatronModule]
            self.replay: RoutingReplay | None
            if base is not None:
                self.bare, self.replay = base.bare, base.replay
            else:
                self.bare = build_model(
                    arch,
                    hf_path,
                    train,
                    mesh,
                    dtype,
                    role,
                    seed if from_scratch else None,
                    trains_vision=trains_vision and trainable,
                )
                if not from_scratch:
                    load_pretrained(self.bare, arch, hf_path, mesh, role=role, allow_pickle=allow_pickle)
                self.replay = RoutingReplay(self.bare, arch, mesh) if replays else None
            others = base.adapters if base is not None else None
            self.adapters: Adapters | None = None
            if trainable and train.lora:
                self.adapters = attach(self.bare, arch, mesh, train, seed, others)
                if not from_scratch:
                    self.adapters.base = others.base if others is not None else base_digest(hf_path, allow_pickle)
            self.chunks: list[Any] = list(self.bare)
            if trainable:
                self.chunks = list(wrap_ddp(self.bare, overlap=sums_overlap(mesh) and not trains_vision))
                self.optimizer, self.schedule = build_optimizer(train.optimizer, self.chunks, dtype)
                if train.optimizer.muon is not None:
                    Muon(train.optimizer.muon, self.optimizer, self.bare, arch, role, mesh)
                self.bare[0].config.finalize_model_grads_func = finalize_model_grads
                self._no_sync = self.bare[0].config.no_sync_func
            self.exporter = Exporter(self.bare, arch, mesh, read=self.adapters.merged if self.adapters else values_of)
        parameters = [parameter for chunk in self.bare for parameter in chunk.parameters()]
        optimizer = self.optimizer if trainable else None
        self.memory = LearnerMemory(role, train.offload, parameters, self.chunks, optimizer)
        self.flop_counter = FlopCounter(arch, role, trains_tower=trains_vision and trainable)
        self.last_outputs = OutputAccumulator(mesh)
        self._finite = True  # its loss and every rank's gradients

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context of everything that uses the model: its mesh and, where several share it, its own adapters."""
        with self.mesh.active():
            if self.adapters is not None:
                self.adapters.activate()
                self.bare[0].config.no_sync_func = self._no_sync
            yield

    def log_probs(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns the response tokens' log-probs under softmax(logits / temperature) and the entropies: [R], [R]."""
        out = self._forward(rollout, "log_probs", 2, temperature)
        return out[0], out[1]

    def distribution(self, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `log_probs` and the sums over the vocabulary of the squared probabilities: [R], [R], [R]."""
        out = self._forward(rollout, "distribution", 4, temperature)
        return out[0], out[1], out[2]

    def lm_head_quantization_error(self, rollout: Rollout, temperature: float) -> Tensor:
        """Returns the lm_head quantization error [R]: log-probs as in the losses minus those of a head in model.dtype
        on the same hidden states. 0 if the head is not in fp8.
        """
        return self._forward(rollout, "lm_head_quantization_error", 1, temperature)[0]

    def predictions(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Returns the response tokens' log-probs at temperature 1, and a bool mask of argmax tokens: [R], [R].

        Uncounted tokens have 0 and False.
        """
        out = self._forward(rollout, "distribution", 4, 1.0)
        return out[0], out[3] > 0

    def values(self, rollout: Rollout) -> Tensor:
        """Returns the critic's value before each response token: [R]."""
        return self.scores(rollout)[0]

    def scores(self, rollout: Rollout) -> Tensor:
        """Returns the score of each head of a critic or reward model before each response token: [heads, R]."""
        return self._forward(rollout, "values", self.arch.score_heads, 1.0)

    @torch.no_grad()
    def _forward(self, rollout: Rollout, output: Output, channels: int, temperature: float) -> Tensor:
        samples = range(rollout.num_samples)
        packed = self.planner.micro_batches(rollout, samples)
        result = torch.zeros(channels, rollout.num_response_tokens, device=platform.device())

        def collect(values: Tensor, batch: MicroBatch, non_loss_data: bool = True) -> None:
            if self.mesh.tp_rank == 0:
                result[:, batch.packed.response_indices] = values

        self._collect(rollout, samples, packed, output, temperature, collect)
        dist.all_reduce(result)
        return result.cpu()

    @torch.no_grad()
    def hidden_states(
        self, rollout: Rollout, samples: Sequence[int], packed: list[PackedBatch]
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns `TeacherStates.states` in host memory; empty without the head's stage.

        packed: a student's micro-batches, with these samples alone. The layouts must have the same tensor, pipeline and
        context parallelism: hidden states then stay on the rank that needs them.
        """
        require_ids(rollout, self.arch.vocab_size)
        found: list[tuple[Tensor, Tensor]] = []

        def collect(values: Tensor, batch: MicroBatch, non_loss_data: bool = True) -> None:
            found.append((batch.packed.response_indices.cpu(), values.cpu()))

        self._collect(rollout, samples, packed, "hidden_states", 1.0, collect)
        return found

    def head_for(self, student: Learner) -> Tensor | None:
        """Returns this rank's part of the lm_head, sharded as the student's, which may outlive the offloading of the
        parameters; None without the head's stage. Collective.
        """
        if not self.bare[-1].post_process:
            return None
        weight: Tensor = self.bare[-1].output_weight().detach()
        rows = student.bare[-1].output_weight().size(0)
        if weight.size(0) == rows:
            return weight.clone() if self.memory.offload == "all" else weight
        whole = weight.new_empty(self.mesh.tp * weight.size(0), weight.size(1))
        dist.all_gather_into_tensor(whole, weight.contiguous(), group=self.mesh.tp_group)
        part = whole[self.mesh.tp_rank * rows :][:rows]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - part.size(0)))

    def _collect(
        self,
        rollout: Rollout,
        samples: Sequence[int],
        packed: list[PackedBatch],
        output: Output,
        temperature: float,
        collect: Callable[..., None],
    ) -> None:
        """Runs forward passes; `collect` gets the output of each micro-batch."""
        self.memory.require("parameters", f"computing {output}")
        self.flop_counter.add(rollout, samples, passes=1)
        batches = [MicroBatch(batch, temperature) for batch in packed]
        with without_amax_history(self.bare):
            self._schedule(batches, [rollout], output, collect, forward_only=True, collect_non_loss_data=True)

    def backward(
        self,
        rollout: Rollout,
        sample_ids: range | list[int],
        loss: Loss,
        temperature: float,
        *,
        entropy_grad: bool = False,
        full_gradients: bool = False,
        also: Sequence[LossTerm] = (),
    ) -> dict[str, float]:
        """Computes gradients of the summed loss over `sample_ids`; returns its metrics and "loss", the same on every
        rank.

        also: further losses of the same update, with distinct metric names; "loss" is the sum of all

        The per-token weights inside `loss` hold the global denominator, so the gradient does not depend on the split
        over micro-batches, DP, CP or PP. Megatron multiplies by CP, divides by the number of micro-batches, and its DDP
        divides by DP x CP: the factor below undoes that. `full_gradients` leaves the whole reduced gradient on every
        data-parallel rank instead of its shard.
        """
        self.memory.require("all", "a backward pass")
        terms = (LossTerm(rollout, sample_ids, loss, temperature, entropy_grad), *also)
        batches = [
            MicroBatch(packed, term.temperature, term.entropy_grad, which, term.loss.extras, term.loss, number=number)
            for which, term in enumerate(terms)
            for number, packed in enumerate(
                self.planner.micro_batches(term.rollout, term.sample_ids, term.loss.together, term.loss.extras)
            )
        ]
        passes = 1 + (BACKWARD if self.adapters is None else BACKWARD_OF_FROZEN)
        for term in terms:
            self.flop_counter.add(term.rollout, term.sample_ids, passes)
        scale = len(batches) * self.mesh.dp
        parts: list[list[LossParts]] = [[] for _ in terms]
        self.last_outputs.begin()

        def compute(values: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            dest = batch.packed.response_indices
            if batch.term == 0:
                self.last_outputs.add(values, dest)
            part = terms[batch.term].loss.compute(values, dest)
            parts[batch.term].append(LossParts(part.loss.detach().clone(), part.sums))
            return part.loss * scale, {}

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = full_gradients  # for buckets that are reduced before the end of the pass
        self.optimizer.zero_grad()
        output: Output = "log_probs" if self.role == "policy" else "values"
        rollouts = [term.rollout for term in terms]
        self._schedule(batches, rollouts, output, compute, forward_only=False, force_all_reduce=full_gradients)
        return self._reduce_metrics([(term.loss, made) for term, made in zip(terms, parts, strict=True)])

    def step(self) -> dict[str, float]:
        """Applies one optimizer update from the accumulated gradients; returns grad_norm, lr and skipped (0 or 1).

        If the loss or a gradient is not finite on any rank, all ranks skip the update: weights, optimizer and schedule
        stay unchanged bit for bit.
        """
        self.memory.require("all", "an update")
        with self.active():
            norm = grad_norm(self.optimizer)
            good = self._finite and math.isfinite(norm)
            if good:
                self.schedule.step(1)
                apply_update(self.optimizer, norm)
            end_of_update(self.bare, is_kept=good)
        lr = float(self.optimizer.param_groups[0]["lr"])
        return {"grad_norm": norm, "lr": lr, "skipped": float(not good)}

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of the last `backward` by a factor; non-finite gradients stay non-finite."""
        self.memory.require("all", "an update")
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def main_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields `main_parameters` from where they are stored: host memory while they are offloaded."""
        for parameter, main in main_parameters(self.optimizer):
            yield parameter, self.memory.read(main)

    def total_over_context(self, partial: Tensor) -> Tensor:
        """Sums a tensor of any shape, in place, over the context-parallel ranks, which hold parts of the same
        sequences.
        """
        if self.mesh.cp > 1:
            dist.all_reduce(partial, group=self.mesh.cp_group)
        return partial

    def _schedule(
        self,
        batches: list[MicroBatch],
        rollouts: Sequence[Rollout],
        output: Output,
        on_output: Callable[..., Any],
        **megatron_args: Any,
    ) -> None:
        def forward_step(it: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(it)
            routing = self.replay.routing(batch, rollouts[batch.term]) if self.replay is not None else None
            batch = replace(batch, packed=on_device(batch.packed))
            distillation = batch.loss.distillation if batch.loss is not None and unwrap(model).post_process else None
            made = ModelBatch.make(
                batch.packed,
                self.mesh,
                batch.temperature,
                output,
                batch.entropy_grad,
                batch.extras,
                batch.loss_gradients,
                self._images(batch.packed) if unwrap(model).pre_process else None,
                routing,
                distillation.of(batch.number, batch.packed) if distillation is not None else None,
            )
            out = model(batch.packed.tokens, batch.packed.position_ids, None, packed_seq_params=made)
            return out, partial(on_output, batch=batch)

        if self.replay is not None:
            batches = self.replay.begin(batches, rollouts)
        lengths = [batch.packed.tokens.size(1) for batch in batches]
        with self.active():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in self.chunks] if self.mesh.vpp else iter(batches),
                model=self.chunks if self.mesh.vpp else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=1,  # ignored (variable_seq_lengths): each micro-batch has its own length
                micro_batch_size=1,
                **communication(self.mesh, self.bare[0].config, lengths),
                **megatron_args,
            )
        if self.replay is not None:
            self.replay.end()

    def _images(self, packed: PackedBatch) -> Images | None:
        if not len(packed.images):
            return None
        if self.pixels is None:
            raise ValueError(f"the {self.role} received prompts with images, but no image store to read them from")
        return Images.make(packed, self.pixels(packed.images))

    def _reduce_metrics(self, terms: list[tuple[Loss, list[LossParts]]]) -> dict[str, float]:
        """Sums metrics over the mini-batch, each token counted by exactly one rank, and records whether everything
        is finite.
        """
        names = ["loss", *(name for loss, _ in terms for name in loss.sums)]
        sums = torch.zeros(1 + len(names), dtype=torch.float64, device=platform.device())
        sums[0] = ~has_finite_gradients(self.chunks)
        if self.mesh.tp_rank == 0:
            first = 2
            for loss, parts in terms:
                end = first + len(loss.sums)
                for part in parts:
                    sums[1] += part.loss
                    if part.sums:
                        sums[first:end] += torch.stack(part.sums).double()
                first = end
        dist.all_reduce(sums)
        broken_ranks, *values = sums.tolist()
        metrics = dict(zip(names, values, strict=True))
        self._finite = broken_ranks == 0 and math.isfinite(metrics["loss"])
        return metrics
