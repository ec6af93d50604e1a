"""GRPO with a reward and rows in Python: python examples/grpo_script.py MODEL_DIR RUN_ROOT [TENSOR PIPELINE]"""

import sys

from mrl import GRPOTrainer


def lower_case(prompt, response, row):
    """Returns the share of lower-case letters."""
    return sum(letter.islower() for letter in response) / max(1, len(response))


if __name__ == "__main__":
    model, root, tensor, pipeline = (*sys.argv[1:], 1, 1)[:4]
    config = {
        "run": {"name": "grpo", "root": root, "steps": 5, "trackers": []},
        "model": {"path": model, "dtype": "float32"},
        "actor": {"parallel": {"tensor": int(tensor), "pipeline": int(pipeline)}, "optimizer": {"lr": 1e-3}},
        "data": {"max_prompt_tokens": 32},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 16}},  # sglang on GPUs
        "algorithm": {"adv_estimator": "grpo"},
    }
    rows = [{"prompt": f"{n} + {n} ="} for n in range(64)]
    result = GRPOTrainer(config, reward_fn=lower_case, train_dataset=rows).fit()
    print(f"{result.run_dir}: mean reward {result.metrics['reward/mean']:.3f} after {result.steps} steps")
