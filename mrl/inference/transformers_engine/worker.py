"""The thread that owns the model. It runs all queued requests as one batch, and weight updates in between."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from mrl.families import load_arch
from mrl.inference import delta
from mrl.inference.protocol import MEMORY_PARTS, MemoryPart
from mrl.inference.routed import RoutedShape
from mrl.inference.transformers_engine import attention
from mrl.inference.transformers_engine.batch import ExpertTap, padded, responses
from mrl.inference.transformers_engine.pictures import Sight
from mrl.inference.transformers_engine.sampling import Job
from mrl.inference.transformers_engine.weights import ModelWeights, read_payload

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
_LOCAL: Any = {"trust_remote_code": False, "local_files_only": True}  # a model's own code is never run
GATHER_S = 0.005  # after the first request: how long others may join its batch


@dataclass(eq=False)
class _Generation:
    job: Job
    done: Future[list[int]]


@dataclass
class _Task:
    run: Callable[[], Any]
    done: Future[Any]


def on_model_thread(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate[Worker, P], T]:
    """Has a method run in the model thread, between two batches. A call blocks until then, and raises its error."""

    @functools.wraps(method)
    def call(worker: Worker, *args: P.args, **kwargs: P.kwargs) -> T:
        task = _Task(lambda: method(worker, *args, **kwargs), Future())
        worker._queue.put(task)
        return task.done.result()

    return call


class Worker:
    """A model, a queue and a thread. Methods may be called from any thread and block until the work is done, however
    long that is: who asks over HTTP has a time-out."""

    def __init__(self, model_path: str, dtype: torch.dtype, device: str, max_batch: int) -> None:
        self.model_path = model_path
        self.weight_version = "default"
        self.device = device
        self._max_batch = max_batch
        arch = load_arch(model_path)
        self.model = _load(model_path, dtype, sees=arch.vision is not None).to(device).eval()
        if device == "cpu":
            attention.install(self.model)
        self.sight = Sight(model_path, arch.vision) if arch.vision is not None else None
        self._weights = ModelWeights(self.model, arch)
        self.routed = RoutedShape.of(arch) if arch.experts is not None else None
        self._tap = ExpertTap(self.model) if arch.experts is not None else None
        eos = self.model.generation_config.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else (*eos,) if isinstance(eos, list) else (int(eos),)
        self.model.generation_config = GenerationConfig()  # what a request leaves open would be taken from the model's
        self._tokenizer_path = model_path  # a weight sync from disk has none
        self._tokenizer: Any = None
        self._generations: set[_Generation] = set()  # queued or running
        self._queue: queue.Queue[_Generation | _Task] = queue.Queue()
        self._session = False
        self._released: frozenset[MemoryPart] = frozenset()
        threading.Thread(target=self._loop, name="model", daemon=True).start()

    # ---- called by the HTTP threads

    def generate(self, job: Job) -> list[int]:
        generation = _Generation(job, Future())
        self._generations.add(generation)
        try:
            self._queue.put(generation)
            return generation.done.result()
        finally:
            self._generations.discard(generation)

    def abort(self) -> None:
        """Ends all responses at their next token; they are answered with the tokens that they have."""
        for generation in self._generations.copy():
            generation.job.is_aborted = True

    # ---- the model thread

    def _loop(self) -> None:
        batch: list[_Generation] = []
        while True:
            try:
                item = self._queue.get(timeout=GATHER_S if batch else None)
            except queue.Empty:
                item = None
            if isinstance(item, _Generation):
                batch.append(item)
                if len(batch) < self._max_batch:
                    continue
            if batch:
                self._run(batch)
                batch = []
            if isinstance(item, _Task):
                try:
                    item.done.set_result(item.run())
                except Exception as error:  # handed to the caller, who answers with it
                    log.exception("weight operation failed")
                    item.done.set_exception(error)

    def _run(self, batch: list[_Generation]) -> None:
        waiting = dict(enumerate(batch))
        try:
            for place, tokens in self._responses([generation.job for generation in batch]):
                waiting.pop(place).done.set_result(tokens)
        except Exception as error:  # handed to every caller, who answers 500 with it
            log.exception("generation failed")
            for generation in waiting.values():
                generation.done.set_exception(error)

    def _responses(self, jobs: list[Job]) -> Iterator[tuple[int, list[int]]]:
        """Yields responses as `batch.responses` does."""
        self._check_held(*MEMORY_PARTS)
        seen = None
        if self.sight is not None:
            inputs = self.sight.model_inputs(*padded(jobs), [job.inputs for job in jobs])
            seen = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        tap = self._tap if any(job.asks for job in jobs) else None
        if self._tokenizer is None and any(job.stop for job in jobs):
            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_path, **_LOCAL)
        return responses(self.model, jobs, self._tokenizer, seen, tap)

    @on_model_thread
    @torch.inference_mode()
    def score(self, ids: list[int], start: int, top_k: int) -> tuple[list[float], list[tuple[list[float], list[int]]]]:
        """Returns the log-probs of the tokens after `start`, and those and the ids of the top_k most likely tokens at
        each of their positions."""
        self._check_held(*MEMORY_PARTS)
        tokens = torch.tensor(ids, device=self.model.device)
        logits = self.model(input_ids=tokens[None]).logits[0, start:-1]
        log_probs = torch.log_softmax(logits.float(), -1)
        own = log_probs.gather(-1, tokens[start + 1 :, None])[:, 0].tolist()
        values, top = (each.tolist() for each in log_probs.topk(min(top_k, log_probs.size(-1)), -1))
        return own, list(zip(values, top))

    @on_model_thread
    def checksums(self) -> dict[str, str]:
        return self._weights.checksums()

    @on_model_thread
    def release_memory(self, parts: Collection[MemoryPart]) -> None:
        """Releases memory; between two batches there are only weights."""
        self._check_held(*parts)
        if "weights" in parts:
            delta.forget(self.model)
            self._weights.release()
            if self.device != "cpu":
                torch.accelerator.empty_cache()
        self._released |= {*parts}

    @on_model_thread
    def resume_memory(self, parts: Collection[MemoryPart]) -> None:
        if held := {*parts} - self._released:
            raise ValueError(f"not given up: {', '.join(sorted(held))}")
        if "weights" in parts:
            self._weights.resume()
        self._released -= {*parts}

    def _check_held(self, *parts: MemoryPart) -> None:
        if released := self._released & {*parts}:
            raise ValueError(f"given up: {', '.join(sorted(released))}")

    @on_model_thread
    def begin_update(self) -> None:
        self._check_held("weights")
        if self._session:
            raise ValueError("a weight-update session is already open; end it first")
        self._session = True

    @on_model_thread
    def end_update(self) -> None:
        if not self._session:
            raise ValueError("no weight-update session is open")
        self._session = False

    @on_model_thread
    def update_from_tensor(self, payload: str, load_format: str | None, version: str | None) -> None:
        if not self._session:
            raise ValueError("update_weights_from_tensor must run between begin_weight_update and end_weight_update")
        named = read_payload(payload, load_format)
        if load_format == delta.LOADER:
            delta.apply(self.model, self._weights.load, named)
        else:
            self._weights.load(named)
        self.weight_version = version or self.weight_version

    @on_model_thread
    def update_from_disk(self, model_path: str, version: str | None) -> None:
        self._check_held("weights")
        files = sorted(Path(model_path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{model_path} has no safetensors")
        for file in files:
            self._weights.load(load_file(file).items())
        self.model_path = model_path
        self.weight_version = version or self.weight_version


def _load(model_path: str, dtype: torch.dtype, *, sees: bool) -> Any:
    """Loads safetensors, or random weights where the directory has none (a weight sync comes before the first use)."""
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if any(Path(model_path).glob("*.safetensors")):
        return kind.from_pretrained(model_path, dtype=dtype, use_safetensors=True, **_LOCAL)
    config = AutoConfig.from_pretrained(model_path, **_LOCAL)
    return kind.from_config(config, dtype=dtype, trust_remote_code=False)
