"""Rewards: what scores a response, and how long it may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import (
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Url,
)
from mrl.config.sections.models import ParallelConfig
from mrl.config.sections.precision import PrecisionConfig


class FormatConfig(Section):
    """The built-in `format`: 1 where `pattern` matches the whole response, white space at its ends apart, else 0."""

    # regular expression; "." is any character
    pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


class LengthConfig(Section):
    """The built-in `length`: 1 at `full_tokens` response tokens, 0 at `zero_tokens`, a straight line between them and
    the same beyond. `zero_tokens` above `full_tokens` asks for short responses, below it for long ones."""

    full_tokens: NonNegativeInt  # length with score 1
    zero_tokens: NonNegativeInt  # length with score 0


class OverlongConfig(Section):
    """The built-in `overlong` (DAPO, arXiv 2503.14476): 0 up to `buffer_tokens` before the limit, then a straight line
    down to -`penalty_factor` at the limit, which is rollout.sampling.max_new_tokens."""

    buffer_tokens: PositiveInt  # length of the slope
    penalty_factor: PositiveFloat = 1.0  # what a response at the limit loses


class SandboxConfig(Section):
    """How programs that a model wrote are shut in, and their limits. A program's processes and files hold at most
    processes x memory_mib + disk_mib. `isolation: none` gives them everything that this user may do."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"  # what shuts a program in; none: nothing
    wall_s: PositiveFloat = 10.0  # seconds of a program; of the reward `code`, for all tests of a response
    memory_mib: Annotated[int, Field(ge=64)] = 512  # MiB of address space, of each process
    disk_mib: PositiveInt = 16  # MiB of files
    processes: PositiveInt = 1  # processes at once; threads count
    output_kib: PositiveInt = 64  # KiB of stdout and stderr together


class CodeConfig(SandboxConfig):
    """The built-in `code`: limits of a response's program over all of its tests, and how it is shut in.

    Assertions are compared outside, where the program cannot reach what is expected; `unsplit: trust` runs those that
    cannot be (loops, try, helpers that compare) inside as a whole, where a program that looks for them can pass without
    solving anything.
    """

    unsplit: Literal["refuse", "trust"] = "refuse"  # tests that cannot be compared outside
    partial_credit: bool = False  # the share of the tests that pass, instead of all or nothing


class ServerConfig(Section):
    """A scorer behind HTTP. `api: mrl` is POST `url` {"samples": [{"prompt", "response", "row"}, ...]} -> {"scores": [a
    number or {"score": number, other parts}, ...]}; `api: sglang` a reward model that SGLang serves (--is-embedding):
    POST `url`/classify with the sample's own token ids, so the model must have the actor's tokenizer.

    SGLang 0.5.23 gives the score heads of Qwen2 and Qwen3 a random bias that no checkpoint has: all their scores are
    off by one constant, another one after each start of the server. Group estimators do not see it; gae does.
    """

    url: Url  # http:// or https://, without a password
    api: Literal["mrl", "sglang"] = "mrl"  # what it speaks
    batch_size: PositiveInt = 32  # samples a call, at most
    connections: PositiveInt = 8  # calls at once
    timeout_s: PositiveFloat = 60.0  # seconds of one call, from the first byte sent to the last one received
    retries: NonNegativeInt = 3  # further tries after a time-out, a lost connection, or status 408, 429 or 5xx
    backoff_s: NonNegativeFloat = 0.5  # seconds before the first retry; twice as long before each further one
    max_answer_mib: PositiveInt = 16  # MiB of one answer, at most


class RewardModelConfig(Section):
    """A reward model that Megatron runs on the actor's ranks: a Hugging Face directory of a sequence classifier with
    one label, whose score of the response's last token counts. It must have the actor's tokenizer.

    Of an ensemble, which has several labels, `heads` makes one score: their mean, less `std_coef` of their standard
    deviation, or the least (arXiv 2310.02743).
    """

    path: FilePath  # Hugging Face directory
    parallel: ParallelConfig | None = None  # the actor's where null
    max_tokens_per_microbatch: PositiveInt | None = None  # tokens a pass, at most; the actor's where null
    heads: Literal["mean", "min"] = "mean"  # what counts of an ensemble's scores
    std_coef: NonNegativeFloat = 0.0  # with mean: how much their disagreement takes off
    precision: PrecisionConfig = PrecisionConfig()
    offload: Literal["none", "all"] = "none"  # all: its parameters wait in host memory while it does not compute


class RewardConfig(Section):
    """What scores a response. A function is a built-in's name (exact_match, sorted_digits, arithmetic, math,
    multiple_choice, code, format, length, overlong, environment) or `path/to/file.py:name`.

    `manager` says who scores:

    - naive: `function`, or the one that `functions` has for the row's data_source
    - dapo: the same, plus the built-in `overlong`
    - batch: `function` is called once with all samples: f(prompts, responses, rows), one score each
    - remote: the one server of `servers`
    - model: `model`, or the one server of `servers` with a reward model (api sglang)
    - recipe: `recipe` has for each data_source ("*": for any other) its components and their weights: functions, names
      of `servers`, `model`, and `batch` for `function` called once; the score is the weighted sum
    """

    manager: Literal["naive", "dapo", "batch", "remote", "model", "recipe"] = "naive"  # who scores, see the section
    function: FilePath | None = None  # a built-in's name or path/to/file.py:name
    functions: dict[str, FilePath] = {}  # data source -> function
    recipe: dict[str, dict[str, float]] = {}  # data source ("*": any other) -> component -> weight
    servers: dict[str, ServerConfig] = {}  # name -> scorer behind HTTP
    model: RewardModelConfig | None = None
    format: FormatConfig = FormatConfig()
    length: LengthConfig | None = None
    overlong: OverlongConfig | None = None
    code: CodeConfig = CodeConfig()
    # the prompt's pictures too: files of functions take (prompt, response, row, pictures), lists of PIL images of the
    # size that the model sees; servers with api mrl get "pictures", each as PNG in base64
    pictures: bool = False
    workers: Annotated[int, Field(gt=0, le=1024)] = 2  # processes that functions run in
    timeout_s: PositiveFloat = 30.0  # seconds of one call of a function
    # a sample whose score fails (time-out, exception): stop ends the run; leave_out takes the sample out of baselines,
    # advantages, losses and means; zero scores 0, so that the policy learns to avoid responses that nobody has judged:
    # prefer leave_out. Both are counted in reward/failed. A response on which a built-in reaches no verdict (a power
    # tower in `math`) is left out, unless zero is set
    on_error: Literal["stop", "leave_out", "zero"] = "stop"
    # score of a response that rollout.sampling.max_new_tokens cut, such as 0: the policy learns to end; null: its own
    truncated_score: float | None = None
