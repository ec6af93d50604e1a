"""docs/preference.md for users of TRL: it lists all of TRL's arguments, and mrl has the keys that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mrl.config.loader import load
from mrl.config.resume import is_key
from mrl.config.schema import DPOConfig
from tests.helpers.dpo_config import write
from tests.system.trainers.test_resume import TinyModels

PAGE = (Path(__file__).parents[3] / "docs/preference.md").read_text()
TABLE = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.partition("## From TRL")[2], re.M)[1:]
OF_TRL = """
activation_offloading alpha beta chat_template_kwargs cpo_alpha dataset_num_proc desirable_weight disable_dropout
discopop_tau f_alpha_divergence_coef f_divergence_type generate_during_eval is_encoder_decoder label_smoothing ld_alpha
loss_type loss_weights max_completion_length max_length model_init_kwargs pad_to_multiple_of pad_token padding_free
padding_value precompute_ref_batch_size precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps
router_aux_loss_coef rpo_alpha simpo_gamma sync_ref_model truncation_mode trust_remote_code undesirable_weight
use_weighting""".split()  # the fields of TRL's four configurations that TrainingArguments lacks


def test_every_argument_is_in_the_table() -> None:
    named = {word for left, _ in TABLE for code in re.findall(r"`(.+?)`", left) for word in re.findall(r"\w+", code)}
    assert set(OF_TRL) <= named, set(OF_TRL) - named


def test_every_key_of_mrl_s_there_is_one() -> None:
    keys = {
        key for _, right in TABLE for key in re.findall(r"`((?:preference|ref|data|batch|actor|model)\.[\w.]+)", right)
    }
    assert len(keys) > 10 and all(is_key(DPOConfig, key) for key in keys), keys


FORMS = [(left, form) for left, right in TABLE for form in re.findall(r"`preference\.loss: (\{.*?\})`", right)]


@pytest.mark.parametrize(("trl", "form"), FORMS, ids=[form for _, form in FORMS])
def test_every_loss_that_is_shown_loads(trl: str, form: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Every loss in the table loads, with a number for names in capitals and defaults for `...`."""
    losses = yaml.safe_load(re.sub(r"[A-Z]+_[A-Z]+", "0.5", form.replace("...", "")))
    losses = {name: {k: v for k, v in (keys or {}).items() if v is not None} for name, keys in losses.items()}
    preference = {"loss": losses, "reference_free": trl.startswith("CPO `loss_type: sigmoid`")}
    cfg = load(write(tmp_path, tiny_models("llama"), preference=preference))
    assert isinstance(cfg, DPOConfig) and set(cfg.preference.loss.chosen) == losses.keys()
