"""Names of the built-in rewards and the modules that define them.

Uses the standard library only, because reward workers read this table when they start.
"""

from __future__ import annotations

COMPARISONS = {  # f(response, answer); the answer comes from the row
    "exact_match": "mrl.reward.functions",
    "sorted_digits": "mrl.reward.functions",
    "arithmetic": "mrl.reward.functions",
    "math": "mrl.reward.math_answer",
    "multiple_choice": "mrl.reward.functions",
}
SHAPES = dict.fromkeys(("format", "length", "overlong"), "mrl.reward.functions")  # f(response, tokens, **its section)
OF_LENGTH = ("length", "overlong")  # these score the length of a response only, not its content
PARTS = {"sorted_digits": ("exact_match", "right_positions"), "code": ("tests_passed",)}  # logged besides the score
OF_AGENTS = ("environment",)  # the score that an agent's environment returns
OF_TASKS = ("reasoning_gym",)  # the library's own score, for data of `reasoning_gym:TASK`
WITH_SECTION = ("code", *SHAPES)  # each of these has a settings section under `reward`
BUILTIN_REWARDS = (*COMPARISONS, *WITH_SECTION, *OF_AGENTS, *OF_TASKS)
IMAGE_SCORER = "scorer"  # built-in reward of images; trainer ddpo has the section `reward.scorer` for it
RESERVED = ("mean", "std", "failed")  # names of the metrics that every reward logs
