"""Workload of both sides of `preference_vs_trl.py`: model, tokenizer, pairs. Imports neither mrl nor TRL.

A character is a token, and a text ends with an EOS token. `even`: all responses have the same length; `uneven`: their
lengths are log-normal, like those of real answers.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

VOCAB = 512
PAIRS_PER_STEP = 16
PROMPT_TOKENS = 16
EVEN_TOKENS = 64  # length of an even response, EOS included
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 40, 0.9, 384  # of uneven responses; SPREAD: standard deviation of log(length)
LEARNING_RATE = 1e-4
EOS = "<|endoftext|>"  # transformers adds this token to every Qwen2 tokenizer that lacks it
BETA = 0.1
CENTRING = 0.01  # center_rewards_coefficient
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "initializer_range": 0.05,
}
Pair = dict[str, str]


def make(directory: Path, steps: int, seed: int = 1) -> int:
    """Writes the workload; returns the number of the model's parameters.

    directory/model, directory/judge: the model, and its body with a score head. directory/even.jsonl, uneven.jsonl: as
    many pairs as `steps` steps use.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**MODEL)).float()
    model.save_pretrained(directory / "model")
    judge = Qwen2ForSequenceClassification(Qwen2Config(**MODEL, num_labels=1)).float()
    judge.model.load_state_dict(model.model.state_dict())
    judge.save_pretrained(directory / "judge")
    for name in ("model", "judge"):
        _tokenizer().save_pretrained(directory / name)
    for kind in ("even", "uneven"):
        rows = pairs(kind, steps * PAIRS_PER_STEP, seed)
        (directory / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(p.numel() for p in model.parameters())


def pairs(kind: str, count: int, seed: int) -> list[Pair]:
    rng = random.Random(f"{kind} {seed}")

    def response() -> str:
        length = EVEN_TOKENS
        if kind == "uneven":
            length = min(MAX_TOKENS, max(4, round(MEDIAN_TOKENS * math.exp(rng.gauss(0, SPREAD)))))
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length - 1))

    def prompt() -> str:
        return "".join(rng.choices("0123456789+-", k=PROMPT_TOKENS - 1)) + "="

    return [{"prompt": prompt(), "chosen": response(), "rejected": response()} for _ in range(count)]


def tokens_by_step(directory: Path, kind: str) -> list[int]:
    """Returns the tokens of each step's pairs: both responses with their prompts and EOS."""
    rows = [json.loads(line) for line in (directory / f"{kind}.jsonl").read_text().splitlines()]
    lengths = [2 * len(row["prompt"]) + len(row["chosen"]) + len(row["rejected"]) + 2 for row in rows]
    return [sum(lengths[i : i + PAIRS_PER_STEP]) for i in range(0, len(lengths), PAIRS_PER_STEP)]


def _tokenizer() -> Any:
    """Returns a tokenizer of bytes, filler tokens, and EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{i}>" for i in range(VOCAB - 1 - len(pieces))] + [EOS]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token=EOS)
