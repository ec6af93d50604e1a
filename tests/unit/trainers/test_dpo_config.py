"""`trainer: dpo`: refusals, and the output of `mrl data`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl import cli
from mrl.config.loader import ConfigError, load
from mrl.trainers.dpo import reference
from tests.helpers.dpo_config import CACHE, write
from tests.system.trainers.test_resume import TinyModels


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("preference.loss={}", "preference.loss: names no loss"),
        ("preference.loss=sigmoidd", "did you mean sigmoid?"),
        ("preference.loss={sigmoid: {gamma: 1.0}}", "unknown key"),
        ("preference.loss={sigmoid: {}, kto: {}}", "kto need labeled responses, and sigmoid pairs"),
        ("data.label_key=good", "data.label_key: has no effect: the losses use pairs"),
        ("data.margin_key=lead", "data.margin_key: has no effect: no loss uses a margin"),
        ("preference.loss={robust: {label_smoothing: 0.5}}", "preference.loss.robust.label_smoothing: must be less"),
        ("preference.loss={exo_pair: {label_smoothing: 0.0}}", "label_smoothing: must be greater than 0"),
        ("preference.loss={sigmoid: {f_alpha_divergence_coef: 0.2}}", "the divergence is reverse_kl"),
        (
            "preference={loss: simpo, ld_alpha: 0.5}",
            "preference.ld_alpha: applies to log-ratios of pairs, but simpo weight all",
        ),
        ("preference={loss: aot, use_weighting: true}", "aot compares the batch"),
        ("preference={loss: orpo, reference_free: true}", "has no effect: orpo use no reference"),
        ("preference={loss: simpo}", "ref.policy: has no effect: no reference is used"),
        ("ref={policy: refreshed}", "required by refreshed"),
        ("ref={policy: cached, refresh_share: 0.5}", "has no effect: the reference is cached"),
        ("data.max_prompt_tokens=32", "leave no room for a response in 32 tokens"),
        ("data.max_tokens=4096", "exceeds the model's 512 positions"),
        ("data.rejected_key=worse", "has no 'worse'"),
        ("data.answer_key=other", "data.answer_key: has no effect"),
        ("data.completions_key=ranked", "data.completions_key: has no effect: the rows have no 'ranked'"),
        ("data.ranked_pairs=all", "data.ranked_pairs: has no effect: the rows have no 'completions'"),
        ("validation.patience=2", "validation.patience: has no effect: there are no held-out rows"),
        ("run.nproc=8", "batch.rows_per_step: 6 rows are fewer than the 8 data-parallel replicas"),
        ("resilience.timeouts_s.rollout=1.0", "dpo does not generate"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(
    tiny_models: TinyModels, tmp_path: Path, override: str, said: str
) -> None:
    config = write(tmp_path, tiny_models("llama"), ref={"policy": "cached"})
    more = ["run.launcher=ft"] if override.startswith("resilience") else []
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(config, [override, *more])


def test_a_cache_cannot_have_what_kto_needs(tiny_models: TinyModels, tmp_path: Path) -> None:
    data = {"train": str(tmp_path / "labels.jsonl"), "max_prompt_tokens": 16, "max_tokens": 32}
    config = write(tmp_path, tiny_models("llama"), data=data, preference={"loss": "kto"}, ref={"policy": "cached"})
    with pytest.raises(ConfigError, match="ref.policy: kto needs the reference in every step"):
        load(config)
    load(config, ["ref.policy=frozen"])


def test_mrl_data_shows_both_halves(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", str(write(tmp_path, tiny_models("llama"))), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "data.train: 12 pairs" in shown and "tokens of chosen" in shown and "tokens of rejected" in shown
    assert re.search(r"--> chosen: \d+ tokens\n\d+</s>\n--> rejected: \d+ tokens\n\d+!</s>", shown)
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write('{"prompt": "1", "chosen": "a"}\n')
    assert cli.main(["data", str(tmp_path / "config.yaml")]) == 1
    assert "pairs.jsonl:13: no key 'rejected' (data.rejected_key)" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_cache_that_cannot_be_read_is_none(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / CACHE
    assert reference._read(file) == (None, "")
    file.write_bytes(content)
    assert reference._read(file) == (None, "")
