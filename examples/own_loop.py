"""GRPO as a loop of your own, with a baseline of your own: python examples/own_loop.py MODEL_DIR [TENSOR PIPELINE]

Several ranks: torchrun --nproc-per-node 4 examples/own_loop.py MODEL_DIR 2 2
"""

import json
import sys

import torch

from mrl.api import Session

STEPS, PROMPTS, SAMPLES = 5, 4, 4  # responses to each prompt
CLIP = 0.2


def lower_case(text):
    """Returns the share of lower-case letters."""
    return sum(letter.islower() for letter in text) / max(1, len(text))


def advantages_of(rollout):
    """Returns [batch]: each score minus a baseline, over the standard deviation of its group.

    The baseline is yours to change. The mean of the group is GRPO's.
    """
    groups = rollout.scores.double().view(-1, SAMPLES)
    baseline = groups.mean(1, keepdim=True)
    return ((groups - baseline) / (groups.std(1, keepdim=True) + 1e-6)).flatten().float()


def grpo_loss(advantages, old_log_probs):
    """Returns a loss function: PPO's clipped objective, averaged over all tokens. Both vectors are flat [R]."""

    def loss(log_probs, entropy, batch):
        advantage = batch.take(advantages)
        ratio = (log_probs - batch.take(old_log_probs)).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratio * advantage, clipped * advantage).sum(), log_probs.numel()

    return loss


def main(model, tensor=1, pipeline=1):
    session = Session.from_model(
        model,
        tensor=int(tensor),
        pipeline=int(pipeline),
        lr=1e-3,
        dtype="float32",
        max_new_tokens=16,
        engine="transformers",  # sglang on GPUs
    )
    with session as s:
        for step in range(STEPS):
            prompts = [f"{n} + {n} =" for n in range(step * PROMPTS, (step + 1) * PROMPTS)]
            samples = s.engine.generate(prompts, n=SAMPLES)
            for sample in samples:
                sample.score = lower_case(sample.response_text)
            rollout = s.batch(samples)

            of_sample = advantages_of(rollout)
            of_token = of_sample.repeat_interleave(rollout.response_lens)
            metrics = s.policy.update(rollout, grpo_loss(of_token, s.policy.log_probs(rollout)))
            metrics |= s.policy.optim_step()
            s.sync()
            if s.is_main:
                print(json.dumps({"step": step + 1, "reward": rollout.scores.mean().item(), **metrics}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
