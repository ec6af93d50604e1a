"""Scores of a reward model by mrl's own model in one process, and by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.config.schema import RewardDataConfig, SourceConfig, TrainConfig
from mrl.core import Rollout
from mrl.data import PreferenceDataset, load_image_processor, load_tokenizer
from mrl.data.image_positions import image_positions
from mrl.data.image_processor import ImageProcessor
from mrl.data.image_store import ImageStore
from mrl.data.score_inputs import at_last_tokens
from mrl.families import load_arch
from mrl.families.table import HF_VALUE_HEAD
from mrl.learner import Learner
from mrl.parallel import Meshes
from mrl.scoring.accuracy import ScoredRow
from mrl.weights.disk.safetensors_io import HFCheckpoint

TIMEOUT_S = 600.0
ROWS_AT_ONCE = 64


def read(model: str, data: str, subset_key: str, chat: bool | None, max_tokens: int | None) -> PreferenceDataset:
    """Reads pairs, or ranked lists, from a file. chat: None: use a chat template if the tokenizer has one; max_tokens:
    None: the model's positions. Raises DataError, or TokenizerError.
    """
    tokenizer, source = load_tokenizer(model, None), SourceConfig(path=data)
    max_tokens = max_tokens or load_arch(model).max_positions
    cfg = RewardDataConfig(
        train=(source,),
        data_source_key=subset_key,
        chat_template=tokenizer.has_chat_template if chat is None else chat,
        max_prompt_tokens=max_tokens - 1,
        max_tokens=max_tokens,
        shuffle=False,
    )
    return PreferenceDataset(
        (source,), cfg, tokenizer, "lists", cuts=False, image_processor=load_image_processor(model, cfg)
    )


def score_rows(model: str, data: PreferenceDataset, tokens: int, note: Callable[[int, int], None]) -> list[ScoredRow]:
    """Scores every row by mrl, in one process; an ensemble's score is its mean.

    Args:
        tokens: maximum number of tokens in a forward pass.
        note: receives the number of finished rows, and of all rows.
    """
    train = TrainConfig(max_tokens_per_microbatch=tokens)
    dtype = torch.float32 if platform.device().type == "cpu" else torch.bfloat16
    found: list[ScoredRow] = []
    with platform.single_process_world(TIMEOUT_S):
        mesh = Meshes(TIMEOUT_S).get(train.parallel)
        learner = Learner("critic", load_arch(model), model, train, mesh, dtype=dtype, seed=1, trainable=False)
        learner.pixels = None if data.image_processor is None else ImageStore(data.sources, data.image_processor)
        for first in range(0, len(data), ROWS_AT_ONCE):
            numbers = range(first, min(first + ROWS_AT_ONCE, len(data)))
            texts = data.batch(0, numbers)
            scores = iter(learner.scores(at_last_tokens(texts)).mean(0).tolist())
            for row in (data.rows[number] for number in numbers):
                lengths = tuple(len(ids) for ids in row.responses)
                found.append(ScoredRow(tuple(next(scores) for _ in lengths), lengths, row.scores, row.source))
            note(len(found), len(data))
    return found


@torch.no_grad()
def score_with_transformers(model: str, data: PreferenceDataset, rows: int) -> Tensor:
    """Returns the scores [n] of the first rows' responses, by transformers in float32, one text at a time."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # which would report the zero bias that engines want
    texts = data.batch(0, range(min(rows, len(data))))
    if data.image_processor is not None:
        return _transformers_scores_with_images(
            model, texts, data.image_processor, ImageStore(data.sources, data.image_processor)
        )
    loaded = AutoModelForSequenceClassification.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False, local_files_only=True
    ).eval()
    parts = texts.tokens.split(texts.seq_lens.tolist())
    return torch.stack([loaded(ids[None]).logits.mean() for ids in parts])


def _transformers_scores_with_images(
    model: str, texts: Rollout, image_processor: ImageProcessor, store: ImageStore
) -> Tensor:
    """Scores with images. The head is applied here, as transformers has no classifier with images."""
    from transformers import AutoModel

    body: Any = AutoModel.from_pretrained(model, dtype=torch.float32, trust_remote_code=False, local_files_only=True)
    body.eval()
    with HFCheckpoint(Path(model)) as checkpoint:
        head = checkpoint.source(HF_VALUE_HEAD)[:].float()
    found = []
    for i in range(texts.num_samples):
        one = texts.pick(torch.tensor([i]))
        images, ids = image_positions(one, image_processor.vision).images, one.tokens[None]
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == image_processor.vision.image_token).int()}
        if len(images):
            shapes = torch.nn.functional.pad(images[:, 2:4], (1, 0), value=1)
            inputs |= {"pixel_values": store(images), "image_grid_thw": shapes}
        found.append((head @ body(**inputs).last_hidden_state[0, -1]).mean())
    return torch.stack(found)
