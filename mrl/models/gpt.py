"""What the policy and the critic share: a Megatron GPT over packed tokens, whose head sees the response rows only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrl import platform
from mrl.config.sections.precision import FP8Config
from mrl.families import ModelArch
from mrl.families.table import VOCAB_ALIGN, VOCAB_ALIGN_GPU, padded_vocab_size
from mrl.models.batch import ModelBatch
from mrl.models.mcore import (
    GPTModel,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)
from mrl.models.precision import emulation_of
from mrl.models.rope import RotaryAngles
from mrl.models.specs import block_spec


class PackedGPT(GPTModel):
    """One chunk of the model. chunk(tokens [1, t], position_ids [1, t], None, packed_seq_params=ModelBatch) gives
    hidden states [t, 1, h] on inner stages (t / tp under sequence parallelism) and the head's output on the last."""

    def __init__(
        self,
        arch: ModelArch,
        config: TransformerConfig,
        inv_freq: Tensor,
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
        self.arch = arch
        self.rotary = RotaryAngles(inv_freq.to(platform.device()))

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        *,
        packed_seq_params: ModelBatch,
        **unused: Any,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """(embeddings or None on later stages, angles [t, 1, 1, d], and four things that training does not use).
        No angles for our own attention: it finds their cosines in the batch, computed once for all layers."""
        if self.pre_process and decoder_input is None:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.config.transformer_impl == "transformer_engine":
            return decoder_input, self.rotary(position_ids), None, None, None, None
        packed_seq_params.cos_sin = self.rotary.cos_sin(position_ids, self.config.params_dtype)
        return decoder_input, None, None, None, None, None

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: ModelBatch, **unused: Any) -> Tensor:
        return self.head(hidden_states, packed_seq_params) if self.post_process else hidden_states

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """The last stage's output, from final hidden states [t, 1, h] ([t / tp, 1, h] under sequence parallelism)."""
        raise NotImplementedError

    def response_rows(self, hidden: Tensor, batch: ModelBatch, *, partial_grad: bool) -> Tensor:
        """[n, h], the same on all tensor-parallel ranks. `partial_grad`: the ranks' gradients are parts of a sum (a
        head split over the vocabulary), else each rank has all of it (a replicated head)."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_grad, group=group)
        elif partial_grad and group.size() > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        return hidden.squeeze(1).index_select(0, batch.rows)


def vocab_align() -> int:
    """On this machine."""
    return VOCAB_ALIGN if platform.device().type == "cpu" else VOCAB_ALIGN_GPU
