"""Write a task that a tiny model learns on a laptop: sort the digits of a number.

    python tools/make_sort_task.py OUT_DIR [--digits 5 --train-rows 20000 --validation-rows 512 --seed 0 --sizes FILE]

OUT_DIR/model_init: config.json of an 85k-parameter Llama and a character-level tokenizer, no weights;
with --sizes that config.json, such as one below yaml_configs/models, with this tokenizer's special tokens.
OUT_DIR/data: train.jsonl and validation.jsonl with rows {"prompt": "31542=", "answer": "12345"}; no validation prompt
is in the training file. pairs.jsonl: {"prompt": "31542=", "chosen": "12345", "rejected": "12435"}, of the training
prompts; what is rejected has two of its digits exchanged. pairs_validation.jsonl: the same of the validation prompts.
both_ways.jsonl: train.jsonl, but about half of the answers are backwards: a model learns either, and reward says which.

With --chat the rows are conversations, {"messages": [...], "data_source": "2 turns"}: the user begins with a number,
which the assistant sorts, then asks with "-" for the same backwards, or with "+" for the same again. The tokenizer has
a chat template that marks what the assistant says, and ends every turn with <end>.
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
TURNS = ["<user>", "<assistant>", "<end>", "<unused>"]  # of --chat
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

IDS = ("pad_token_id", "bos_token_id", "eos_token_id")  # the tokenizer's, whatever the model


def write_model(out: Path, sizes: Path | None, chat: bool = False) -> None:
    """config.json, the sizes of another model's if one is given, and a fast tokenizer with one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, end = (VOCABULARY + TURNS, "<end>") if chat else (VOCABULARY, "<eos>")
    sized = MODEL | {"vocab_size": len(tokens), "eos_token_id": tokens.index(end)}
    model = sized if sizes is None else json.loads(sizes.read_text()) | {name: sized[name] for name in IDS}
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
        rows = (talk(t, random.Random(f"{seed} {t}")) if chat else sorting(t) for t in part)
        (out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if chat:
        return
    rows = (either_way(text, random.Random(f"{seed} {text}")) for text in texts[validation_rows:])
    (out / "both_ways.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, part in (("pairs_validation", texts[:validation_rows]), ("pairs", texts[validation_rows:])):
        pairs = (spoiled(text, random.Random(f"{seed} {text}")) for text in part)
        (out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs if row is not None))


def sorting(text: str) -> dict[str, Any]:
    """A prompt with its answer."""
    return {"prompt": f"{text}=", "answer": "".join(sorted(text))}


def either_way(text: str, draw: random.Random) -> dict[str, Any]:
    """A prompt with its answer, or that backwards."""
    row = sorting(text)
    return row if draw.random() < 0.5 else row | {"answer": row["answer"][::-1]}


def talk(text: str, draw: random.Random) -> dict[str, Any]:
    """A conversation of one to three turns, which begins with this number."""
    said, messages = "".join(sorted(text)), []
    asked = [text, *draw.choices("+-", k=draw.randrange(3))]
    for turn, question in enumerate(asked):
        said = said[::-1] if turn and question == "-" else said
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return {"messages": messages, "data_source": f"{len(asked)} turn{'s' * (len(asked) > 1)}"}


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
    parser.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    write_model(args.out_dir / "model_init", args.sizes, args.chat)
    write_data(args.out_dir / "data", args.digits, args.train_rows, args.validation_rows, args.seed, args.chat)
    print(f"wrote {args.out_dir}/model_init and {args.out_dir}/data")


if __name__ == "__main__":
    main()
