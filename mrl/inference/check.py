"""Checks of a server before its first use: key, model, and settings that weight syncs and samples need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from mrl.config.schema import RolloutConfig
from mrl.core import SamplingParams
from mrl.inference.access import Access
from mrl.inference.client import CONNECT_TIMEOUT_S, DENIED, EngineClient
from mrl.inference.errors import EngineError, EngineStartError
from mrl.inference.protocol import MODEL_INFO, SamplingBody
from mrl.inference.samples import sampling_body
from mrl.inference.server_info import ServerInfo

_POLL_S = 0.5


def check_server(
    url: str, access: Access, cfg: RolloutConfig, model_path: str, model_type: str, dtype: str, *, outlives: bool
) -> tuple[ServerInfo, list[str]]:
    """Checks a server, generates one token to warm it up, and returns its settings and notes for the user.

    dtype: of the trainer's model; outlives: the server may have served an earlier run that was killed
    Raises EngineStartError or EngineError if it answers without the key, does not answer, refuses the key, serves a
    model of another type, or has settings that break weight syncs or samples.
    """
    if access.ours:
        _check_refusal(url)
    end, warm_up = time.monotonic() + cfg.startup_timeout_s, sampling_body(SamplingParams(max_new_tokens=2), seed=0)
    with contextlib.closing(EngineClient(url, cfg.startup_timeout_s, access)) as client:

        def in_time(limit_s: float = cfg.startup_timeout_s) -> EngineClient:
            client.timeout_s = max(0.1, min(limit_s, end - time.monotonic()))
            return client

        try:
            if not access.ours and (behind := in_time(CONNECT_TIMEOUT_S).workers()) is not None:
                raise EngineStartError(
                    f"{client.url} is a router (sglang-router) with {len(behind)} engines behind it, and did not say "
                    "so when the run began: start the run again, or name the engines themselves in rollout.urls"
                )
            if outlives:  # a killed run may have left an open weight update, and requests
                for end_one in (EngineClient.end_weight_update, EngineClient.abort_all):
                    with contextlib.suppress(EngineError):  # nothing is open
                        end_one(in_time())
            served = in_time().model_info()
            if served.model_type != model_type:
                text = f"serves {served.model_path}, a {served.model_type} model; the trainer has {model_path}, a "
                raise EngineError(url, MODEL_INFO.name, 200, f"{text}{model_type} model")
            in_time().generate({"input_ids": [1], "sampling_params": warm_up})
            info = in_time().server_info()
        except EngineError as error:
            if error.status in DENIED:
                wants = f"engine {url} wants a key, or another one (HTTP {error.status})"
                raise EngineStartError(f"{wants}: rollout.api_key_file names its file") from error
            if error.status is not None or time.monotonic() < end:
                raise
            raise _late(url, cfg, error) from error
    own = cfg.tensor if access.ours else None
    if found := list(info.hindrances(own, cfg.quantization, SamplingBody.__annotations__)):
        raise EngineStartError(f"engine {url} cannot serve this run: {'; '.join(found)}")
    notes = [*_notes(url, info, cfg)]
    if info.dtype not in ("", "auto", dtype):  # the metrics mismatch/* will show it
        notes.append(f"engine {url} computes in {info.dtype}, and gets weights of a model in {dtype} (model.dtype)")
    if info.drafts:
        text = f"engine {url} guesses tokens ahead ({info.drafts}), by weights that no sync changes: ever more slowly"
        notes.append(text)
    return replace(info, tensor=info.tensor or cfg.tensor), notes


def wait_until_reachable(url: str, access: Access, cfg: RolloutConfig) -> None:
    """Blocks until a server of rollout.urls answers anything: a job may start it together with the run.

    Raises EngineStartError after rollout.startup_timeout_s.
    """
    end = time.monotonic() + cfg.startup_timeout_s
    with contextlib.closing(EngineClient(url, cfg.startup_timeout_s, access)) as client:
        while True:
            client.timeout_s = max(0.1, end - time.monotonic())
            try:
                client.model_info()
            except EngineError as error:
                if error.status is None and time.monotonic() >= end:
                    raise _late(url, cfg, error) from error
                if error.status is None:
                    time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
                    continue
            return


def _late(url: str, cfg: RolloutConfig, error: EngineError) -> EngineStartError:
    limit = f"rollout.startup_timeout_s = {cfg.startup_timeout_s:g} s"
    return EngineStartError(f"engine {url} did not answer within {limit}: {error.endpoint}: {error.text}")


def _notes(url: str, info: ServerInfo, cfg: RolloutConfig) -> Iterator[str]:
    if cfg.release != "none" and not info.releases_memory:
        if info.releases_memory is None or info.device != "cpu":
            raise EngineStartError(
                f"engine {url} cannot give memory up as rollout.release = {cfg.release} asks (SGLang can with "
                "--enable-memory-saver): set rollout.release: none"
            )
        yield f"engine {url} serves on a CPU: it says that it gives memory up (rollout.release), and gives none"
    if cfg.deterministic and not info.is_deterministic:
        yield (
            f"engine {url} runs without --enable-deterministic-inference: it ignores sampling seeds, so the same "
            "(run seed, step, sample) need not give the same tokens, and a resumed run will sample differently "
            "(rollout.deterministic: false says that this is meant)"
        )


def _check_refusal(url: str) -> None:
    """Raises EngineStartError if an engine that mrl started answers without the key, for example because of
    `rollout.server_args`. Some web servers take the second host name for the path, and /health is open to everybody."""
    with contextlib.closing(EngineClient(url, CONNECT_TIMEOUT_S, Access(ours=True))) as client:
        for host in (urlsplit(url).netloc, "x/health?"):
            if client.is_let_in(host):
                raise EngineStartError(
                    f"engine {url} answers without the run's key ({MODEL_INFO.path}, host {host!r}): anybody on this "
                    "machine could change its weights. Is one of rollout.server_args the cause?"
                )
