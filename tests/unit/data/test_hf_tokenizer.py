"""verl's `hf_tokenizer`: its corrections of PAD and EOS."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mrl.data import TokenizerError, hf_tokenizer

VOCABULARY = {"<eos>": 0, "<end_of_turn>": 1, "<pad>": 2, "a": 3}


def directory(path: Path, **special: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return path


def test_a_missing_pad_token_is_the_eos_token(tmp_path: Path) -> None:
    path = directory(tmp_path / "plain", eos_token="<eos>")
    with pytest.warns(UserWarning, match="the PAD token is set to the EOS token '<eos>'"):
        assert hf_tokenizer(str(path)).pad_token_id == 0
    assert hf_tokenizer(path, correct_pad_token=False).pad_token_id is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert hf_tokenizer(path, pad_token="<pad>").pad_token_id == 2
    with pytest.raises(TokenizerError, match="neither a PAD nor an EOS token"):
        hf_tokenizer(directory(tmp_path / "bare"))


def test_gemma_2_ends_with_its_turns(tmp_path: Path) -> None:
    path = directory(tmp_path / "gemma-2-2b-it", eos_token="<eos>", pad_token="<pad>")
    with pytest.warns(UserWarning, match="the EOS token is set to <end_of_turn>"):
        assert hf_tokenizer(path).eos_token_id == 1
    assert hf_tokenizer(path, correct_gemma2=False).eos_token_id == 0
    assert hf_tokenizer(path, eos_token="<eos>").eos_token_id == 0


def test_the_signature_is_verl_s() -> None:
    shown = str(inspect.signature(hf_tokenizer).replace(return_annotation=inspect.Signature.empty))
    assert [part.split(":")[0] for part in shown.strip("()").split(", ")] == [
        *("name_or_path", "correct_pad_token", "correct_gemma2", "**kwargs")
    ]
    defaults = [each.default for each in inspect.signature(hf_tokenizer).parameters.values()]
    assert defaults[1:3] == [True, True]
