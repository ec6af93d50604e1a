"""Writes the task of yaml_configs/quickstart_agent*.yaml: guess a number.

    python tools/make_guess_task.py OUT_DIR [--rows 7]

OUT_DIR/model_init: config.json of a 2-layer Llama and a tokenizer with one token per character, without weights.
OUT_DIR/train.jsonl, validation.jsonl: rows {"prompt": "?", "number": 3}, with each number from 0 to 6 equally often.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from make_sort_task import MODEL

NUMBERS = 7
VOCABULARY = ["<pad>", "<eos>", "<unk>", "?", "<", ">", *map(str, range(10))]  # 16 tokens


def write_model(out: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names).save_pretrained(out)
    model = MODEL | {"vocab_size": len(VOCABULARY), "eos_token_id": vocabulary["<eos>"], "max_position_embeddings": 32}
    (out / "config.json").write_text(json.dumps(model, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=NUMBERS)
    args = parser.parse_args()
    write_model(args.out / "model_init")
    for name, count in (("train", args.rows), ("validation", 10 * NUMBERS)):
        rows = ({"prompt": "?", "number": row % NUMBERS} for row in range(count))
        (args.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
