"""Flattens [B, T] tensors and a mask into the losses' inputs: flat tokens, their weights and their responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.algo.aggregate import token_weights
from mrl.algo.sequences import Sequences


@dataclass(frozen=True)
class FlatBatch:
    """Flat view of the n tokens of a [B, T] mask, row by row.

    weights [n]: sum a token loss to the chosen aggregate; mean_weights [n]: to the mean over tokens, for metrics

        batch = FlatBatch.of_mask(mask, "seq-mean-token-mean")
        loss, metrics = policy_loss.compute("gspo", **batch.flat(log_probs=new, old_log_probs=old, advantages=adv),
                                            **batch.inputs)
    """

    mask: Tensor
    weights: Tensor
    mean_weights: Tensor
    sequences: Sequences

    @classmethod
    def of_mask(
        cls,
        mask: Tensor,
        mode: str,
        scale: float | None = None,
        *,
        tokens: int | None = None,
        sequences: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> FlatBatch:
        """Builds the batch from `mask` [B, T]; the arguments are those of `mrl.algo.aggregate.token_weights`."""
        mask = mask.bool()
        counts = {"tokens": tokens, "sequences": sequences}
        return cls(
            mask,
            token_weights(mode, mask, scale, **counts, dtype=dtype)[mask],
            token_weights("token-mean", mask, **counts, dtype=dtype)[mask],
            Sequences.of_mask(mask),
        )

    def flat(self, **dense: Tensor) -> dict[str, Tensor]:
        """Flattens each tensor from [B, T] to [n], under the same names."""
        return {name: tensor[self.mask] for name, tensor in dense.items()}

    def dense(self, flat: Tensor) -> Tensor:
        """Scatters `flat` [n] to [B, T], 0 outside the mask."""
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat)

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of `mrl.algo.policy_loss.compute` other than the per-token tensors."""
        return {"weights": self.weights, "metric_weights": self.mean_weights, "sequences": self.sequences}
