"""Engines report the log-probs of given sequences: the real SGLang server and mrl's own, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.schema import RolloutConfig
from mrl.inference.engine import Engine
from mrl.inference.start import start_engine
from mrl.inference.teacher_engine import TeacherEngine
from tests.conftest import TinyModels

TOP_K = 6


@pytest.fixture(scope="module")
def transformers_engine(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    logs = tmp_path_factory.mktemp("teacher_logs")
    with start_engine(RolloutConfig(engine="transformers"), str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        yield engine


@pytest.mark.parametrize("kind", [pytest.param("sglang_engine", marks=pytest.mark.engine), "transformers_engine"])
def test_scores_are_those_of_transformers(kind: str, request: pytest.FixtureRequest, tiny_models: TinyModels) -> None:
    engine: Engine = request.getfixturevalue(kind)
    draw = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float64)
    lengths = [(2, 1), (40, 1), (40, 30), (17, 16), (300, 100)]
    asked = [(torch.randint(3, 250, (length,), generator=draw).tolist(), first) for length, first in lengths]
    asked += [(asked[1][0], 20), (asked[1][0], 5)]  # a common prefix, which the engine has cached
    with closing(TeacherEngine(engine.urls[0], engine.pool.access, 4, timeout_s=60.0)) as teacher:
        assert teacher.check("teacher", "-", "llama", 310).model_path == str(tiny_models("llama"))
        found = list(teacher.score(asked, TOP_K))
        plain = list(teacher.score(asked[:2], 0))
    for (ids, first), each in zip(asked, found, strict=True):
        tokens = torch.tensor(ids)
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, first - 1 : -1].log_softmax(-1)
        own = log_probs.gather(1, tokens[first:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(each.log_probs).double(), own, atol=2e-5, rtol=0)
        top = log_probs.topk(TOP_K, -1)
        torch.testing.assert_close(torch.from_numpy(each.top_log_probs).double(), top.values, atol=2e-5, rtol=0)
        of_ids = log_probs.gather(1, torch.from_numpy(each.top_ids))
        torch.testing.assert_close(of_ids, top.values, atol=4e-5, rtol=0)  # ties may be in either order
    for each, other in zip(plain, found):
        assert abs(each.log_probs - other.log_probs).max() < 1e-5 and each.top_ids.shape[1] == 0
