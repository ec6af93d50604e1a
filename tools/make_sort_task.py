"""Writes a task that a tiny model learns on a laptop: sort the digits of a number.

    python tools/make_sort_task.py OUT_DIR [--digits 5 --train-rows 20000 --validation-rows 512 --seed 0 --sizes FILE]

OUT_DIR/model_init: config.json of an 85k-parameter Llama and a character-level tokenizer, without weights. --sizes
takes another config.json, such as one in yaml_configs/models; its special tokens become this tokenizer's.
OUT_DIR/data/train.jsonl, validation.jsonl: rows {"prompt": "31542=", "answer": "12345"}; no prompt is in both files.
OUT_DIR/data/pairs.jsonl: {"prompt": "31542=", "chosen": "12345", "rejected": "12435"} for the training prompts; two
digits of the rejected answer are exchanged. pairs_validation.jsonl: the same for the validation prompts.
OUT_DIR/data/both_ways.jsonl: train.jsonl with about half of the answers reversed. SFT on it learns both orders, and
the reward of a later RL run selects one.

With --chat the rows are conversations, {"messages": [...], "data_source": "2 turns"}. The user begins with a number,
which the assistant sorts; "-" then asks for the reversed answer, and "+" for the same one. The tokenizer has a chat
template that marks the assistant's tokens and ends every turn with <end>.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = list("0123456789=+-")
VOCABULARY = SPECIAL + CHARACTERS  # 16 tokens, divisible by every tensor-parallel size that a laptop runs
TURNS = ["<user>", "<assistant>", "<end>", "<unused>"]  # more tokens, for --chat
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}<user>{{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

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

IDS = ("pad_token_id", "bos_token_id", "eos_token_id")  # the tokenizer's, with every model


def write_model(out: Path, sizes: Path | None, chat: bool = False) -> None:
    """Writes config.json, or a copy of `sizes` with the tokenizer's ids, and a tokenizer with a token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, end = (VOCABULARY + TURNS, "<end>") if chat else (VOCABULARY, "<eos>")
    model = MODEL | {"vocab_size": len(tokens), "eos_token_id": tokens.index(end)}
    if sizes is not None:
        model = json.loads(sizes.read_text()) | {name: model[name] for name in IDS}
    if model["vocab_size"] < len(tokens):
        raise SystemExit(f"{sizes}: vocab_size {model['vocab_size']}, but the tokenizer has {len(tokens)} tokens")
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token=end,
        unk_token="<unk>",
        model_max_length=model["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": TURNS[:2]})
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(out))
    (out / "config.json").write_text(json.dumps(model, indent=2) + "\n")


def write_data(out: Path, digits: int, train_rows: int, validation_rows: int, seed: int, chat: bool = False) -> None:
    """Writes the rows of distinct random numbers of `digits` digits; leading zeros are allowed."""
    needed = train_rows + validation_rows
    if needed > 10**digits:
        raise SystemExit(f"{needed} rows requested, but only {10**digits} numbers have {digits} digits")
    out.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed).sample(range(10**digits), needed)
    texts = [f"{n:0{digits}d}" for n in numbers]
    for name, part in (("validation", texts[:validation_rows]), ("train", texts[validation_rows:])):
        rows = [conversation(text, seeded(seed, text)) if chat else sort_row(text) for text in part]
        write_rows(out / f"{name}.jsonl", rows)
        if not chat:
            pairs = [preference_pair(text, seeded(seed, text)) for text in part]
            write_rows(out / f"pairs{'_validation' * (name == 'validation')}.jsonl", [pair for pair in pairs if pair])
    if not chat:
        train = texts[validation_rows:]
        write_rows(out / "both_ways.jsonl", [maybe_reversed_row(text, seeded(seed, text)) for text in train])


def seeded(seed: int, text: str) -> random.Random:
    return random.Random(f"{seed} {text}")


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def sort_row(text: str) -> dict[str, Any]:
    return {"prompt": f"{text}=", "answer": "".join(sorted(text))}


def maybe_reversed_row(text: str, rng: random.Random) -> dict[str, Any]:
    row = sort_row(text)
    return row if rng.random() < 0.5 else row | {"answer": row["answer"][::-1]}


def conversation(text: str, rng: random.Random) -> dict[str, Any]:
    """Returns a conversation of one to three turns that begins with this number."""
    answer, messages = "".join(sorted(text)), []
    questions = [text, *rng.choices("+-", k=rng.randrange(3))]
    for turn, question in enumerate(questions):
        answer = answer[::-1] if turn and question == "-" else answer
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "data_source": f"{len(questions)} turn{'s' * (len(questions) > 1)}"}


def preference_pair(text: str, rng: random.Random) -> dict[str, str] | None:
    """Returns a pair; None for a number of equal digits, whose order cannot be wrong."""
    right = sorted(text)
    places = [(i, j) for i in range(len(text)) for j in range(i) if right[i] != right[j]]
    if not places:
        return None
    i, j = rng.choice(places)
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
    parser.add_argument("--sizes", type=Path, metavar="FILE", help="config.json of the model (default: 85k parameters)")
    parser.add_argument("--chat", action="store_true", help="write conversations")
    args = parser.parse_args()
    write_model(args.out_dir / "model_init", args.sizes, args.chat)
    write_data(args.out_dir / "data", args.digits, args.train_rows, args.validation_rows, args.seed, args.chat)
    print(f"wrote {args.out_dir}/model_init and {args.out_dir}/data")


if __name__ == "__main__":
    main()
