"""A user's reward is a function in a file; a new built-in reward needs one file and a line in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.config.schema import RewardConfig
from mrl.reward.manager import RewardManager
from tests.helpers.recipe import Recipe, section
from tests.system.reward.test_reward_pool import sample

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.system.reward.test_reward_pool import sample
from mrl.config.checks.reward import check_functions
from mrl.config.schema import DataConfig, RewardConfig
from mrl.reward.manager import RewardManager
from mrl.reward.check import row_check

cfg = RewardConfig(function="brevity", workers=1)
assert list(check_functions(cfg)) == []
(near,) = check_functions(RewardConfig(function="brevty"))
assert "brevity" in near.message, near
samples = [sample(i, response, {"answer": "42"}) for i, response in enumerate(["42", "it is 42 !", "no"])]
with RewardManager(cfg) as manager:
    manager.collect(samples)
refused = row_check(cfg, DataConfig(train="train.jsonl"))({"prompt": "?", "answer": " "})
print([one.score for one in samples], refused)
"""


def test_a_function_of_one_s_own(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(def brief.*?)```", section("A reward"), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    samples = [sample(i, response, {"answer": "42"}) for i, response in enumerate(["it is 42", "no"])]
    with RewardManager(RewardConfig(function=f"{tmp_path}/mine.py:brief", workers=1)) as manager:
        manager.collect(samples)
    assert [(one.score, one.score_parts) for one in samples] == [(1.0, {"words": 3.0}), (0.0, {"words": 1.0})]


def test_the_recipe_of_a_built_in_is_one_file_and_one_line(tmp_path: Path) -> None:
    recipe = Recipe("A reward", tmp_path)
    assert (len(recipe.new), len(recipe.changed)) == (1, 1)


@pytest.mark.slow
def test_the_recipe_of_a_built_in(tmp_path: Path) -> None:
    recipe = Recipe("A reward", tmp_path)
    said = recipe.run(CODE, Path(__file__).parent)
    assert said == "[1.0, 0.25, 0.0] the answer ' ' has no words\n"
