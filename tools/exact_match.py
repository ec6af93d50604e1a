"""How many answers of a model are a data set's, without sampling.

    python tools/exact_match.py MODEL_DIR DATA.jsonl [--rows 256 --max-new-tokens 8]

Rows are {"prompt": ..., "answer": ...}; transformers generates, one token after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path


def share(model_dir: Path, rows: list[dict[str, str]], max_new_tokens: int) -> float:
    """Of the rows whose answer the model gives, up to its EOS."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float32)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    made = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    args = parser.parse_args()
    with args.data.open() as file:
        rows = [json.loads(line) for line in itertools.islice(file, args.rows)]
    print(f"{args.model_dir}: {share(args.model_dir, rows, args.max_new_tokens):.3f} of {len(rows)} answers are right")


if __name__ == "__main__":
    main()
