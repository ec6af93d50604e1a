"""A multi-turn environment of the verifiers package: guess a number; the environment answers higher or lower."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class HigherLower(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess, number = messages[-1]["content"], state["info"]["number"]
        state["heard"] = state.get("heard", 0) + 1
        return [{"role": "user", "content": "higher" if guess < str(number) else "lower"}]


def load_environment(max_turns: int = 3) -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": "guess"}], "info": {"number": n}} for n in (20, 50, 80)]

    def closeness(completion: Any, info: dict[str, Any]) -> float:
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return 1.0 - abs(int(said[-1]) - info["number"]) / 100

    def answers(state: Any) -> float:
        return float(state.get("heard", 0))

    rubric = vf.Rubric(funcs=[closeness, answers], weights=[1.0, 0.0])
    return HigherLower(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
