"""Split of samples over ranks and micro-batches, balanced by tokens, with equal micro-batch counts on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.config.fp8_shapes import token_unit
from mrl.config.schema import TrainConfig
from mrl.core import PackedBatch, Rollout
from mrl.data.balance import Bins, costs_of, plan_micro_batches
from mrl.data.packing import pack, require_ids, sequence_align
from mrl.data.prefixes import common_prefixes, family_splits, tokens_before_outputs
from mrl.families import ModelArch
from mrl.families.flops import ForwardFlops
from mrl.families.table import Role
from mrl.kernels.linear_logprob import LossGradients
from mrl.learner.loss_terms import Loss, Together
from mrl.models.batch import DEFAULT_PASS_OPTIONS, PassOptions
from mrl.parallel import Mesh
from mrl.units import starts


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples of one rank and how to run the model on them.

    term: index of the loss, if there are several; extras: as in `Loss`; loss: the loss, if gradients are needed
    first: index of its first token among the local tokens of a pass with routing replay
    number: index among the micro-batches of its loss
    """

    packed: PackedBatch
    temperature: float
    entropy_grad: bool = False
    term: int = 0
    extras: PassOptions = DEFAULT_PASS_OPTIONS
    loss: Loss | None = None
    first: int = 0
    number: int = 0

    @property
    def loss_gradients(self) -> LossGradients | None:
        """Gradients of the loss with respect to the model's output; None unless the loss is local to each token."""
        if self.loss is None or not self.loss.local:
            return None
        compute, is_distilled = self.loss.compute, self.loss.distillation is not None

        def of(log_probs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                divergence = [torch.zeros_like(entropy)] if is_distilled else []  # its gradient is formed by itself
                output = torch.stack([log_probs, entropy, *divergence]).requires_grad_()
                loss = compute(output, self.packed.response_indices[rows]).loss
            (slope,) = torch.autograd.grad(loss, output)
            return slope[0], slope[1] if self.entropy_grad else None

        return LossGradients(of, self.entropy_grad)


@dataclass
class MicroBatchPlanner:
    """Micro-batch planner of a model under a layout.

    role: determines the cost of its outputs; shares: True if prefixes common to a micro-batch's sequences are computed
    once
    """

    mesh: Mesh
    train: TrainConfig
    arch: ModelArch
    role: Role
    shares: bool = False

    def micro_batches(
        self,
        rollout: Rollout,
        sample_ids: Sequence[int],
        together: Together = 1,
        extras: PassOptions = DEFAULT_PASS_OPTIONS,
        only: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> list[PackedBatch]:
        """Returns this rank's micro-batches, equally many on every rank. together, extras: as in `Loss`.

        only [samples of the rollout] bool: packs these alone, in the micro-batches that they have among the others
        whole: packs every sequence whole, in these micro-batches, for another model that cannot share prefixes
        """
        require_ids(rollout, self.arch.vocab_size)
        mesh = self.mesh
        if only is not None and rollout.sequence_counts is not None:
            only = only.repeat_interleave(rollout.sequence_counts)
        rollout, ids = _shown(rollout, sample_ids, together)
        unit, shares = token_unit(mesh.cfg, self.train.precision.fp8.recipe), self.shares and not extras.by_sample
        groups, plan = self._plan(rollout, ids, _sizes(len(ids), together), shares=shares)
        return [
            pack(
                rollout,
                [sample for i in items for sample in groups[i] if only is None or only[sample]],
                mesh.cp,
                mesh.cp_rank,
                unit,
                self.arch.vision,
                shares=shares and not whole,
            )
            for items in plan[mesh.dp_rank]
        ]

    def _plan(self, rollout: Rollout, ids: list[int], sizes: Tensor, *, shares: bool) -> tuple[Bins, list[Bins]]:
        """Returns (groups of samples, the groups of each rank's micro-batches), choosing the grouping by shared
        prefix that gives the busiest rank the least work.
        """
        mesh, forward, lens = self.mesh, ForwardFlops.of(self.arch, self.role), rollout.seq_lens[ids]
        tokens, costs = self._padded(lens), costs_of(forward, lens, rollout.response_lens[ids])
        common = common_prefixes(rollout, ids) if shares else torch.zeros_like(lens)
        saved, best = costs_of(forward, common, torch.zeros_like(common)), None
        for way in self._ways(rollout, ids, sizes, tokens, common):
            own = costs - saved
            first = starts(way)
            own[first] = costs[first]
            prices = _sums(own, way)
            plan = plan_micro_batches(
                _sums(tokens, way),
                mesh.dp,
                self.train.max_tokens_per_microbatch,
                multiple_of=mesh.pp if mesh.vpp else 1,
                costs=prices,
            )
            busiest = max(int(prices[list(itertools.chain(*rank))].sum()) for rank in plan)
            if best is None or busiest < best[0]:
                best = busiest, way, plan
        assert best is not None
        return _groups(ids, best[1]), best[2]

    def _ways(
        self, rollout: Rollout, ids: list[int], sizes: Tensor, tokens: Tensor, common: Tensor
    ) -> Iterator[Tensor]:
        """Yields candidate group sizes: larger groups of samples with a shared prefix that fit a micro-batch, then
        `sizes`.

        Larger groups are tried only if samples may be placed freely. tokens, common: each sample's tokens and
        `common_prefixes`
        """
        if len(sizes) == len(common) and bool(common.any()):
            ahead = tokens_before_outputs(rollout, torch.tensor(ids))
            begins = F.pad(((common == 0) | (2 * common < ahead))[1:], (1, 0), value=True).nonzero()[:, 0]
            families = begins.diff(append=begins.new_tensor([len(common)]))
            of = torch.repeat_interleave(torch.arange(len(families)), families)
            longest = torch.zeros_like(families).scatter_reduce(0, of, tokens, "amax")
            fitting = self.train.max_tokens_per_microbatch // longest
            yield from family_splits(families, fitting.clamp(min=1))
        yield sizes

    def fits(self, rollout: Rollout, together: Together) -> bool:
        """Returns True if `together` consecutive samples never exceed a micro-batch's token limit."""
        tokens = _sums(self._padded(rollout.seq_lens), _sizes(rollout.num_samples, together))
        return int(tokens.max()) <= self.train.max_tokens_per_microbatch

    def _padded(self, seq_lens: Tensor) -> Tensor:
        align = sequence_align(self.mesh.cp)
        return (seq_lens + align - 1) // align * align


def _shown(rollout: Rollout, sample_ids: Sequence[int], together: Together) -> tuple[Rollout, list[int]]:
    """Returns the sequences and their indices. Sequences of one sample need not share a micro-batch."""
    if rollout.sequence_lens is not None and together != 1:
        raise ValueError("samples with several sequences cannot be kept in one micro-batch")
    shown, places = rollout.split_sequences(sample_ids)
    return shown, list(places)


def _sizes(samples: int, together: Together) -> Tensor:
    """Returns the number of samples in each group, [groups] int64."""
    return torch.tensor([together] * (samples // together) if isinstance(together, int) else together).long()


def _sums(of_samples: Tensor, sizes: Tensor) -> Tensor:
    """Sums `of_samples` over consecutive groups of the given sizes, [groups]."""
    of_group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return of_samples.new_zeros(len(sizes)).index_add(0, of_group, of_samples)


def _groups(ids: list[int], sizes: Tensor) -> Bins:
    ends = list(itertools.accumulate(sizes.tolist(), initial=0))
    return [ids[start:end] for start, end in itertools.pairwise(ends)]
