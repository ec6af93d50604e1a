"""GRPO workloads for mrl and TRL: model, tokenizer, prompts, reward. Imports neither mrl nor TRL.

The EOS token has about the same probability at every position: one channel is equal in all embeddings except the EOS
token's. With `ends_after`, response lengths are therefore geometric on both sides. Otherwise EOS is never sampled, so
responses have exactly `new_tokens` tokens on both sides without masking it.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES_PER_PROMPT = 8
ROWS = 512
LEARNING_RATE = 1e-4
INITIALIZER_RANGE = 0.05
NEVER = 1e20  # mean response length, in tokens
EOS = "<|endoftext|>"  # transformers adds this token to every Qwen2 tokenizer that lacks it


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload.

    new_tokens, prompt_tokens: maximum lengths. ends_after: mean response length; None: all responses have new_tokens,
    and all prompts prompt_tokens. microbatch: samples in TRL's micro-batch. task: a directory of
    tools/make_reasoning_task.py with a pretrained model and prompts; None: both are random.
    """

    vocab: int = 512
    hidden: int = 128
    prompts_per_step: int = 16
    prompt_tokens: int = 16
    new_tokens: int = 64
    ends_after: int | None = None
    microbatch: int = 128
    task: str | None = None

    @property
    def samples(self) -> int:
        return self.prompts_per_step * SAMPLES_PER_PROMPT

    @property
    def eos(self) -> int:
        return self.vocab - 1

    @property
    def model(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256 if self.ends_after is None else self.prompt_tokens + self.new_tokens,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": self.eos,
            "initializer_range": INITIALIZER_RANGE,
        }

    def has_expected_lengths(self, lengths: list[int]) -> bool:
        """Returns whether responses of this shape can have these lengths."""
        if self.ends_after is None:
            return set(lengths) == {self.new_tokens}
        return max(lengths) <= self.new_tokens and 0.5 < sum(lengths) / len(lengths) / self.ends_after < 2


SHAPES = {
    "toy": Shape(),
    "uneven": Shape(prompt_tokens=512, new_tokens=512, ends_after=80, microbatch=16),
    "vocabulary": Shape(vocab=151_936, hidden=256, prompts_per_step=4, microbatch=8),
    "smollm2": Shape(
        vocab=49_152,
        hidden=576,
        prompts_per_step=8,
        prompt_tokens=64,
        new_tokens=12,
        ends_after=4,
        microbatch=16,
        task="runs/quickstart_real_task",
    ),
}


def make(directory: Path, shape: Shape, seed: int = 1) -> int:
    """Writes directory/model and directory/train.jsonl; returns the number of the model's parameters."""
    if shape.task is not None:
        return _pretrained(Path(shape.task), directory)
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**shape.model)).float()
    _set_eos_probability(model, shape, shape.ends_after or NEVER)
    model.save_pretrained(directory / "model")
    _tokenizer(shape).save_pretrained(directory / "model")
    rows = [{"prompt": text, "answer": ""} for text in _prompts(shape, seed)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(p.numel() for p in model.parameters())


def _pretrained(task: Path, directory: Path) -> int:
    """Writes the task's model in float32, and its prompts with the model's chat template applied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = (task / "data" / "train.jsonl").read_text().splitlines()
    conversations = [
        [{"role": "system", "content": row["system"]}, {"role": "user", "content": row["prompt"]}]
        for row in map(json.loads, lines)
    ]
    texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    rows = [{"prompt": text, "answer": ""} for text in texts]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(p.numel() for p in model.parameters())


def share_of_digits(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Returns a reward that differs between samples of a random model, so that advantages are not zero."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def _set_eos_probability(model: Any, shape: Shape, mean: float) -> None:
    """Sets the embeddings such that responses end after `mean` tokens on average."""
    import torch

    channel = 1.0
    with torch.no_grad():
        for layer in model.model.layers:  # no layer may add to the channel
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = channel
        embeddings[shape.eos] = 0
        hidden = model.model(torch.randint(1, shape.eos, (8, 64))).last_hidden_state
        others = (hidden @ embeddings.T).logsumexp(-1).mean()
        embeddings[shape.eos, 0] = (others - math.log(mean)) / hidden[..., 0].mean()


def _tokenizer(shape: Shape) -> Any:
    """Returns a tokenizer of bytes, filler tokens, and the EOS token with id `shape.eos`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{i}>" for i in range(shape.eos - len(pieces))] + [EOS]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token=EOS, padding_side="left")


def _prompts(shape: Shape, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("0123456789+-", k=_prompt_tokens(shape, rng) - 1)) + "=" for _ in range(ROWS)]


def _prompt_tokens(shape: Shape, rng: random.Random) -> int:
    """Returns a prompt length: fixed, or with `ends_after` log-normal with median 64, from 16 to `prompt_tokens`."""
    if shape.ends_after is None:
        return shape.prompt_tokens
    return min(shape.prompt_tokens, max(16, round(rng.lognormvariate(math.log(64), 1))))
