"""Write a task that a tiny model learns on a laptop: sort the digits of a number.

    python tools/make_sort_task.py OUT_DIR [--digits 5 --train-rows 20000 --validation-rows 512 --seed 0 --sizes FILE]

OUT_DIR/model_init: config.json of an 85k-parameter Llama and a character-level tokenizer, no weights;
with --sizes that config.json, such as one below yaml_configs/models, with this tokenizer's special tokens.
OUT_DIR/data: train.jsonl and validation.jsonl with rows {"prompt": "31542=", "answer": "12345"}; no validation prompt
is in the training file. pairs.jsonl: {"prompt": "31542=", "chosen": "12345", "rejected": "12435"}, of the training
prompts; what is rejected has two of its digits exchanged.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = list("0123456789=+-")
VOCABULARY = SPECIAL + CHARACTERS  # 16: divides by every tensor-parallel size a laptop runs

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "pad_token_id": VOCABULARY.index("<pad>"),
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index("<eos>"),
    "use_cache": True,
    "torch_dtype": "float32",
}

IDS = ("pad_token_id", "bos_token_id", "eos_token_id")  # the tokenizer's, whatever the model


def write_model(out: Path, sizes: Path | None) -> None:
    """config.json, the sizes of another model's if one is given, and a fast tokenizer with one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = MODEL if sizes is None else json.loads(sizes.read_text()) | {name: MODEL[name] for name in IDS}
    if model["vocab_size"] < len(VOCABULARY):
        raise SystemExit(f"{sizes}: vocab_size {model['vocab_size']}, but the tokenizer has {len(VOCABULARY)} tokens")
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=model["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(out))
    (out / "config.json").write_text(json.dumps(model, indent=2) + "\n")


def write_data(out: Path, digits: int, train_rows: int, validation_rows: int, seed: int) -> None:
    """Distinct random numbers of `digits` digits (leading zeros allowed), cut into the two files."""
    needed = train_rows + validation_rows
    if needed > 10**digits:
        raise SystemExit(
            f"{needed} different rows asked for, but there are only {10**digits} numbers of {digits} digits"
        )
    out.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed).sample(range(10**digits), needed)
    texts = [f"{n:0{digits}d}" for n in numbers]
    for name, part in (("validation", texts[:validation_rows]), ("train", texts[validation_rows:])):
        rows = (json.dumps({"prompt": f"{t}=", "answer": "".join(sorted(t))}) for t in part)
        (out / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    pairs = (spoiled(text, random.Random(f"{seed} {text}")) for text in texts[validation_rows:])
    (out / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs if row is not None))


def spoiled(text: str, draw: random.Random) -> dict[str, str] | None:
    """A pair; None for a number of equal digits, whose order cannot be wrong."""
    right = sorted(text)
    places = [(i, j) for i in range(len(text)) for j in range(i) if right[i] != right[j]]
    if not places:
        return None
    i, j = draw.choice(places)
    wrong = [*right]
    wrong[i], wrong[j] = wrong[j], wrong[i]
    return {"prompt": f"{text}=", "chosen": "".join(right), "rejected": "".join(wrong)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--digits", type=int, default=5)
    parser.add_argument("--train-rows", type=int, default=20000)
    parser.add_argument("--validation-rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=Path, metavar="FILE")
    args = parser.parse_args()
    write_model(args.out_dir / "model_init", args.sizes)
    write_data(args.out_dir / "data", args.digits, args.train_rows, args.validation_rows, args.seed)
    print(f"wrote {args.out_dir}/model_init and {args.out_dir}/data")


if __name__ == "__main__":
    main()
