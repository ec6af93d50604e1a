"""Configurations with one mistake in the reward settings, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import Bad

FUNCTION = "  function: exact_match\n"
SERVER = "  servers:\n    judge: {url: 'http://judge:8000/score'}\n"


def bad(id: str, new: str, key: str, says: tuple[str, ...], at: str = "") -> Bad:
    """Returns the valid configuration with its reward section replaced by `new`."""
    return Bad(id, FUNCTION, new, f"reward.{key}", says, at)


BAD_REWARDS = [
    bad("a file alone", "  function: rewards.py\n", "function", ("'rewards.py' is a file", "as in rewards.py:NAME")),
    bad("no function", "  on_error: zero\n", "function", ("required by naive", "reward.manager"), "reward:"),
    bad(
        "servers that nobody asks",
        FUNCTION + SERVER,
        "servers",
        ("no effect", "naive", "reward.manager (default)"),
        "  servers:",
    ),
    bad(
        "a recipe for another manager",
        FUNCTION + "  recipe: {'*': {exact_match: 1.0}}\n",
        "recipe",
        ("no effect", "naive", "reward.manager"),
    ),
    bad(
        "a function of a recipe without batch",
        FUNCTION + "  manager: recipe\n  recipe: {'*': {exact_match: 1.0}}\n",
        "function",
        ("no effect", "no recipe names batch", "reward.manager"),
        "  function:",
    ),
    bad("recipe without one", "  manager: recipe\n", "recipe", ("required by recipe", "reward.manager"), "reward:"),
    bad(
        "an empty recipe",
        "  manager: recipe\n  recipe: {sums: {exact_match: 1.0}, words: {}}\n",
        "recipe",
        ("'words' has no components",),
    ),
    bad(
        "a recipe of something unknown",
        "  manager: recipe\n  recipe: {'*': {exact_macth: 1.0}}\n",
        "recipe",
        ("did you mean exact_match?",),
    ),
    bad(
        "a server that no recipe names",
        "  manager: recipe\n  recipe: {'*': {exact_match: 1.0}}\n" + SERVER,
        "servers.judge",
        ("no effect", "reward.recipe"),
        "    judge:",
    ),
    bad(
        "remote without a server", "  manager: remote\n", "servers", ("exactly one server", "reward.manager"), "reward:"
    ),
    bad(
        "workers that call nothing",
        "  manager: remote\n  workers: 5\n" + SERVER,
        "workers",
        ("no effect", "reward.manager"),
        "  workers:",
    ),
    bad(
        "no address of a server",
        "  manager: remote\n  servers:\n    judge: {url: 'judge:8000'}\n",
        "servers.judge.url",
        ("'judge:8000' is not an address",),
    ),
    bad(
        "a server called like a built-in",
        "  manager: remote\n  servers:\n    math: {url: 'http://judge:8000'}\n",
        "servers.math",
        ("is not allowed",),
    ),
    bad(
        "back-off without retries",
        "  manager: remote\n  servers:\n    judge: {url: 'http://judge:8000', retries: 0, backoff_s: 2.0}\n",
        "servers.judge.backoff_s",
        ("no effect", "reward.servers.judge.retries"),
    ),
    bad(
        "a reward model with another protocol",
        "  manager: model\n" + SERVER,
        "servers.judge.api",
        ("api: sglang", "reward.manager"),
        "    judge:",
    ),
    bad(
        "two functions of one name",
        "  functions: {sums: 'mine.py:score', words: './mine.py:score'}\n",
        "functions",
        ("logged under the name of another",),
    ),
    bad(
        "a function called like a server",
        "  manager: recipe\n  recipe: {'*': {judge: 0.5, 'mine.py:judge': 0.5}}\n" + SERVER,
        "recipe",
        ("'mine.py:judge' would be logged under the name of another component",),
        "  recipe:",
    ),
    bad(
        "a function called like the reward model",
        "  manager: recipe\n  recipe: {'*': {model: 0.5, 'mine.py:model': 0.5}}\n  model: {path: judge}\n",
        "recipe",
        ("'mine.py:model' would be logged under the name of another component",),
        "  recipe:",
    ),
    bad(
        "a function called like what dapo adds",
        "  manager: dapo\n  function: mine.py:overlong\n  overlong: {buffer_tokens: 4}\n",
        "function",
        ("'mine.py:overlong' would be logged under the name of another component",),
        "  function:",
    ),
    bad(
        "a function that is also the batch function",
        "  manager: recipe\n  recipe: {'*': {batch: 0.5, 'mine.py:score': 0.5}}\n  function: mine.py:score\n",
        "function",
        ("'mine.py:score' would be logged under the name of another component",),
    ),
    bad(
        "a server called like a metric",
        "  manager: remote\n  servers:\n    mean: {url: 'http://judge:8000'}\n",
        "servers.mean",
        ("is not allowed",),
    ),
    bad(
        "a pattern that nobody uses",
        FUNCTION + "  format: {pattern: '[a-z]+'}\n",
        "format",
        ("no effect", "built-in format is not used", "reward.manager"),
    ),
    bad(
        "no regular expression",
        "  function: format\n  format: {pattern: '[a-z'}\n",
        "format.pattern",
        ("not a regular expression",),
    ),
    bad("length without lengths", "  function: length\n", "length", ("required by the built-in length",), "reward:"),
    bad(
        "a length that scores 1 and 0",
        "  function: length\n  length: {full_tokens: 4, zero_tokens: 4}\n",
        "length.full_tokens",
        ("must differ", "reward.length.zero_tokens"),
    ),
    bad("dapo without a buffer", FUNCTION + "  manager: dapo\n", "overlong", ("required", "reward.manager"), "reward:"),
    bad(
        "a buffer longer than a response",
        FUNCTION + "  manager: dapo\n  overlong: {buffer_tokens: 9}\n",
        "overlong.buffer_tokens",
        ("9 is longer than a response of at most 8 tokens", "rollout.sampling.max_new_tokens (c.yaml:24)"),
    ),
    bad(
        "programs that outlast their function",
        "  function: code\n  code: {wall_s: 25.0}\n",
        "code.wall_s",
        ("exceed the 30 s", "reward.timeout_s (default)"),
    ),
    bad(
        "no reward model",
        "  manager: model\n",
        "model",
        ("needs exactly one reward model", "got 0", "reward.manager"),
        "reward:",
    ),
    bad(
        "two reward models",
        "  manager: model\n  servers:\n    judge: {url: 'http://judge:8000', api: sglang}\n  model: {path: judge}\n",
        "model",
        ("got 2", "reward.manager"),
    ),
    bad(
        "a policy as the reward model",
        "  manager: model\n  model: {path: dense}\n",
        "model.path",
        ("no score head", "ForSequenceClassification"),
    ),
    bad(
        "a reward model that no recipe names",
        "  manager: recipe\n  recipe: {'*': {exact_match: 1.0}}\n  model: {path: judge}\n",
        "model",
        ("no effect", "reward.recipe"),
    ),
    bad(
        "a reward model that does not fit the layout",
        "  manager: model\n  model: {path: judge, parallel: {context: 3}}\n",
        "model.parallel.context",
        ("3 ranks do not divide", "run.nproc"),
    ),
]
