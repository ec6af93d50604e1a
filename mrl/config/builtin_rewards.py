"""The built-in rewards by name, and where each stands. The standard library only: reward workers start with it."""

from __future__ import annotations

COMPARISONS = {  # f(response, answer), the answer being the row's
    "exact_match": "mrl.reward.functions",
    "sorted_digits": "mrl.reward.functions",
    "arithmetic": "mrl.reward.functions",
    "math": "mrl.reward.math_answer",
    "multiple_choice": "mrl.reward.functions",
}
SHAPES = dict.fromkeys(("format", "length", "overlong"), "mrl.reward.shaping")  # f(response, tokens, **its section)
OF_LENGTH = ("length", "overlong")  # what a response says does not matter to them
PARTS = {"sorted_digits": ("exact_match", "right_positions"), "code": ("tests_passed",)}  # beside the score
OF_AGENTS = ("environment",)  # what an agent's environment has said
WITH_SECTION = ("code", *SHAPES)  # `reward` has a section of settings for each
BUILTIN_REWARDS = (*COMPARISONS, *WITH_SECTION, *OF_AGENTS)
IMAGE_SCORER = "scorer"  # of images: `reward` of trainer ddpo has a section for it
RESERVED = ("mean", "std", "failed")  # metrics beside the components' scores and their parts
