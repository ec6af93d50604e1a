"""How many answers of a model are a data set's: the likeliest ones, and those drawn at temperature 1.

    python tools/exact_match.py MODEL_DIR DATA.jsonl [--rows 256 --max-new-tokens 8]

Rows are {"prompt": ..., "answer": ...}; transformers generates, one token after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path


def shares(model_dir: Path, rows: list[dict[str, str]], max_new_tokens: int) -> tuple[float, float]:
    """(likeliest, drawn): of the rows whose answer the model gives, up to its EOS."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float32)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    found = []
    for draws in (False, True):
        made = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=draws,
            top_k=0 if draws else None,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append(sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    args = parser.parse_args()
    with args.data.open() as file:
        rows = [json.loads(line) for line in itertools.islice(file, args.rows)]
    likeliest, drawn = shares(args.model_dir, rows, args.max_new_tokens)
    print(
        f"{args.model_dir}: right of {len(rows)}: {likeliest:.3f} of the likeliest answers, {drawn:.3f} of those drawn"
    )


if __name__ == "__main__":
    main()
