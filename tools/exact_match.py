"""Measures the accuracy of a model's answers by exact match: greedy ones, and ones sampled at temperature 1.

    python tools/exact_match.py MODEL_DIR DATA.jsonl [--rows 256 --max-new-tokens 8]

Rows are {"prompt": ..., "answer": ...}; transformers generates the answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path


def accuracy(model_dir: Path, rows: list[dict[str, str]], max_new_tokens: int) -> tuple[float, float]:
    """Returns the shares of rows whose greedy answer, and whose sampled answer, is right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float32)
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    accuracies = []
    for do_sample in (False, True):
        tokens = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            top_k=0 if do_sample else None,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        accuracies.append(sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows))
    return accuracies[0], accuracies[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    args = parser.parse_args()
    with args.data.open() as file:
        rows = [json.loads(line) for line in itertools.islice(file, args.rows)]
    greedy, sampled = accuracy(args.model_dir, rows, args.max_new_tokens)
    print(f"{args.model_dir}: accuracy on {len(rows)} rows: greedy {greedy:.3f}, sampled {sampled:.3f}")


if __name__ == "__main__":
    main()
