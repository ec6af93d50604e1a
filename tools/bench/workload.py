"""The workload that both sides of the comparison run: model, tokenizer, prompts, reward. Needs neither mrl nor TRL.

Every response has exactly `NEW_TOKENS` tokens on both sides: the end-of-sequence token's id lies just behind the
model's vocabulary, so no logit belongs to it and nothing has to be masked or ignored while sampling.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCAB = 512
PROMPTS_PER_STEP = 16
SAMPLES_PER_PROMPT = 8
NEW_TOKENS = 64
PROMPT_TOKENS = 16
ROWS = 512
LEARNING_RATE = 1e-4
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": VOCAB,
    "initializer_range": 0.05,
}


def make(directory: Path, seed: int = 1) -> int:
    """Writes directory/model and directory/train.jsonl; returns the number of the model's parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**MODEL)).float()
    model.save_pretrained(directory / "model")
    _tokenizer().save_pretrained(directory / "model")
    rows = [{"prompt": text, "answer": ""} for text in _prompts(seed)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(p.numel() for p in model.parameters())


def share_of_digits(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Differs between samples of a random model, so that advantages and gradients are not zero."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def _tokenizer() -> Any:
    """Bytes, filler up to VOCAB - 1, and the end token at VOCAB."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{i}>" for i in range(VOCAB - len(pieces))] + ["<eos>"]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def _prompts(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("0123456789+-", k=PROMPT_TOKENS - 1)) + "=" for _ in range(ROWS)]
