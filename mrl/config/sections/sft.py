"""Sections `loss` and `packing` of `trainer: sft`."""

from __future__ import annotations

from typing import Literal

from mrl.options.base import BelowOne, PositiveFloat, PositiveInt, Section


class ImitationConfig(Section):
    """The loss of the trained tokens."""

    # loss of a token with probability p: -log p (nll), or -p log p with no gradient through the first p (dft, arXiv
    # 2508.05629)
    type: Literal["nll", "dft"] = "nll"
    label_smoothing: BelowOne = 0.0  # share of the target spread evenly over all tokens
    # alpha of NEFTune's noise on the embeddings: U(-1, 1) * alpha / sqrt(tokens of the row * hidden size); null: none
    neftune_noise_alpha: PositiveFloat | None = None


class PackingConfig(Section):
    """Packing of rows into micro-batches.

    - planner: micro-batches are filled and balanced for every step. Rows keep their length and do not attend to each
      other.
    - bfd (best fit decreasing): a step trains on packs of rows, which do not attend to each other. Longer rows are
      truncated, or with bfd_split continue in another pack.
    - wrapped: for continued pre-training, texts are joined, each with its EOS, and split into rows of one length.
      Attention
      crosses the borders of texts.
    """

    # see the section; batch.samples_per_step counts rows (planner), packs (bfd, bfd_split) or wrapped rows
    strategy: Literal["planner", "bfd", "bfd_split", "wrapped"] = "planner"
    seq_length: PositiveInt = 1024  # maximum tokens of a pack, or tokens of a wrapped row
    # wrapped only: rows per shuffle buffer; tokens at its end that do not fill a row are dropped
    num_of_sequences: PositiveInt = 1024
    infinite: bool = True  # wrapped only: repeat the texts, in another order; false: refuse a run that needs more
