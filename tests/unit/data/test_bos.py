"""Special tokens that a text already has are not added again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from mrl.config.schema import DataConfig, PreferenceDataConfig, RewardDataConfig, SFTDataConfig
from mrl.data import PreferenceDataset, PromptDataset, SFTDataset, Tokenizer, load_tokenizer
from tests.helpers.tiny import BOS, EOS, tiny_tokenizer


def with_bos(folder: Path, model: Path | None = None, trailing: bool = False) -> Path:
    """Makes a tokenizer in FOLDER that puts <s> before each text, as Llama's does; `trailing` appends </s>."""
    if model is not None:
        shutil.copytree(model, folder)
    fast = tiny_tokenizer()
    single = "<s> $A </s>" if trailing else "<s> $A"
    fast.backend_tokenizer.post_processor = TemplateProcessing(single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    fast.save_pretrained(folder)
    return folder


USES = ("prompts", "validation", "ptx", "answers", "text", "pairs", "whole pairs", "labels", "scores", "steps")


def rows_of(use: str, tokenizer: Tokenizer, folder: Path, row: dict[str, Any]) -> list[int]:
    """Returns all tokens of one row as the named trainer reads it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys: dict[str, Any] = {"train": str(folder / "rows.jsonl")}
    if use in ("prompts", "validation", "ptx"):
        cfg = DataConfig.model_validate(keys)
        data = PromptDataset(cfg.train, cfg, tokenizer, require_answer=use == "ptx")
        [prompt] = data.first(1) if use == "validation" else data.prompts_for_step(0, 1, 0)
        return [*prompt.token_ids, *(data.answers([prompt])[0] if use == "ptx" else ())]
    if use in ("answers", "text"):
        sft = SFTDataConfig.model_validate(keys | {"form": use})
        return SFTDataset(sft.train, sft, tokenizer).rows[0].ids.tolist()
    cls = RewardDataConfig if use in ("scores", "steps") else PreferenceDataConfig
    form = "pairs" if "pairs" in use else use
    found = cls.model_validate(keys)
    compared = PreferenceDataset(found.train, found, tokenizer, form).rows[0]  # type: ignore[arg-type]
    return [*compared.prompt.tolist(), *compared.responses[0].tolist()]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trailing", [False, True])
def test_a_text_that_has_its_bos_and_eos_gets_no_second_ones(tmp_path: Path, use: str, trailing: bool) -> None:
    tokenizer = load_tokenizer(with_bos(tmp_path / "tokenizer", trailing=trailing))
    plain = {"prompt": "1+1=", "answer": "2", "text": "1+1=2", "completion": "2", "label": True, "score": 1.0}
    own = plain | {"prompt": "<s>1+1=", "answer": "2</s>", "text": "<s>1+1=2</s>", "completion": "2</s>"}
    if use == "pairs":
        plain, own = plain | {"chosen": "2", "rejected": "3"}, own | {"chosen": "2</s>", "rejected": "3</s>"}
    if use == "whole pairs":
        plain = {"chosen": "1+1=2", "rejected": "1+1=3"}
        own = {"chosen": "<s>1+1=2</s>", "rejected": "<s>1+1=3</s>"}
    if use == "steps":
        plain, own = ({**row, "completions": ["2"], "labels": [True]} for row in (plain, own))
    ids = rows_of(use, tokenizer, tmp_path, own)
    assert ids == rows_of(use, tokenizer, tmp_path, plain)
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert ids.count(EOS) == (use not in ("prompts", "validation", "steps"))


def test_bos_is_added_where_it_is_missing_and_only_in_front(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(with_bos(tmp_path / "tokenizer"))
    inner, double, empty = tokenizer.encode_prompts(["a<s>b", "<s><s>a", ""])
    assert inner.count(BOS) == 2 and inner[0] == BOS, "the text's own one in the middle stays"
    assert double[:2] == [BOS, BOS] and double[2] != BOS, "what a row says twice stays"
    assert empty == [BOS]
