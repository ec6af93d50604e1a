"""PPO with a critic and callbacks: python examples/ppo_with_callbacks.py MODEL_DIR RUN_ROOT [TENSOR PIPELINE]"""

import sys

from mrl import PPOTrainer, TrainerCallback


class StopAtReward(TrainerCallback):
    """Ends the run once the mean reward of a step has reached a value."""

    def __init__(self, reward):
        self.reward = reward

    def on_step_end(self, state, metrics):
        state.should_stop = metrics["reward/mean"] >= self.reward


class Report(TrainerCallback):
    """Prints what happens, on rank 0."""

    def on_rollout(self, state, rollout):
        if state.is_main:
            print(f"step {state.step + 1}: {rollout.num_samples} samples, best score {rollout.scores.max():.2f}")

    def on_evaluate(self, state, metrics):
        if state.is_main:
            print(f"validation after step {state.step}: {metrics['validation/mean']:.3f}")

    def on_save(self, state, path):
        if state.is_main:
            print(f"saved {path}")


def lower_case(prompt, response, row):
    """Returns the share of lower-case letters."""
    return sum(letter.islower() for letter in response) / max(1, len(response))


def questions(first, last):
    """Yields rows; a data set may be any finite iterator."""
    for n in range(first, last):
        yield {"prompt": f"{n} + {n} ="}


if __name__ == "__main__":
    model, root, tensor, pipeline = (*sys.argv[1:], 1, 1)[:4]
    layout = {"tensor": int(tensor), "pipeline": int(pipeline)}
    trainer = PPOTrainer(
        {
            "run": {"name": "ppo", "root": root, "steps": 4, "trackers": []},
            "model": {"path": model, "dtype": "float32"},
            "actor": {"parallel": layout, "optimizer": {"lr": 1e-3}},
            "critic": {"parallel": layout, "optimizer": {"lr": 1e-3}},
            "data": {"max_prompt_tokens": 32},
            "batch": {"prompts_per_step": 8, "samples_per_prompt": 1},
            "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 16}},  # sglang on GPUs
            "algorithm": {"adv_estimator": "gae"},
            "validation": {"every_steps": 2},
            "checkpoint": {"every_steps": 2},
        },
        reward_fn=lower_case,
        train_dataset=questions(0, 64),
        val_dataset=questions(64, 68),
        callbacks=[StopAtReward(0.9), Report()],
    )
    result = trainer.fit()
    print(f"{result.run_dir}: mean reward {result.metrics['reward/mean']:.3f} after {result.steps} steps")
