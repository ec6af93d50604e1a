"""What supervised fine-tuning minimises, and how its rows are laid out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section


class ImitationConfig(Section):
    """What is minimised, of the tokens that are learnt."""

    # of a token of probability p -log p (nll), or -p log p whose first p has no gradient (dft, arXiv 2508.05629)
    type: Literal["nll", "dft"] = "nll"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of its probability that all tokens alike get
    # alpha of NEFTune's noise on the embeddings, U(-1, 1) alpha / sqrt(tokens of the row * hidden size); null: none
    neftune_noise_alpha: PositiveFloat | None = None


class PackingConfig(Section):
    """How rows come into micro-batches. By the planner, rows stay apart in attention and are as long as they are, and
    micro-batches are filled and balanced for every step. With bfd (best fit decreasing) a step learns from packs of
    rows, which stay apart too; longer rows are cut, and with bfd_split go on in another pack. Wrapped is for continued
    pre-training on texts: they are joined, each with its EOS, and cut into rows of one length; attention goes over the
    joints."""

    strategy: Literal["planner", "bfd", "bfd_split", "wrapped"] = "planner"  # what batch.samples_per_step counts
    seq_length: PositiveInt = 1024  # tokens of a pack, at most, or of a wrapped row; a buffer's rest is dropped
    num_of_sequences: PositiveInt = 1024  # rows that a buffer is filled with, and then shuffled
    infinite: bool = True  # after all texts they come again, in another order; false: a longer run is refused
