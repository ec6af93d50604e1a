"""Section `reward`: what scores a response, with its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.models import ParallelConfig
from mrl.config.sections.precision import PrecisionConfig
from mrl.options.base import FilePath, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Url


class FormatConfig(Section):
    """The built-in `format`: 1 if `pattern` matches the whole response without surrounding white space, else 0."""

    # regular expression; "." matches any character
    pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


class LengthConfig(Section):
    """The built-in `length`: 1 at `full_tokens` response tokens, 0 at `zero_tokens`, linear between, constant beyond.

    With `zero_tokens` above `full_tokens`, short responses score higher; below it, long responses do.
    """

    full_tokens: NonNegativeInt  # length with score 1
    zero_tokens: NonNegativeInt  # length with score 0


class OverlongConfig(Section):
    """The built-in `overlong` (DAPO, arXiv 2503.14476): a penalty for responses close to the length limit.

    0 up to `buffer_tokens` before the limit (rollout.sampling.max_new_tokens), then linear down to -`penalty_factor` at
    the limit.
    """

    buffer_tokens: PositiveInt  # tokens over which the penalty grows
    penalty_factor: PositiveFloat = 1.0  # penalty at the limit


class SandboxConfig(Section):
    """Sandbox and limits of programs that a model wrote.

    Processes and files of a program use at most processes x memory_mib + disk_mib of memory. `isolation: none` runs
    programs with all rights of this user.
    """

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"  # sandbox of a program; none: no sandbox
    wall_s: PositiveFloat = 10.0  # maximum seconds of a program; for the reward `code`, of all tests of a response
    memory_mib: Annotated[int, Field(ge=64)] = 512  # maximum MiB of address space per process
    disk_mib: PositiveInt = 16  # maximum MiB of files
    processes: PositiveInt = 1  # maximum concurrent processes, including threads
    output_kib: PositiveInt = 64  # maximum KiB of stdout and stderr together


class CodeConfig(SandboxConfig):
    """The built-in `code`: sandbox and limits of a response's program over all its tests.

    Assertions are compared outside the sandbox, where the program cannot reach expected values. Some tests cannot be
    compared outside (loops, try, helpers that compare). `unsplit: trust` runs such a test inside as a whole, where a
    program can cheat.
    """

    unsplit: Literal["refuse", "trust"] = "refuse"  # tests that cannot be compared outside the sandbox; see the section
    partial_credit: bool = False  # score the share of passed tests, instead of all or nothing


class ServerConfig(Section):
    """A scorer behind HTTP.

    - `api: mrl`: POST `url` {"samples": [{"prompt", "response", "row"}, ...]} -> {"scores": [...]}. A score is a number
      or
      {"score": number, other parts}.
    - `api: sglang`: a reward model that SGLang serves (--is-embedding). POST `url`/classify sends the sample's own
      token
      ids, so the model must have the actor's tokenizer.

    SGLang 0.5.23 gives the score heads of Qwen2 and Qwen3 a random bias that no checkpoint has: all their scores are
    off by a constant that changes with each start of the server. Group estimators are not affected; gae is.
    """

    url: Url  # http:// or https://, without a password
    api: Literal["mrl", "sglang"] = "mrl"  # protocol of the server
    batch_size: PositiveInt = 32  # maximum samples per call
    connections: PositiveInt = 8  # concurrent calls
    timeout_s: PositiveFloat = 60.0  # maximum seconds of one call, from the first byte sent to the last one received
    retries: NonNegativeInt = 3  # retries after a timeout, a lost connection, or status 408, 429 or 5xx
    backoff_s: NonNegativeFloat = 0.5  # seconds before the first retry; doubled before each further one
    max_answer_mib: PositiveInt = 16  # maximum MiB of a response


class RewardModelConfig(Section):
    """A reward model that runs in Megatron on the actor's ranks: a Hugging Face sequence classifier with one label,
    whose score at the response's last token is used. It must have the actor's tokenizer.

    For an ensemble with several labels, `heads` combines the scores: their mean minus `std_coef` times their standard
    deviation, or the minimum (arXiv 2310.02743).
    """

    path: FilePath  # Hugging Face directory
    parallel: ParallelConfig | None = None  # layout; null: the actor's
    max_tokens_per_microbatch: PositiveInt | None = None  # maximum tokens per micro-batch; null: the actor's
    heads: Literal["mean", "min"] = "mean"  # combination of an ensemble's scores
    std_coef: NonNegativeFloat = 0.0  # with mean: penalty for the standard deviation
    precision: PrecisionConfig = PrecisionConfig()
    offload: Literal["none", "all"] = "none"  # all: keep parameters in host memory while they are not needed


class RewardConfig(Section):
    """The reward of a response. A function is the name of a built-in (exact_match, sorted_digits, arithmetic, math,
    multiple_choice, code, format, length, overlong, environment, reasoning_gym) or `path/to/file.py:name`.

    `manager` selects the scoring:

    - naive: `function`, or the entry of `functions` for the row's data_source
    - dapo: as naive, plus the built-in `overlong`
    - batch: `function` is called once with all samples: f(prompts, responses, rows), one score each
    - remote: the one server of `servers`
    - model: `model`, or the one server of `servers` with a reward model (api sglang)
    - recipe: a weighted sum. `recipe` lists, for each data_source ("*": for any other), components and their weights.
      Components are functions, names of `servers`, `model`, and `batch` (`function`, called once with all samples)
    """

    manager: Literal["naive", "dapo", "batch", "remote", "model", "recipe"] = "naive"  # way of scoring; see the section
    function: FilePath | None = None  # a built-in's name or path/to/file.py:name
    functions: dict[str, FilePath] = {}  # data source -> function
    recipe: dict[str, dict[str, float]] = {}  # data source ("*": any other) -> component -> weight
    servers: dict[str, ServerConfig] = {}  # name -> scorer behind HTTP
    model: RewardModelConfig | None = None
    format: FormatConfig = FormatConfig()
    length: LengthConfig | None = None
    overlong: OverlongConfig | None = None
    code: CodeConfig = CodeConfig()
    # pass the prompt's images to the reward too: functions of files take (prompt, response, row, pictures), with lists
    # of PIL images resized as for the model; servers with api mrl get "pictures", each a PNG in base64
    pictures: bool = False
    workers: Annotated[int, Field(gt=0, le=1024)] = 2  # processes that run functions
    timeout_s: PositiveFloat = 30.0  # maximum seconds of one call of a function
    # if scoring a sample fails (timeout, exception): stop ends the run; leave_out removes the sample from baselines,
    # advantages, losses and means; zero scores 0, which penalizes responses that were not judged: prefer leave_out.
    # Both are counted in reward/failed. A response that a built-in cannot judge (a power tower in `math`) is left out,
    # unless zero is set
    on_error: Literal["stop", "leave_out", "zero"] = "stop"
    # score of responses truncated by rollout.sampling.max_new_tokens, such as 0 to train the policy to stop; null: the
    # score of the reward
    truncated_score: float | None = None
