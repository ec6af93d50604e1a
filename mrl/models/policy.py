"""The policy: log-probs and entropies of the response tokens, or logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.config.sections.precision import FP8Config
from mrl.kernels.linear_logprob import linear_distribution, linear_log_prob
from mrl.models.batch import ModelBatch
from mrl.models.gpt import PackedGPT
from mrl.models.precision import head_products


class Policy(PackedGPT):
    def __init__(self, *args: Any, precision: FP8Config, **kwargs: Any) -> None:
        super().__init__(*args, precision=precision, **kwargs)
        self.products = head_products(precision)

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """ "log_probs": float32 [2, n], of batch.labels under softmax(logits / temperature), and the entropies;
        "distribution": [3, n], these and the sums of the squared probabilities, without gradients;
        "logits": float32 [n, padded vocabulary / tp], neither scaled nor masked."""
        rows = self.response_rows(hidden, batch, partial_grad=True)
        weight = self.output_weight()
        if batch.output == "logits":
            return (rows @ weight.T).float()
        group = self.pg_collection.tp
        place = (batch.temperature, group.rank() * weight.size(0), self.arch.vocab_size, group)
        if batch.output == "distribution":
            return linear_distribution(rows, weight, batch.labels, *place, products=self.products)
        if batch.output != "log_probs":
            raise ValueError(f"a policy has no output {batch.output!r}; it has log_probs, distribution and logits")
        log_probs, entropy = linear_log_prob(rows, weight, batch.labels, *place, products=self.products)
        return torch.stack([log_probs, entropy if batch.entropy_grad else entropy.detach()])

    def output_weight(self) -> Tensor:
        """[padded vocabulary / tp, h]; the embedding itself where it is tied and on this stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
