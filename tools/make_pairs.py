"""Makes preference pairs from a model's own scored answers, as `mrl eval --per-prompt N` writes them to eval.json.

    python tools/make_pairs.py EVAL_JSON OUT_DIR [--right-from 1] [--pairs 4] [--held-out 16] [--seed 0]

OUT_DIR/train.jsonl and held_out.jsonl: rows {"prompt", "chosen", "rejected"}. The prompts contain the chat template
already, so data.chat_template must be false. Each prompt with right and wrong answers gives up to `--pairs` pairs;
each answer is used once. All pairs of `--held-out` such prompts are held out.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def pairs_of(sample: dict, right_from: float, most: int) -> list[dict[str, str]]:
    """Returns the pairs of one prompt."""
    scored = list(zip(sample["responses"], sample["scores"], strict=True))
    right = [text for text, score in scored if score >= right_from]
    wrong = [text for text, score in scored if score < right_from]
    pairs = zip(right[:most], wrong, strict=False)
    return [{"prompt": sample["prompt"], "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("eval_json", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--right-from", type=float, default=1.0, help="lowest score of a right answer (default: 1)")
    parser.add_argument("--pairs", type=int, default=4, help="most pairs of one prompt (default: 4)")
    parser.add_argument("--held-out", type=int, default=16, help="prompts whose pairs are held out (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    samples = json.loads(args.eval_json.read_text())["samples"]
    by_prompt = [pairs for sample in samples if (pairs := pairs_of(sample, args.right_from, args.pairs))]
    if len(by_prompt) <= args.held_out:
        raise SystemExit(
            f"{args.eval_json}: {len(by_prompt)} prompts with right and wrong answers, and {args.held_out} are held out"
            ": sample more answers (mrl eval --per-prompt)"
        )
    random.Random(args.seed).shuffle(by_prompt)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("held_out", by_prompt[: args.held_out]), ("train", by_prompt[args.held_out :])):
        rows = [json.dumps(pair) + "\n" for pairs in prompts for pair in pairs]
        (args.out / f"{name}.jsonl").write_text("".join(rows))
        print(f"{args.out / f'{name}.jsonl'}: {len(rows)} pairs of {len(prompts)} prompts")


if __name__ == "__main__":
    main()
