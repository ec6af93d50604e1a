"""verl's reward managers by name: they score a padded batch of token ids in this process, and return token rewards.

verl's DataProto becomes a plain dict with the same keys, tensors and lists together:

- prompts [batch, prompt_len] and responses [batch, response_len]: token ids, padded on the left and on the right
- attention_mask [batch, prompt_len + response_len]
- reward_model: for each response a dict with "ground_truth"
- data_source (`reward_fn_key`), and extra_info if there is any: one item per response
- rm_scores [batch, response_len], if the rewards are already there

A scoring function has verl's form, f(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict
with "score" and further values. It runs without a sandbox and without a timeout. A training run scores with
`mrl.reward.manager.RewardManager` in worker processes instead, as the section `reward` of its configuration says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mrl import user_functions
from mrl.reward import functions, loading
from mrl.reward.errors import RewardError
from mrl.reward.score_requests import ScoreRequest
from mrl.verl_config import read

if TYPE_CHECKING:
    from torch import Tensor

GRADERS = {  # verl's data sources -> built-in rewards
    "openai/gsm8k": "arithmetic",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), "math"),
}
MATH_PREFIXES = ("aime", "numina_")


def default_compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Scores a response by the data source's built-in reward: 1.0 if it is right, else 0.0.

    openai/gsm8k takes `arithmetic`; the MATH, DAPO, AIME and NuminaMath sources take `math`. verl's math_dapo gives -1
    to a wrong answer, and its gsm8k accepts an answer after "####" only.

    Raises:
        RewardError: For another data source, or if `math` reaches no verdict.
        ValueError: For an unreadable answer.
    """
    spec = GRADERS.get(data_source) or ("math" if data_source.startswith(MATH_PREFIXES) else None)
    if spec is None:
        raise RewardError(f"no built-in reward for data_source {data_source!r}: pass compute_score")
    return float(loading.load(spec)(ScoreRequest("", solution_str, {"answer": ground_truth})))


@dataclass(eq=False)
class NaiveRewardManager:
    """Scores each response by itself; see the module for the batch and for `compute_score`."""

    tokenizer: Any  # of transformers, such as `mrl.data.hf_tokenizer` loads
    num_examine: int  # number of responses to print per data source and call
    compute_score: Callable[..., Any] | None = None  # None: `default_compute_score`
    reward_fn_key: str = "data_source"  # key of the data sources

    def __call__(self, data: Mapping[str, Any], return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Returns the token rewards of a batch; with `return_dict` a dict of "reward_tensor" and "reward_extra_info".

        Returns:
            [batch, response_len] float32: each score at its response's last token, in column 0 for an empty response
            (verl drops it there). reward_extra_info: lists of the values in the dicts that compute_score returned.

        Raises:
            ValueError: For a missing key, or a score that is not finite.
            TypeError: For a score that is no number.
        """
        if "rm_scores" in data:
            found = {"reward_tensor": data["rm_scores"], "reward_extra_info": {}}
        else:
            found = self._score(data)
        return found if return_dict else found["reward_tensor"]

    def _score(self, data: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        required = ("prompts", "responses", "attention_mask", "reward_model", self.reward_fn_key)
        if missing := [key for key in required if key not in data]:
            raise ValueError(f"the batch has no {', '.join(missing)}, only {', '.join(data)}")
        rewards = torch.zeros_like(data["responses"], dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        shown: Counter[str] = Counter()
        masks = data["attention_mask"].bool().split((data["prompts"].shape[1], rewards.shape[1]), dim=1)
        for i, (source, model) in enumerate(zip(data[self.reward_fn_key], data["reward_model"], strict=True)):
            prompt, response = (
                self.tokenizer.decode(data[key][i][mask[i]].tolist(), skip_special_tokens=True)
                for key, mask in zip(("prompts", "responses"), masks, strict=True)
            )
            result = (self.compute_score or default_compute_score)(
                data_source=source,
                solution_str=response,
                ground_truth=model["ground_truth"],
                extra_info=data["extra_info"][i] if "extra_info" in data else {},
            )
            values = result if isinstance(result, Mapping) else {"score": result}
            if "score" not in values:
                raise ValueError(f"compute_score returned a dict without 'score', only {sorted(map(str, values))}")
            rewards[i, max(int(masks[1][i].sum()) - 1, 0)] = loading.check_result(values["score"]).score
            for key, value in values.items() if values is result else ():
                extra[key].append(value)
            shown[source] += 1
            if shown[source] <= self.num_examine:
                print(f"[prompt] {prompt}\n[response] {response}\n[ground_truth] {model['ground_truth']}")
                print("\n".join(f"[{key}] {value}" for key, value in values.items()))
        return {"reward_tensor": rewards, "reward_extra_info": dict(extra)}


@dataclass(eq=False)
class DAPORewardManager(NaiveRewardManager):
    """`NaiveRewardManager` with DAPO's soft overlong punishment (arXiv 2503.14476) added to each score.

    Raises:
        ValueError: If the punishment is enabled, and max_resp_len or penalty_factor is missing or len is not in
            1..max_resp_len.
    """

    max_resp_len: int | None = None  # length at which the punishment is -penalty_factor, in tokens
    # Object or mapping with enable, len (tokens over which the punishment grows), penalty_factor, and log, which adds
    # overlong_reward and overlong to reward_extra_info; None: no punishment.
    overlong_buffer_cfg: Any = None

    def __post_init__(self) -> None:
        cfg, longest = self.overlong_buffer_cfg, self.max_resp_len
        self.overlong: dict[str, Any] = {}
        if read(cfg, "enable"):
            buffer, factor = read(cfg, "len"), read(cfg, "penalty_factor")
            if longest is None or buffer is None or not 0 < buffer <= longest:
                raise ValueError(f"overlong_buffer_cfg needs 0 < len <= max_resp_len, got {buffer} and {longest}")
            if factor is None:
                raise ValueError("overlong_buffer_cfg.enable needs penalty_factor; DAPO takes 1.0")
            self.overlong = {"max_tokens": longest, "buffer_tokens": buffer, "penalty_factor": factor}

    def _score(self, data: Mapping[str, Any]) -> dict[str, Any]:
        found = super()._score(data)
        if self.overlong:
            lengths = data["attention_mask"][:, data["prompts"].shape[1] :].sum(1).tolist()
            penalties = [functions.overlong("", length, **self.overlong) for length in lengths]
            for row, length, penalty in zip(found["reward_tensor"], lengths, penalties, strict=True):
                row[max(length - 1, 0)] += penalty
            if read(self.overlong_buffer_cfg, "log"):
                overlong = [penalty < 0 for penalty in penalties]
                found["reward_extra_info"] |= {"overlong_reward": penalties, "overlong": overlong}
        return found


MANAGERS: dict[str, type[NaiveRewardManager]] = {"naive": NaiveRewardManager, "dapo": DAPORewardManager}


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any) -> NaiveRewardManager:
    """Makes the reward manager of a verl configuration.

    Args:
        config: Object or mapping with verl's keys, all optional: reward_model.reward_manager ("naive" or "dapo"),
            custom_reward_function with path, name and reward_kwargs, and data.reward_fn_key.
        tokenizer, num_examine: As in `NaiveRewardManager`.
        **reward_kwargs: Further arguments of the manager, such as max_resp_len.

    Raises:
        RewardError: For another manager: `batch`, remote servers and reward models are in `mrl.reward.manager`.
        mrl.user_functions.FunctionError: If the custom function cannot be loaded.
    """
    name = read(config, "reward_model", "reward_manager") or "naive"
    if name not in MANAGERS:
        raise RewardError(f"reward_model.reward_manager: {name!r} is none of {', '.join(MANAGERS)}")
    compute_score, custom = None, read(config, "custom_reward_function")
    if path := read(custom, "path"):
        more = dict(read(custom, "reward_kwargs") or {})
        named = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info")) | more
        spec, signature = f"{path}:{read(custom, 'name') or 'compute_score'}", f"({', '.join(named)})"
        compute_score = partial(user_functions.load(spec, "custom_reward_function", (), signature, named), **more)
    key = read(config, "data", "reward_fn_key") or "data_source"
    return MANAGERS[name](tokenizer, num_examine, compute_score, key, **reward_kwargs)


def compute_reward(data: Mapping[str, Any], reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, list[Any]]]:
    """Scores a batch with a reward manager.

    Args:
        data: The batch; see the module.
        reward_fn: Manager, or a function of (data, return_dict=True) with such a result.

    Returns:
        (token rewards [batch, response_len], reward_extra_info). An exception in `reward_fn` is raised; verl prints
        it and calls `reward_fn` again.
    """
    found = reward_fn(data, return_dict=True)
    return found["reward_tensor"], found.get("reward_extra_info", {})
