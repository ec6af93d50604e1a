"""Writes a task with images for a tiny model: how many squares of a colour are there?

Usage: python tools/make_count_task.py OUT [--family qwen3_vl] [--pictures 3000] [--until 0.45] [--seed 1]
OUT/model: a Qwen3-VL or Qwen2.5-VL of about 0.3M parameters, trained with transformers until the share --until of its
sampled answers is right. OUT/data: train.jsonl, validation.jsonl and their images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]  # fmt: skip
PAD, IM_START, EOS, START, END, IMAGE, VIDEO = range(len(SPECIAL))
WORDS = ["<unk>", "user", "assistant", "how", "many", "squares", "?", *map(str, range(10)), "red", "green", "blue"]
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220)}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SIDE, PATCH, CELL = 32, 8, 8  # pixels; a cell of the grid is a patch
MAX_TARGETS, MAX_OTHERS = 9, 5  # squares of the colour in question, and of other colours
BATCH, WARM_UP, LR, MAX_STEPS, EVALUATE_EVERY, EVALUATED = 48, 50, 2e-3, 800, 50, 300


def picture(rng: np.random.Generator) -> tuple[Image.Image, str, int]:
    """Returns an image, the colour in question, and the number of its squares."""
    image = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
    draw, cells, colours = ImageDraw.Draw(image), SIDE // CELL, list(COLOURS)
    count, target = int(rng.integers(0, MAX_TARGETS + 1)), int(rng.integers(len(colours)))
    others = int(rng.integers(0, MAX_OTHERS + 1))
    for number, place in enumerate(rng.permutation(cells * cells)[: count + others]):
        colour = colours[target if number < count else (target + int(rng.integers(1, len(colours)))) % len(colours)]
        x, y = int(place) % cells * CELL + 1, int(place) // cells * CELL + 1
        draw.rectangle([x, y, x + CELL - 3, y + CELL - 3], COLOURS[colour])
    return image, colours[target], count


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[1:],
    )
    fast.chat_template = CHAT
    return fast


def config(family: str) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "eos_token_id": EOS, "bos_token_id": PAD, "pad_token_id": PAD, "initializer_range": 0.05,
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64,
        "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.05,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    else:
        rope["mrope_interleaved"] = True
        text["head_dim"] = 16
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model(
        family,
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def prompt(colour: str) -> str:
    return f"<image> how many {colour} squares ? "


class Task:
    """Batches of new images as model inputs."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._text = tokenizer()
        self._processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
        self._rng = np.random.default_rng(seed)

    def batch(self, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns the model's inputs and the answers' token ids, [size]."""
        pictures = [picture(self._rng) for _ in range(size)]
        inputs = self._processor(images=[image for image, _, _ in pictures], return_tensors="pt")
        image_tokens = SPECIAL[START] + SPECIAL[IMAGE] * (SIDE // PATCH // 2) ** 2 + SPECIAL[END]
        prompts = [prompt(colour).replace("<image>", image_tokens) for _, colour, _ in pictures]
        messages = [[{"role": "user", "content": content}] for content in prompts]
        texts = [self._text.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        ids = torch.tensor(self._text(texts, add_special_tokens=False)["input_ids"])
        answers = torch.tensor(self._text.convert_tokens_to_ids([str(count) for _, _, count in pictures]))
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **inputs}, answers


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]


@torch.no_grad()
def sampled_accuracy(model: Any, task: Task) -> float:
    """Returns the probability that a sampled answer is right."""
    inputs, answers = task.batch(EVALUATED)
    return float(logits(model, inputs).softmax(-1).gather(1, answers[:, None]).mean())


def train_model(model: Any, directory: Path, until: float, seed: int) -> float:
    """Trains on new images by cross-entropy on the answer and the EOS after it; returns the last sampled accuracy."""
    train, held_out = Task(directory, seed), Task(directory, seed + 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.98))
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, step / WARM_UP)
        inputs, answers = train.batch(BATCH)
        ids = torch.cat([inputs["input_ids"], answers[:, None]], 1)
        inputs |= {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        out = model(**inputs, use_cache=False, logits_to_keep=2).logits
        ends = torch.full_like(answers, EOS)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.stack([answers, ends], 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVALUATE_EVERY == 0:
            accuracy = sampled_accuracy(model, held_out)
            print(f"step {step}: {accuracy:.2f} of sampled answers are right", flush=True)
            if accuracy >= until:
                break
    return accuracy


def write_rows(directory: Path, name: str, count: int, rng: np.random.Generator) -> None:
    (directory / name).mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.jsonl").open("w") as file:
        for number in range(count):
            image, colour, squares = picture(rng)
            place = f"{name}/{number:05}.png"
            image.save(directory / place)
            file.write(json.dumps({"prompt": prompt(colour), "images": [place], "answer": str(squares)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=["qwen3_vl", "qwen2_5_vl"], default="qwen3_vl")
    parser.add_argument("--pictures", type=int, default=3000, help="training images")
    parser.add_argument("--until", type=float, default=0.45, help="stop training at this sampled accuracy")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads are slower on matrices of this size
    torch.manual_seed(args.seed)
    directory, rng = args.out / "model", np.random.default_rng(args.seed)
    directory.mkdir(parents=True, exist_ok=True)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 64 * 4 * PATCH**2},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor" if args.family == "qwen3_vl" else "Qwen2_5_VLProcessor",
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    model = AutoModelForImageTextToText.from_config(config(args.family), dtype=torch.float32)
    train_model(model, directory, args.until, args.seed)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    write_rows(args.out / "data", "train", args.pictures, rng)
    write_rows(args.out / "data", "validation", 256, rng)
    print(f"wrote {args.out}: model, {args.pictures} training images, 256 validation images")


if __name__ == "__main__":
    main()
