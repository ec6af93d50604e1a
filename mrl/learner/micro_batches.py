"""How samples are split over ranks and micro-batches: by tokens, the same number of micro-batches on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.config.fp8_shapes import token_unit
from mrl.config.schema import TrainConfig
from mrl.core import PackedBatch, Rollout
from mrl.data.balance import costs_of, plan_micro_batches
from mrl.data.packing import pack, require_ids, sequence_align
from mrl.families import ModelArch
from mrl.families.flops import ForwardFlops
from mrl.families.table import Role
from mrl.kernels.linear_logprob import Slopes
from mrl.learner.terms import Loss, Together
from mrl.models.batch import Extras
from mrl.parallel import Mesh


@dataclass(frozen=True)
class MicroBatch:
    """A rank's part of some samples, and what is asked of the model there. term: of which loss, if there are several;
    extras: as in `Loss`; loss: this one, where gradients will be taken"""

    packed: PackedBatch
    temperature: float
    entropy_grad: bool = False
    term: int = 0
    extras: Extras = Extras()
    loss: Loss | None = None

    @property
    def slopes(self) -> Slopes | None:
        """Of the loss by the model's output, where each token's are known without the others'."""
        if self.loss is None or not self.loss.local:
            return None
        compute = self.loss.compute

        def of(log_probs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                output = torch.stack([log_probs, entropy]).requires_grad_()
                loss = compute(output, self.packed.dest[rows]).loss
            (slope,) = torch.autograd.grad(loss, output)
            return slope[0], slope[1] if self.entropy_grad else None

        return Slopes(of, self.entropy_grad)


@dataclass
class Split:
    """Of a model under a layout. role: what its outputs cost"""

    mesh: Mesh
    train: TrainConfig
    arch: ModelArch
    role: Role

    def micro_batches(self, rollout: Rollout, sample_ids: Sequence[int], together: Together = 1) -> list[PackedBatch]:
        """This rank's micro-batches; their number is the same on every rank. together: as in `Loss`."""
        require_ids(rollout, self.arch.vocab_size)
        mesh = self.mesh
        rollout, ids = _shown(rollout, sample_ids, together)
        unit = token_unit(mesh.cfg, self.train.precision.fp8.recipe)
        groups, forward = _groups(ids, together), ForwardFlops.of(self.arch, self.role)
        plan = plan_micro_batches(
            self._tokens_together(rollout.seq_lens[ids], together),
            mesh.dp,
            self.train.max_tokens_per_microbatch,
            multiple_of=mesh.pp if mesh.vpp else 1,
            costs=_sums(costs_of(forward, rollout.seq_lens[ids], rollout.response_lens[ids]), together),
        )
        return [
            pack(
                rollout, [sample for i in items for sample in groups[i]], mesh.cp, mesh.cp_rank, unit, self.arch.vision
            )
            for items in plan[mesh.dp_rank]
        ]

    def fits(self, rollout: Rollout, together: Together) -> bool:
        """Whether so many samples, one after the other, are never more tokens than a micro-batch may have."""
        return int(self._tokens_together(rollout.seq_lens, together).max()) <= self.train.max_tokens_per_microbatch

    def _tokens_together(self, seq_lens: Tensor, together: Together) -> Tensor:
        """[groups] tokens, padding included, of so many samples each, one after the other."""
        align = sequence_align(self.mesh.cp)
        return _sums((seq_lens + align - 1) // align * align, together)


def _shown(rollout: Rollout, sample_ids: Sequence[int], together: Together) -> tuple[Rollout, list[int]]:
    """Sequences, and their places. Those of one sample need not share a micro-batch."""
    if rollout.sequence_lens is not None and together != 1:
        raise ValueError("samples of several sequences cannot be kept together in a micro-batch")
    shown, places = rollout.apart(sample_ids)
    return shown, list(places)


def _sums(of_samples: Tensor, together: Together) -> Tensor:
    """[groups], of so many samples each, one after the other."""
    if isinstance(together, int):
        return of_samples.view(-1, together).sum(1)
    of_group = torch.repeat_interleave(torch.arange(len(together)), torch.tensor(together))
    return of_samples.new_zeros(len(together)).index_add(0, of_group, of_samples)


def _groups(ids: list[int], together: Together) -> list[list[int]]:
    sizes = [together] * (len(ids) // together) if isinstance(together, int) else list(together)
    ends = list(itertools.accumulate(sizes, initial=0))
    return [ids[start:end] for start, end in itertools.pairwise(ends)]
