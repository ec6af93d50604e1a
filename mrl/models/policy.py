"""Policy: log-probs and entropies of the response tokens, or logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.config.sections.precision import FP8Config
from mrl.kernels.head_products import plain_products
from mrl.kernels.linear_divergence import linear_divergence
from mrl.kernels.linear_logprob import linear_distribution, linear_log_prob
from mrl.models.batch import ModelBatch
from mrl.models.gpt import PackedGPT
from mrl.models.mcore import reduce_from_tensor_model_parallel_region
from mrl.models.precision import head_products


class Policy(PackedGPT):
    def __init__(self, *args: Any, precision: FP8Config, **kwargs: Any) -> None:
        super().__init__(*args, precision=precision, **kwargs)
        self.products = head_products(precision)

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """Returns `batch.output` of the response tokens. Raises ValueError for an unknown one.

        "log_probs": float32 [2, n], of batch.labels under softmax(logits / temperature), and the entropies; with
        extras.smoothing one more row, the mean log-probs over the vocabulary; with extras.described two more, without
        gradients: 1 where the label is the argmax, and the mean over the vocabulary of the logits; with distillation a
        last one, the divergence to the teacher;
        "distribution": [4, n], log-probs, entropies, the sums of the squared probabilities, and 1 where the label is
        the argmax, without gradients;
        "hidden_states": [n, h], in the model's dtype;
        "lm_head_quantization_error": [1, n], these log-probs minus those of a head without fp8, without gradients;
        "logits": float32 [n, padded vocabulary / tp], neither scaled nor masked.
        """
        rows = self.response_rows(hidden, batch, partial_grad=True)
        if batch.output == "hidden_states":
            return rows
        weight = self.output_weight()
        if batch.output == "logits":
            return (rows @ weight.T).float()
        group = self.pg_collection.tp
        place = (batch.temperature, group.rank() * weight.size(0), self.arch.vocab_size, group)
        if batch.output == "distribution":
            return linear_distribution(rows, weight, batch.labels, *place, products=self.products)
        if batch.output == "lm_head_quantization_error":
            own, exact = (
                linear_log_prob(rows.detach(), weight.detach(), batch.labels, *place, products=products)[0]
                for products in (self.products, plain_products)
            )
            return (own - exact)[None]
        if batch.output != "log_probs":
            raise ValueError(
                f"a policy has no output {batch.output!r}; it has log_probs, distribution, hidden_states, "
                "lm_head_quantization_error and logits"
            )
        log_probs, entropy, is_top = linear_log_prob(
            rows, weight, batch.labels, *place, products=self.products, loss_gradients=batch.loss_gradients
        )
        made = [log_probs, entropy if batch.entropy_grad else entropy.detach()]
        if batch.extras.smoothing:
            made.append(log_probs + self._mean_lead(rows, batch))
        if batch.extras.described:
            made += [is_top, self._mean_logits(rows.detach())]
        if batch.distillation is not None:
            made.append(self._divergence(rows, weight, batch))
        return torch.stack(made)

    def _divergence(self, rows: Tensor, weight: Tensor, batch: ModelBatch) -> Tensor:
        """Divergence to the teacher of each position, float32 [n]; 0 where there is none."""
        assert batch.distillation is not None
        group, found = self.pg_collection.tp, torch.zeros(rows.size(0), device=rows.device)
        for each in batch.distillation.teachers:
            divergence = linear_divergence(
                rows[each.rows],
                weight,
                each.teacher,
                batch.distillation.divergence,
                batch.distillation.token_weights[each.rows],
                batch.temperature,
                group.rank() * weight.size(0),
                each.vocab_size,
                group,
                products=self.products,
            )
            found = found.index_add(0, each.rows, divergence)
        return found

    def _mean_lead(self, rows: Tensor, batch: ModelBatch) -> Tensor:
        """Mean over the vocabulary of the logits / temperature minus the label's, float32 [n], summed over the
        ranks' parts.
        """
        weight, group = self.output_weight(), self.pg_collection.tp
        start = group.rank() * weight.size(0)
        valid = max(0, min(weight.size(0), self.arch.vocab_size - start))
        local = batch.labels - start
        mine = ((local >= 0) & (local < valid)).to(weight.dtype)
        mean = weight[:valid].sum(0) / self.arch.vocab_size
        of_label = weight.index_select(0, local.clamp(0, weight.size(0) - 1)) * mine[:, None]
        part = (rows * (mean - of_label)).float().sum(-1) / batch.temperature
        return reduce_from_tensor_model_parallel_region(part, group=group) if group.size() > 1 else part

    @torch.no_grad()
    def _mean_logits(self, rows: Tensor) -> Tensor:
        """Mean unscaled logit over the unpadded vocabulary, float32 [n]."""
        weight, group = self.output_weight(), self.pg_collection.tp
        valid = max(0, min(weight.size(0), self.arch.vocab_size - group.rank() * weight.size(0)))
        part = rows.float() @ weight[:valid].sum(0, dtype=torch.float32) / self.arch.vocab_size
        return reduce_from_tensor_model_parallel_region(part, group=group) if group.size() > 1 else part

    def output_weight(self) -> Tensor:
        """Returns [padded vocabulary / tp, h]; the embedding itself if it is tied and on this stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
