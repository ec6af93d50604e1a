"""verl's reward managers on padded batches: positions of the scores, extra values and the overlong penalty."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl import reward
from mrl.reward import DAPORewardManager, NaiveRewardManager, compute_reward, load_reward_manager
from mrl.reward.errors import RewardError
from mrl.user_functions import FunctionError


class Digits:
    """A tokenizer in which token i is the digit i - 1; 0 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens and all(type(i) is int for i in ids)
        return "".join(str(i - 1) for i in ids if i)


def batch(**more: Any) -> dict[str, Any]:
    """Returns a batch with prompts 2, 12, 1, responses 34, 5 and an empty one, and right answers 34, 6, 0."""
    return {
        "prompts": torch.tensor([[0, 3], [2, 3], [0, 2]]),
        "responses": torch.tensor([[4, 5, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]),
        "reward_model": [{"ground_truth": "34"}, {"ground_truth": "6"}, {"ground_truth": "0"}],
        "data_source": ["openai/gsm8k"] * 3,
        **more,
    }


def scored(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "pred": solution_str, "info": extra_info}


def test_each_score_is_at_the_last_token_of_its_response() -> None:
    calls: list[dict[str, Any]] = []

    def length(**given: Any) -> float:
        calls.append(given)
        return 10.0 + len(given["solution_str"])

    manager = NaiveRewardManager(Digits(), 0, length)
    tensor, extra = compute_reward(batch(), manager)
    assert tensor.tolist() == [[0, 0, 12, 0], [11, 0, 0, 0], [10, 0, 0, 0]] and tensor.dtype == torch.float32
    assert extra == {}
    first = {"data_source": "openai/gsm8k", "solution_str": "34", "ground_truth": "34", "extra_info": {}}
    assert calls[0] == first and calls[2]["solution_str"] == ""
    assert torch.equal(manager(batch()), tensor)
    given = batch(rm_scores=torch.ones(3, 4))
    assert torch.equal(manager(given), torch.ones(3, 4)) and compute_reward(given, manager)[1] == {}


def test_values_of_a_dict_are_extra_info(capsys: pytest.CaptureFixture[str]) -> None:
    data = batch(extra_info=[{"n": i} for i in range(3)], source=["x", "x", "y"])
    found = NaiveRewardManager(Digits(), 1, scored, reward_fn_key="source")(data, return_dict=True)
    assert isinstance(found, dict)
    assert found["reward_extra_info"] == {
        "score": [1.0, 0.0, 0.0],
        "acc": [1.0, 0.0, 0.0],
        "pred": ["34", "5", ""],
        "info": [{"n": 0}, {"n": 1}, {"n": 2}],
    }
    printed = capsys.readouterr().out
    assert printed.count("[response]") == 2 and "[prompt] 2\n[response] 34\n[ground_truth] 34\n[score] 1.0" in printed


def test_the_default_is_the_built_in_of_the_data_source() -> None:
    tensor = NaiveRewardManager(Digits(), 0)(batch())
    assert isinstance(tensor, torch.Tensor) and tensor.sum(1).tolist() == [1, 0, 0]
    assert reward.default_compute_score("openai/gsm8k", "so it is #### 72", 72) == 1
    for source in ("lighteval/MATH", "math_dapo", "aime2024", "numina_olympiads"):
        assert reward.default_compute_score(source, r"\boxed{\frac{1}{2}}", "0.5") == 1
    with pytest.raises(RewardError, match="no built-in reward for data_source 'mine': pass compute_score"):
        reward.default_compute_score("mine", "", "")


@pytest.mark.parametrize("as_object", [True, False])
def test_dapo_punishes_long_responses(as_object: bool) -> None:
    keys = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    config = SimpleNamespace(**keys) if as_object else keys
    manager = DAPORewardManager(Digits(), 0, scored, max_resp_len=3, overlong_buffer_cfg=config)
    tensor, extra = compute_reward(batch(), manager)
    assert tensor.tolist() == [[0, 0, 1 - 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 0]]  # responses of 3, 1 and 0 tokens
    assert extra["overlong_reward"] == [-0.5, 0.0, 0.0] and extra["overlong"] == [True, False, False]
    assert extra["score"] == [1.0, 0.0, 0.0]
    quiet = DAPORewardManager(Digits(), 0, scored, max_resp_len=3, overlong_buffer_cfg=keys | {"log": False})
    assert (
        torch.equal(compute_reward(batch(), quiet)[0], tensor) and "overlong" not in compute_reward(batch(), quiet)[1]
    )
    off = DAPORewardManager(Digits(), 0, scored, overlong_buffer_cfg=keys | {"enable": False})
    assert off(batch()).tolist() == NaiveRewardManager(Digits(), 0, scored)(batch()).tolist()  # type: ignore[union-attr]
    for length, buffer in ((None, 2), (1, 2), (3, 0)):
        with pytest.raises(ValueError, match="0 < len <= max_resp_len"):
            DAPORewardManager(Digits(), 0, max_resp_len=length, overlong_buffer_cfg=keys | {"len": buffer})
    del keys["penalty_factor"]
    with pytest.raises(ValueError, match="needs penalty_factor"):
        DAPORewardManager(Digits(), 0, max_resp_len=3, overlong_buffer_cfg=keys)


def test_managers_of_verl_s_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1):\n    return scale\n"
    )
    custom = {"path": str(file), "reward_kwargs": {"scale": 7}}
    config = {"reward_model": {"reward_manager": "dapo"}, "custom_reward_function": custom}
    manager = load_reward_manager(config, Digits(), 0, max_resp_len=9)
    assert type(manager) is DAPORewardManager and compute_reward(batch(), manager)[0].sum() == 21
    plain = load_reward_manager(SimpleNamespace(data=SimpleNamespace(reward_fn_key="source")), Digits(), 2)
    assert type(plain) is NaiveRewardManager and (plain.reward_fn_key, plain.num_examine) == ("source", 2)
    with pytest.raises(RewardError, match="'prime' is none of naive, dapo"):
        load_reward_manager({"reward_model": {"reward_manager": "prime"}}, Digits(), 0)
    with pytest.raises(FunctionError, match="defines no 'score'; available: 'compute_score'"):
        load_reward_manager({"custom_reward_function": custom | {"name": "score"}}, Digits(), 0)
    with pytest.raises(FunctionError, match="must take .data_source, .*, weight"):
        load_reward_manager({"custom_reward_function": custom | {"reward_kwargs": {"weight": 1}}}, Digits(), 0)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="the batch has no prompts, reward_model, only responses"):
        incomplete = {key: value for key, value in batch().items() if key not in ("prompts", "reward_model")}
        NaiveRewardManager(Digits(), 0)(incomplete)
    for result, error, says in (
        (math.nan, ValueError, "must be finite"),
        ("1", TypeError, "must be a float"),
        ({"acc": 1}, ValueError, "without 'score', only"),
    ):
        with pytest.raises(error, match=says):
            NaiveRewardManager(Digits(), 0, lambda result=result, **given: result)(batch())


def test_signatures_are_verl_s() -> None:
    naive = ["tokenizer", "num_examine", "compute_score", "reward_fn_key"]
    assert [*inspect.signature(NaiveRewardManager).parameters] == naive
    dapo = [*naive, "max_resp_len", "overlong_buffer_cfg"]
    assert [*inspect.signature(DAPORewardManager).parameters] == dapo
    assert [*inspect.signature(compute_reward).parameters] == ["data", "reward_fn"]
    loader = ["config", "tokenizer", "num_examine", "reward_kwargs"]
    assert [*inspect.signature(load_reward_manager).parameters] == loader
