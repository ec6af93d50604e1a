"""Likelihood of held-out rows under a model directory, in one process: `validation/...` as in training."""

from __future__ import annotations

import torch

from mrl import platform
from mrl.config.schema import Config, ParallelConfig, SFTDataConfig
from mrl.data import SFTDataset, load_tokenizer
from mrl.families import load_arch
from mrl.learner import Learner
from mrl.learner.likelihood import likelihood, metrics
from mrl.parallel import Meshes

ROWS_AT_ONCE = 512
NAME = "validation"


def held_out(cfg: Config, of: SFTDataConfig, weights: str, rows: int | None) -> dict[str, float]:
    """Returns `validation/loss` and related metrics of the first rows of data.validation, all if None.

    Without GPUs it computes in float32.

    of: the data section of the rows; weights: a Hugging Face directory, or a converted one
    Raises DataError, TokenizerError or WeightError.
    """
    assert of.validation is not None
    data = SFTDataset(of.validation, of, load_tokenizer(weights, cfg.model.eos_token, cfg.model.chat_template))
    train = cfg.actor.model_copy(update={"parallel": ParallelConfig(), "recompute": "none", "offload": "none"})
    dtype = torch.float32 if platform.device().type == "cpu" else getattr(torch, cfg.model.dtype)
    with platform.single_process_world(cfg.run.timeout_s):
        mesh = Meshes(cfg.run.timeout_s, cfg.run.seed).get(train.parallel)
        learner = Learner("policy", load_arch(weights), weights, train, mesh, dtype=dtype, seed=1, trainable=False)
        found = likelihood(learner, data.batches(data.first(rows), ROWS_AT_ONCE))
    return metrics(found, NAME)
