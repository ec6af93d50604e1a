"""An environment that the verifiers package ships, for problems of reasoning-gym."""

from __future__ import annotations

import verifiers as vf


def load_environment(num_train_examples: int = 4, num_eval_examples: int = 2) -> vf.Environment:
    return vf.ReasoningGymEnv(
        gym="chain_sum", num_train_examples=num_train_examples, num_eval_examples=num_eval_examples, seed=3
    )
