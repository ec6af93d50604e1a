"""Common base of policy and critic: a Megatron GPT over packed tokens, whose head sees the response rows only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.config.sections.precision import FP8Config
from mrl.families import FAMILIES, ModelArch
from mrl.families.table import VOCAB_ALIGN, VOCAB_ALIGN_GPU, padded_vocab_size
from mrl.models.batch import ModelBatch
from mrl.models.mcore import (
    GPTModel,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from mrl.models.noise import embedding_noise
from mrl.models.precision import emulation_of
from mrl.models.rope import RotaryAngles
from mrl.models.specs import block_spec, freeze_router_bias
from mrl.models.vision import add_image_features


class PackedGPT(GPTModel):
    """One chunk of the model.

    chunk(tokens [1, t], position_ids [1 or 3, t], None, packed_seq_params=ModelBatch) returns hidden states [t, 1, h]
    on inner stages (t / tp under sequence parallelism) and the head's output on the last.
    """

    def __init__(
        self,
        arch: ModelArch,
        config: TransformerConfig,
        inv_freq: Mapping[str, tuple[Tensor, float]],
        *,
        tied: bool,
        vp_stage: int | None,
        precision: FP8Config,
    ) -> None:
        super().__init__(
            config,
            block_spec(arch, config, vp_stage, emulation_of(precision)),
            padded_vocab_size(arch, config.tensor_model_parallel_size, vocab_align()),
            arch.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",  # angles per token come from `rotary`
            vp_stage=vp_stage,
        )
        freeze_router_bias(self)
        self.arch = arch
        axes = None if arch.vision is None else torch.tensor(arch.vision.axes, device=platform.device())
        device = platform.device()
        self.rotary = {name: RotaryAngles(own.to(device), axes, factor) for name, (own, factor) in inv_freq.items()}

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        *,
        packed_seq_params: ModelBatch,
        **unused: Any,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Returns embeddings (None on later stages), angles [t, 1, 1, d], and four values that training does not use.

        mrl's own attention gets no angles: it reads their cosines and sines from the batch, computed once for all
        layers.
        """
        if self.pre_process and decoder_input is None:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if FAMILIES[self.arch.family].scaled_embedding:  # rounded first, as in transformers
                decoder_input = decoder_input * torch.tensor(self.arch.hidden_size**0.5).to(decoder_input.dtype)
            if packed_seq_params.extras.noise:
                group = self.pg_collection.tp
                part = (group.rank(), group.size()) if self.config.sequence_parallel else (0, 1)
                decoder_input = decoder_input + embedding_noise(packed_seq_params, decoder_input, part)
            if packed_seq_params.images is not None:
                decoder_input = add_image_features(self, decoder_input, packed_seq_params.images)
        if self.config.transformer_impl == "transformer_engine":
            return decoder_input, self.rotary[""](position_ids), None, None, None, None
        dtype = self.config.params_dtype
        packed_seq_params.cos_sin = {name: table.cos_sin(position_ids, dtype) for name, table in self.rotary.items()}
        return decoder_input, None, None, None, None, None

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: ModelBatch, **unused: Any) -> Tensor:
        return self.head(hidden_states, packed_seq_params) if self.post_process else hidden_states

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """Returns the last stage's output, from final hidden states [t, 1, h].

        They are [t / tp, 1, h] under sequence parallelism, and [n, 1, h] if other tokens were dropped.
        """
        raise NotImplementedError

    def response_rows(self, hidden: Tensor, batch: ModelBatch, *, partial_grad: bool) -> Tensor:
        """Returns [n, h], equal on all tensor-parallel ranks.

        `partial_grad`: the ranks' gradients are parts of a sum (a head split over the vocabulary); otherwise each rank
        has the whole gradient (a replicated head).
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_grad, group=group)
        elif partial_grad and group.size() > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        hidden = hidden.squeeze(1)
        return hidden if batch.has_dropped_tokens else hidden.index_select(0, batch.output_positions)


def vocab_align() -> int:
    """Returns the vocabulary alignment of this machine."""
    return VOCAB_ALIGN if platform.device().type == "cpu" else VOCAB_ALIGN_GPU
