"""Data types shared by all packages. Behaviour is limited to construction, checks, and splitting a Rollout.

A step's samples have two forms: `Sample` objects (text, reward parts, engine outputs) on the rank that talks to the
engine, and one `Rollout` of flat tensors that is identical on every rank. Flat means: sequences one after the other,
without padding. Per-token quantities of the responses (log-probs, values, advantages, ...) are float32 vectors of
length R, the total number of response tokens, in the order of `Rollout.tokens` without the prompts. Environment tokens,
which the action mask excludes, are not response tokens: nothing is computed for them, and nothing learns them.
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

Ids = Sequence[int] | np.ndarray  # token ids
_NAMES_IN_CHECKPOINTS = {  # of fields of a Rollout, where they differ
    "action_mask": "drawn",
    "token_weight_versions": "born",
    "routed_experts": "experts",
    "loss_weights": "counts",
    "token_rewards": "rewards",
}


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready for the engine."""

    index: int  # row number in the data set
    token_ids: tuple[int, ...]
    row: dict[str, Any]  # the row itself, for the reward function
    text: str = ""  # the tokenized text, after the chat template
    # its pictures, as PNG; the model sees them where token_ids has their image tokens
    pictures: tuple[bytes, ...] = field(default=(), repr=False)
    # rows and columns of patches, and pixel digest, of each picture; None: a text-only model
    images: tuple[tuple[int, int, int], ...] | None = None
    # token_ids with one image token a picture
    unexpanded_token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    picture_row: int | None = None  # row number in an ImageStore of training and validation rows; None: index

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """Text-only token ids: with one image token per picture, for readers without image input."""
        return self.token_ids if self.unexpanded_token_ids is None else self.unexpanded_token_ids


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of the engine.

    `top_k=-1` and `top_p=1.0` disable these filters; `temperature=0` is greedy.
    return_routed_experts: return the routed experts of each token of an MoE model.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    return_routed_experts: bool = False


@dataclass(frozen=True)
class Request:
    """One generation. `sample_id`: index in the step; `group`: index of the prompt; `seed`: seed of its random stream.

    routed_experts_start: number of leading prompt tokens whose routed experts are already known
    """

    sample_id: int
    group: int
    prompt: Prompt
    seed: int
    routed_experts_start: int = 0


@dataclass(eq=False)
class Sample:
    """One finished response.

    response_ids [n] int32: all tokens after the prompt, from any sequence of numbers
    log_probs [m] float32, likewise: the engine's, of logits / temperature, one per token that the model generated
    action_mask [n] bool: action mask of the response; False on environment tokens; None: all True
    token_weight_versions [m] int32: weight version of each generated token; None: all have weight_version, that of the
        last token
    routed_experts [tokens of prompt and response, layers with experts, experts a token] uint8 or int16: routed experts
        of each token, without the first request.routed_experts_start; 0 for the last token of each sequence, which is
        not routed;
        None: not requested
    messages: the conversation of an agent and its environment after the prompt
    sequence_lens: tokens of each sequence of a trajectory, in order; (): one sequence
    token_rewards [m] float32: the environment's reward after each generated token, before the end; None: none
    """

    request: Request
    response_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    response_text: str = ""
    score: float = 0.0  # NaN: it has none, and is left_out
    score_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # error of the reward, if that does not end the run
    action_mask: np.ndarray | None = None
    token_weight_versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = field(default=None, repr=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, float] = field(default_factory=dict)  # its own "score", and other numbers by name
    sequence_lens: tuple[int, ...] = ()
    token_rewards: np.ndarray | None = None
    left_out: str = ""  # why it is not trained on: an environment or the reward failed

    def __post_init__(self) -> None:
        self.response_ids = np.asarray(self.response_ids, dtype=np.int32)
        self.log_probs = np.asarray(self.log_probs, dtype=np.float32)

    @property
    def is_scored(self) -> bool:
        """True if a reward has judged the sample, so that `score` is meaningful."""
        return math.isfinite(self.score) and not self.left_out and not self.reward_error

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens that the model generated."""
        return len(self.response_ids) if self.action_mask is None else int(self.action_mask.sum())

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and response ids, int32."""
        return np.concatenate([np.array(self.request.prompt.token_ids, dtype=np.int32), self.response_ids])


@dataclass(frozen=True)
class Rollout:
    """A step's samples as flat tensors, identical on every rank but for `routed_experts`.

    tokens [N] int64: prompt + response of sample 0, then of sample 1, ...
    seq_lens [B] int64: tokens of each sample (prompt + response); sums to N
    prompt_lens [B] int64
    group [B] int64: samples of one prompt share a number
    scores [B] float32: the task reward of the whole response
    rollout_log_probs [R] float32: the engine's, R = sum(response_lens)
    score_parts [B, K] float32: components of the reward that the algorithm requests, in its order; None: none
    greedy_scores [B] float32: score of the greedy response to the sample's prompt; None: none was sampled
    rows [B] int64: data row of each sample's prompt; None without data rows
    weight_versions [B] int64: version of the weights that generated each sample, as the number of steps before their
        weight sync; None: no engine generated the samples (demonstrations)
    token_weight_versions [R] int32: token weight version, where a sample may have several; None: that of its sample
    routed_experts [N, layers with experts, experts a token] uint8 or int16: routed experts of each token, arbitrary for
        a sample's last token, which predicts nothing; None: the trainer's routers decide. Rank 0 alone has them: on
        the other ranks there are no layers, [N, 0, experts a token], and `RoutingReplay` brings each its share
    action_mask [N] bool: action mask; True on response tokens, after the first prompt_lens tokens; None: True on all of
        these
    loss_weights [R] float32: weight of each response token in an imitation loss; 0: not trained, nothing is computed
        for it; None: 1 each
    token_rewards [R] float32: the part of `scores` that was given before the end, at the token after which it came;
        None: all of it comes at the end
    sequence_counts [B] int64: number of sequences of each sample, for an agent's trajectory with a rewritten history,
        one after the other in its tokens. The beginning of a later sequence is no prompt of prompt_lens, but the action
        mask excludes it. Only the model's input differs by it (`split_sequences`); a response is always the
        trajectory's.
        None: no trajectories
    sequence_lens [S] int64, S = sum(sequence_counts): tokens of each sequence
    image_counts [B] int64: pictures in each prompt; None: there are none
    sources [B] int64: index in source_names of the data source of each sample's prompt; None: not needed
    images [I, 3] int64, I = sum(image_counts): rows and columns of patches, and a digest of the pixels, of each picture
        in the order of its prompt

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
    loss_weights: PerResponseToken | None = None
    action_mask: PerToken | None = None
    token_weight_versions: PerResponseToken | None = None
    routed_experts: PerToken | None = None
    token_rewards: PerResponseToken | None = None
    sequence_counts: PerSample | None = None
    sequence_lens: PerSequence | None = None
    image_counts: PerSample | None = None
    images: PerImage | None = None
    sources: PerSample | None = None
    source_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: int, prompts: Sequence[Ids], responses: Sequence[Ids], **known: Tensor | None) -> Self:
        """Builds a rollout from token ids; sample i = prompt i + response i.

        Unless `known`, each sample is a group of its own, scores and log-probs are 0, and other fields are None.
        """
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
        if self.action_mask is not None:
            if self.action_mask.shape != self.tokens.shape or self.action_mask.dtype != torch.bool:
                raise ValueError(f"action_mask must be bool and cover each of the {self.tokens.numel()} tokens")
            if bool(self._generated_among(self.prompt_lens).any()):
                raise ValueError("action_mask is True on tokens of a prompt")
        units.check(self)
        self._check_sequences()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what goes to other ranks: all but the layers of `routed_experts`."""
        experts = self.routed_experts
        return vars(self) | {"routed_experts": None if experts is None else experts[:, :0]}

    def _check_sequences(self) -> None:
        if self.sequence_counts is None or self.sequence_lens is None:
            return
        if self.action_mask is None:
            raise ValueError("samples of several sequences need an action_mask, which is None")
        of_sample = torch.arange(self.num_samples).repeat_interleave(self.sequence_counts)
        lens = torch.zeros_like(self.seq_lens).index_add(0, of_sample, self.sequence_lens)
        if bool((lens != self.seq_lens).any()) or bool((self.sequence_lens < 1).any()):
            raise ValueError("sequences are not as long together as their samples, or have no token")
        if bool(self.action_mask[self.sequence_lens.cumsum(0) - self.sequence_lens].any()):
            raise ValueError("action_mask is True on the first token of a sequence")

    @property
    def num_samples(self) -> int:
        return self.seq_lens.numel()

    def split_sequences(self, samples: Sequence[int]) -> tuple[Self, Sequence[int]]:
        """Returns the model's input for some samples: a rollout with one sample per sequence, and the indices in it.

        Tokens and flat vectors keep their places; groups and scores are meaningless.
        """
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
            loss_weights=self.loss_weights,
            action_mask=self.action_mask,
            routed_experts=self.routed_experts,
        )
        return shown, SEQUENCE.places(self, torch.as_tensor(samples, dtype=torch.int64)).tolist()

    @property
    def response_lens(self) -> Tensor:
        return self.seq_lens - self.prompt_lens if self.action_mask is None else self._generated_among(self.seq_lens)

    def _generated_among(self, first: Tensor) -> Tensor:
        """Returns [B] int64: the generated tokens among the `first` [B] tokens of each sample."""
        assert self.action_mask is not None
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.action_mask.cumsum(0)])
        starts = self.seq_lens.cumsum(0) - self.seq_lens
        return before[starts + first] - before[starts]

    @property
    def num_response_tokens(self) -> int:
        return self.rollout_log_probs.numel()

    @property
    def normalized_loss_weights(self) -> Tensor:
        """Returns [R] float32: each token's count over the sum of all counts."""
        counts = torch.ones(self.num_response_tokens) if self.loss_weights is None else self.loss_weights
        return (counts / counts.double().sum().clamp(min=1e-30)).float()

    @property
    def response_mask(self) -> Tensor:
        """Mask [B, T] bool, T = the longest response (at least 1); True on response tokens, left-aligned."""
        width = max(1, int(self.response_lens.max()))
        return torch.arange(width)[None] < self.response_lens[:, None]

    def dense(self, flat: Tensor) -> Tensor:
        """Returns [R] as [B, T], zeros outside the response mask."""
        mask = self.response_mask
        return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter_(mask, flat)

    def flat(self, dense: Tensor) -> Tensor:
        """Returns [B, T] as [R]."""
        return dense.masked_select(self.response_mask)

    def pick(self, samples: Tensor) -> Self:
        """Returns some samples in the order of `samples` [b] int64, which may repeat."""
        return units.pick(self, samples)

    def part(self, samples: range) -> Self:
        """Returns consecutive samples: `pick` without a copy."""
        return units.part(self, samples)

    def flat_of(self, samples: Tensor, flat: Tensor) -> Tensor:
        """Returns the part of a flat vector [R] that belongs to `pick(samples)`."""
        return flat[RESPONSE_TOKEN.places(self, samples)]

    def join(self, *others: Self) -> Self:
        """Returns these samples, then those of `others`, whose groups are renumbered; the step is this rollout's.

        Raises ValueError for a field that only some of the rollouts have, and for different source_names.
        """
        if any(other.source_names != self.source_names for other in others):
            raise ValueError("rollouts with different source_names cannot be joined: sources are indices in them")
        return units.join((self, *others))

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields by their names in checkpoints."""
        return {_NAMES_IN_CHECKPOINTS.get(name, name): value for name, value in vars(self).items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Returns the rollout whose `state_dict` this is."""
        fields = {stored: name for name, stored in _NAMES_IN_CHECKPOINTS.items()}
        return cls(**{fields.get(stored, stored): value for stored, value in state.items()})


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of one (data-parallel, context-parallel) rank: packed sequences, no padding beyond alignment.

    t = local tokens (this context-parallel rank's zig-zag part of every sequence), n = local response tokens.

    tokens [1, t] int64
    position_ids [1, t] int64; for models with image input [3, t]: text, row and column
    output_positions [n] int64: local positions whose *next* token is a response token (the position that predicts it)
    labels [n] int64: that next token
    response_indices [n] int64: its index in the Rollout's flat response vectors
    cu_seqlens [S + 1] int32: starts of the padded sequences *before* the context-parallel cut
    max_seqlen: the longest padded sequence before the cut
    source [t] int64: the local tokens' indices in Rollout.tokens, -1: padding
    samples, seq_lens [S] int64: index in the Rollout of each packed sequence, and its tokens without padding; -1 and 0
        for pure padding
    images [k, 5] int64: the micro-batch's distinct pictures, as in `mrl.data.image_positions`
    image_positions [m] int64: local positions that take a picture feature; image_feature_indices [m] int64: index of
        that feature among all features of `images`
    shared_index [T] int64: local token of each token of the consecutive sequences, if several share a prefix (no
        context parallelism); None: no shared prefixes
    """

    tokens: Tensor
    position_ids: Tensor
    output_positions: Tensor
    labels: Tensor
    response_indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    source: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    samples: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    seq_lens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    images: Tensor = field(default_factory=lambda: torch.empty(0, 5, dtype=torch.int64))
    image_positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    image_feature_indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shared_index: Tensor | None = None


@dataclass
class StepStats:
    """Report of one step: metrics by name, seconds by phase."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
