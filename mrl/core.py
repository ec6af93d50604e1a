"""The nouns that every room shares. No behaviour beyond construction, checks, and taking a Rollout apart.

A step's samples live in two forms: `Sample` objects (text, reward parts, what the engine said) on the rank that talks
to the engine, and one `Rollout` of flat tensors that is identical on every rank. Flat means: sequences one after the
other, no padding. Per-token quantities of the responses (log-probs, values, advantages, ...) are float32 vectors of
length R, the total number of response tokens, in the order of `Rollout.tokens` with the prompts left out. Words of an
environment, which no model has drawn, are no response tokens: nothing is computed for them, so nothing can learn them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np
import torch
from torch import Tensor

from mrl import units
from mrl.units import (
    NUMBERING,
    RESPONSE_TOKEN,
    SEQUENCE,
    PerImage,
    PerResponseToken,
    PerSample,
    PerSequence,
    PerToken,
)

Ids = Sequence[int] | np.ndarray  # of tokens


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready for the engine."""

    index: int  # row number in the data set
    token_ids: tuple[int, ...]
    row: dict[str, Any]  # the row itself, for the reward function
    text: str = ""  # what was tokenised, after the chat template
    # its pictures, as PNG; the model sees them where token_ids has their image tokens
    pictures: tuple[bytes, ...] = field(default=(), repr=False)
    # of each rows and columns of patches, and a digest of its pixels; None: of a model of text alone
    images: tuple[tuple[int, int, int], ...] | None = None
    short_ids: tuple[int, ...] | None = field(default=None, repr=False)  # token_ids with one image token a picture
    picture_row: int | None = None  # as a PictureStore of training and validation rows numbers it; None: index

    @property
    def told_ids(self) -> tuple[int, ...]:
        """token_ids, as who sees no pictures is told them: with one image token each."""
        return self.token_ids if self.short_ids is None else self.short_ids


@dataclass(frozen=True)
class SamplingParams:
    """How the engine draws tokens. `top_k=-1` and `top_p=1.0` switch the filters off; `temperature=0` is greedy.
    experts: samples are to say which ones their tokens went to, of a model that has some."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    experts: bool = False


@dataclass(frozen=True)
class Request:
    """One generation: `sample_id` is its place in the step, `group` its prompt's, `seed` its own random stream.
    experts_from: of how many of the prompt's first tokens it is known to which experts they go, where that is asked."""

    sample_id: int
    group: int
    prompt: Prompt
    seed: int
    experts_from: int = 0


@dataclass(eq=False)
class Sample:
    """One finished response.

    response_ids [n] int32, from any numbers: all that follows the prompt
    log_probs [m] float32, likewise: the engine's, of logits / temperature, one a token that the model has drawn
    drawn [n] bool: which tokens of the response those are; None: all. The others are an environment's words
    versions [m] int32: of the weights that drew each of them; None: weight_version, which drew the last, all
    experts [tokens of prompt and response, layers with experts, experts a token] uint8 or int16: which ones the engine
        has sent each token to, without the first request.experts_from, 0 for the last token (of each sequence), which
        went nowhere; None: they were not asked for
    messages: the conversation of an agent and its environment after the prompt, and what each said
    sequence_lens: tokens of each sequence, one after the other, that a trajectory is of; (): it is one
    rewards [m] float32: what an environment has given after each of the drawn tokens, before the end; None: nothing
    """

    request: Request
    response_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    response_text: str = ""
    score: float = 0.0  # NaN: it has none, and is left_out
    score_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # why the reward failed on it, where that does not end the run
    drawn: np.ndarray | None = None
    versions: np.ndarray | None = None
    experts: np.ndarray | None = field(default=None, repr=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, float] = field(default_factory=dict)  # its own "score", and other numbers by name
    sequence_lens: tuple[int, ...] = ()
    rewards: np.ndarray | None = None
    left_out: str = ""  # why nothing is learnt from it: an environment or the reward has failed

    def __post_init__(self) -> None:
        self.response_ids = np.asarray(self.response_ids, dtype=np.int32)
        self.log_probs = np.asarray(self.log_probs, dtype=np.float32)

    @property
    def is_scored(self) -> bool:
        """Whether a reward has judged it, so that `score` means something."""
        return math.isfinite(self.score) and not self.left_out and not self.reward_error

    @property
    def num_drawn(self) -> int:
        """Tokens that the model has drawn."""
        return len(self.response_ids) if self.drawn is None else int(self.drawn.sum())

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and response, int32."""
        return np.concatenate([np.array(self.request.prompt.token_ids, dtype=np.int32), self.response_ids])


@dataclass(frozen=True)
class Rollout:
    """A step's samples as flat tensors, the same on every rank.

    tokens [N] int64: prompt + response of sample 0, then of sample 1, ...
    seq_lens [B] int64: tokens of each sample (prompt + response); sums to N
    prompt_lens [B] int64
    group [B] int64: samples of one prompt share a number
    scores [B] float32: the task reward of the whole response
    rollout_log_probs [R] float32: the engine's, R = sum(response_lens)
    score_parts [B, K] float32: the components of the reward that the algorithm asks for, in its order; None: none
    greedy_scores [B] float32: the score of the greedy response to each one's prompt; None: none was sampled
    rows [B] int64: whose prompt each sample answers, numbers of the data's rows; None where they come from nowhere
    weight_versions [B] int64: after how many steps of the run the weights were published that drew each sample, as the
        engines name them; None: no engine drew them (demonstrations)
    born [R] int32: the same of each response token, where a sample may be of several; None: that of its sample
    experts [N, layers with experts, experts a token] uint8 or int16: which ones each token goes to; of a sample's last
        token, which predicts nothing, anything; None: the trainer's routers choose
    drawn [N] bool: the response tokens, after the first prompt_lens tokens of each sample; None: all of those
    counts [R] float32: what each response token counts in a loss that imitates; 0: not learnt, and nothing is computed
        for it; None: 1 each
    rewards [R] float32: the part of `scores` that was given before the end, at the token after which it was; None: all
        of it comes at the end
    sequence_counts [B] int64: sequences of each sample, an agent's trajectory whose history was written anew, one after
        the other in its tokens; what begins a later one is no prompt of prompt_lens, but is not drawn. Only what a
        model is shown at once differs by that (`apart`): a response, in all that is made of it, is the trajectory's.
        None: these are no trajectories
    sequence_lens [S] int64, S = sum(sequence_counts): tokens of each
    image_counts [B] int64: pictures in each prompt; None: there are none
    images [I, 3] int64, I = sum(image_counts): of each, in the order of its prompt, rows and columns of patches, and a
        digest of its pixels

    A new field with its unit goes wherever the others go: through `pick`, `join`, the replay buffer and its
    checkpoints, and to every rank. Raises ValueError for tensors that do not fit together.
    """

    step: int
    tokens: PerToken
    seq_lens: PerSample
    prompt_lens: PerSample
    group: Annotated[PerSample, NUMBERING]
    scores: PerSample
    rollout_log_probs: PerResponseToken
    rows: PerSample | None = None
    score_parts: PerSample | None = None
    greedy_scores: PerSample | None = None
    weight_versions: PerSample | None = None
    counts: PerResponseToken | None = None
    drawn: PerToken | None = None
    born: PerResponseToken | None = None
    experts: PerToken | None = None
    rewards: PerResponseToken | None = None
    sequence_counts: PerSample | None = None
    sequence_lens: PerSequence | None = None
    image_counts: PerSample | None = None
    images: PerImage | None = None

    @classmethod
    def of(cls, step: int, prompts: Sequence[Ids], responses: Sequence[Ids], **known: Tensor | None) -> Self:
        """Token ids as a rollout, sample i = prompt i + response i. Of what is not `known`, groups are of one sample,
        scores and log-probs are 0, and the rest is None."""
        pairs = list(zip(prompts, responses, strict=True))
        flat = [np.asarray(ids, dtype=np.int64) for pair in pairs for ids in pair]
        made: dict[str, Any] = {
            "group": torch.arange(len(pairs)),
            "scores": torch.zeros(len(pairs)),
            "rollout_log_probs": torch.zeros(sum(map(len, responses))),
        }
        return cls(
            step=step,
            tokens=torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *flat])),
            seq_lens=torch.tensor([len(prompt) + len(response) for prompt, response in pairs]),
            prompt_lens=torch.tensor([len(prompt) for prompt in prompts]),
            **made | known,
        )

    def __post_init__(self) -> None:
        if bool((self.seq_lens < self.prompt_lens).any()):
            raise ValueError("a prompt is longer than its sequence")
        if self.drawn is not None:
            if self.drawn.shape != self.tokens.shape or self.drawn.dtype != torch.bool:
                raise ValueError(f"drawn must be bool and say it of each of the {self.tokens.numel()} tokens")
            if bool(self._drawn_among(self.prompt_lens).any()):
                raise ValueError("tokens of a prompt are said to be drawn")
        units.check(self)
        self._check_sequences()

    def _check_sequences(self) -> None:
        if self.sequence_counts is None or self.sequence_lens is None:
            return
        if self.drawn is None:
            raise ValueError("samples are of several sequences, and nothing says which tokens are drawn")
        of_sample = torch.arange(self.num_samples).repeat_interleave(self.sequence_counts)
        lens = torch.zeros_like(self.seq_lens).index_add(0, of_sample, self.sequence_lens)
        if bool((lens != self.seq_lens).any()) or bool((self.sequence_lens < 1).any()):
            raise ValueError("sequences are not as long together as their samples, or have no token")
        if bool(self.drawn[self.sequence_lens.cumsum(0) - self.sequence_lens].any()):
            raise ValueError("the first token of a sequence is said to be drawn")

    @property
    def num_samples(self) -> int:
        return self.seq_lens.numel()

    def apart(self, samples: Sequence[int]) -> tuple[Self, Sequence[int]]:
        """What a model is shown of some of the samples: this rollout with each sequence as a sample of its own, and the
        places of theirs in it. Tokens and flat vectors are in the same places; groups and scores say nothing."""
        if self.sequence_lens is None:
            return self, samples
        count = self.sequence_lens.numel()
        shown = type(self)(
            step=self.step,
            tokens=self.tokens,
            seq_lens=self.sequence_lens,
            prompt_lens=torch.ones(count, dtype=torch.int64),
            group=torch.arange(count),
            scores=torch.zeros(count),
            rollout_log_probs=self.rollout_log_probs,
            counts=self.counts,
            drawn=self.drawn,
            experts=self.experts,
        )
        return shown, SEQUENCE.places(self, torch.as_tensor(samples, dtype=torch.int64)).tolist()

    @property
    def response_lens(self) -> Tensor:
        return self.seq_lens - self.prompt_lens if self.drawn is None else self._drawn_among(self.seq_lens)

    def _drawn_among(self, first: Tensor) -> Tensor:
        """[B] int64: how many of the first so many [B] tokens of each sample are drawn."""
        assert self.drawn is not None
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.drawn.cumsum(0)])
        starts = self.seq_lens.cumsum(0) - self.seq_lens
        return before[starts + first] - before[starts]

    @property
    def num_response_tokens(self) -> int:
        return self.rollout_log_probs.numel()

    @property
    def shares(self) -> Tensor:
        """[R] float32: each token's count over the sum of all."""
        counts = torch.ones(self.num_response_tokens) if self.counts is None else self.counts
        return (counts / counts.double().sum().clamp(min=1e-30)).float()

    @property
    def response_mask(self) -> Tensor:
        """[B, T] bool, T = the longest response (at least 1); True on response tokens, left-aligned."""
        width = max(1, int(self.response_lens.max()))
        return torch.arange(width)[None] < self.response_lens[:, None]

    def dense(self, flat: Tensor) -> Tensor:
        """[R] -> [B, T], zeros outside the response mask."""
        mask = self.response_mask
        return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter_(mask, flat)

    def flat(self, dense: Tensor) -> Tensor:
        """[B, T] -> [R]."""
        return dense.masked_select(self.response_mask)

    def pick(self, samples: Tensor) -> Self:
        """Some of the samples, in the order of `samples` [b] int64, which may name one more than once."""
        return units.pick(self, samples)

    def part(self, samples: range) -> Self:
        """Samples that follow each other: `pick` without a copy."""
        return units.part(self, samples)

    def flat_of(self, samples: Tensor, flat: Tensor) -> Tensor:
        """Of a flat vector [R], what belongs to the samples of `pick(samples)`."""
        return flat[RESPONSE_TOKEN.places(self, samples)]

    def join(self, *others: Self) -> Self:
        """These samples, then those of `others`, whose groups are other ones even where the numbers are the same. The
        step is this one's. Raises ValueError for a field that only some of them have."""
        return units.join((self, *others))


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of one (data-parallel, context-parallel) rank: packed sequences, no padding beyond alignment.

    t = local tokens (this context-parallel rank's zig-zag part of every sequence), n = local response tokens.

    tokens [1, t] int64
    position_ids [1, t] int64; of models that see pictures [3, t]: text, row and column
    rows [n] int64: local positions whose *next* token is a response token (the position that predicts it)
    labels [n] int64: that next token
    dest [n] int64: its place in the Rollout's flat response vectors
    cu_seqlens [S + 1] int32: starts of the padded sequences *before* the context-parallel cut
    max_seqlen: the longest padded sequence before the cut
    source [t] int64: the local tokens' places in Rollout.tokens, -1: padding
    samples, seq_lens [S] int64: of each packed sequence its place in the Rollout, and its tokens without padding; -1
        and 0 of one that is padding alone
    images [k, 5] int64: the micro-batch's different pictures, as `mrl.data.image_places` names them
    image_at [m] int64: local positions that take a feature of a picture; image_row [m] int64: which one of all of
        `images`
    spread [T] int64: of each token of the sequences, one after the other, which local token it is, where several
        sequences begin with the same ones (no context parallelism); None: they share none
    """

    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    labels: Tensor
    dest: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    source: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    samples: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    seq_lens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    images: Tensor = field(default_factory=lambda: torch.empty(0, 5, dtype=torch.int64))
    image_at: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    image_row: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    spread: Tensor | None = None


@dataclass
class StepStats:
    """What one step of a run reports: metrics by name, seconds by phase."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
