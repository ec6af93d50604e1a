"""What supervised fine-tuning minimises, and how its rows are laid out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class ImitationConfig(Section):
    """The loss of the trained tokens."""

    # for a token of probability p: -log p (nll), or -p log p without gradient of the first p (dft, arXiv 2508.05629)
    type: Literal["nll", "dft"] = "nll"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the target spread evenly over all tokens
    # alpha of NEFTune's noise on the embeddings, U(-1, 1) alpha / sqrt(tokens of the row * hidden size); null: none
    neftune_noise_alpha: PositiveFloat | None = None


class PackingConfig(Section):
    """Packing of rows into micro-batches. planner: micro-batches are filled and balanced for every step; rows keep
    their length and do not attend to each other. bfd (best fit decreasing): a step trains on packs of rows, which do
    not attend to each other; longer rows are truncated, or with bfd_split continue in another pack. wrapped: for
    continued pre-training, texts are joined, each with its EOS, and split into rows of one length; attention crosses
    the borders of texts."""

    strategy: Literal["planner", "bfd", "bfd_split", "wrapped"] = "planner"  # what batch.samples_per_step counts
    seq_length: PositiveInt = 1024  # maximum tokens of a pack, or tokens of a wrapped row; a buffer's rest is dropped
    num_of_sequences: PositiveInt = 1024  # rows of a buffer, which is then shuffled
    infinite: bool = True  # repeat the texts, in another order; false: refuse a longer run
