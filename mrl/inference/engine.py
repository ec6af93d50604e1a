"""The inference engines of a run, as the trainer uses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from mrl.core import Request, Sample, SamplingParams
from mrl.inference.engine_pool import EnginePool
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.load import Load
from mrl.inference.protocol import BEGIN_UPDATE, MemoryPart
from mrl.inference.request_dispatcher import Generation, PromptGroup, RequestDispatcher, by_prompt
from mrl.inference.routed import ASK, RoutedShape
from mrl.inference.samples import Expected

OnSamples = Callable[[list[Sample]], None]
T = TypeVar("T")


class Engine:
    """The inference engines of a run. `start_engine` makes one.

    pool: the servers
    vocab_size: vocabulary size; samples with other token ids are rejected
    concurrent_requests: maximum requests in flight over all servers
    request_timeout_s: limit for one request
    weight_version: version of the last weight sync; samples of other versions are rejected
    versions: versions of all weight syncs
    routed: shape of routed experts, for a model with experts
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        vocab_size: int,
        concurrent_requests: int,
        request_timeout_s: float,
        routed: RoutedShape | None = None,
    ) -> None:
        self.pool = pool
        self.vocab_size = vocab_size
        self.concurrent_requests, self.request_timeout_s = concurrent_requests, request_timeout_s
        self.weight_version: str | None = None
        self.versions: set[str] = set()
        self.routed = routed
        self._dispatcher: RequestDispatcher | None = None
        self._owner = threading.current_thread()
        pool.restarts.post = self._in_owner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self.pool.servers)

    def wait_ready(self) -> None:
        """Blocks until every server responds and has been checked; `pool.notes` is complete then. Raises as
        `EnginePool.wait_ready`."""
        self.pool.wait_ready()

    def check_experts(self) -> None:
        """Raises EngineStartError for a server that does not return routed experts."""
        for server in self.pool.servers:
            if not server.info.returns_experts:
                raise EngineStartError(
                    f"engine {server.url} does not say which experts tokens went to (actor.routing_replay: engine): "
                    f"start it with {ASK}"
                )

    def check_room(self, tokens: int) -> None:
        """Raises EngineStartError for a server whose context is shorter than `tokens` of prompt and response: it would
        truncate responses, or reject them during the run."""
        for server in self.pool.servers:
            if (room := server.info.room) is not None and room < tokens:
                raise EngineStartError(
                    f"engine {server.url} has room for {room} tokens of prompt and response together (its context "
                    f"length or its KV cache), and the run may ask for {tokens}: start it with more, or lower "
                    "data.max_prompt_tokens, rollout.sampling.max_new_tokens or agent.max_tokens"
                )

    @property
    def computes_in(self) -> set[tuple[str, str]]:
        """(device, dtype) of the current servers, as in `ServerInfo`."""
        return {(server.info.device, server.info.dtype) for server in self.pool.servers}

    def close(self) -> None:
        """Ends the servers that mrl started, and this run's requests at servers of rollout.urls."""
        self.close_dispatcher()
        self.pool.close()

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_samples: OnSamples | None = None
    ) -> list[Sample]:
        """Returns finished samples ordered by sample_id. `on_samples` is called in this thread with each of them.

        Log-probs are of logits / temperature (raw logits if greedy), not renormalised for top_p and top_k.
        A server that mrl started and that dies, or does not answer within rollout.request_timeout_s, is restarted as
        often as `pool.restarts` allows; its unfinished requests are sampled again with the same seeds.
        Raises RolloutError if no restart is left, or an engine rejects a request, has released memory or lacks its
        weights; no request is left running then.
        """
        how = self.generation(sampling)
        for server in self.pool.servers:
            if (reason := server.asleep()) is not None:
                raise RolloutError(reason)
        if not requests:
            return []
        samples: list[Sample] = []

        def finished(sample: Sample) -> None:
            samples.append(sample)
            if on_samples is not None:
                on_samples([sample])

        async def one(request: Request, group: PromptGroup) -> None:
            sample = await self.dispatcher.generate(request, how, group)
            self.dispatcher.post(lambda: finished(sample))

        async def every() -> None:
            await asyncio.gather(*(one(request, group) for group in by_prompt(requests) for request in group.requests))

        self.run(every())
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine that uses `dispatcher`, with nothing else in flight. Meanwhile syncs the
        current weights to restarted engines. No request is left running if it raises."""
        dispatcher = self.dispatcher
        try:
            done = dispatcher.submit(program)
            dispatcher.serve(
                lambda: done.done() and not dispatcher.is_restarting and not dispatcher.awaiting_weights,
                self.pool.restarts.give_weights,
            )
            return done.result()
        except BaseException:
            self.close_dispatcher()
            raise

    def generation(
        self,
        sampling: SamplingParams,
        *,
        is_background: bool = False,
        is_interruptible: bool = False,
        adapter: str = "",
    ) -> Generation:
        """Returns how `dispatcher` is to sample.

        Args:
            adapter: name of the run's adapter to sample with, where weight syncs send adapters.
            is_background: weights may be synced before the request has its sample.
            is_interruptible: a response continues after such a sync.

        Raises RolloutError for stop strings that the engines do not understand.
        """
        self.wait_ready()
        if sampling.stop and not all(server.info.has_tokenizer for server in self.pool.servers):
            raise RolloutError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer, but {self.urls[0]} was started "
                "without one: set them in rollout.sampling.stop, or use stop_token_ids"
            )
        current = None if self.weight_version is None else {self.weight_version}
        routed = self.routed if sampling.return_routed_experts else None
        versions = self.versions if is_background else current
        expected = Expected(self.vocab_size, sampling.max_new_tokens, versions, is_interruptible, routed)
        return Generation(sampling, expected, is_background, adapter)

    @property
    def dispatcher(self) -> RequestDispatcher:
        if self._dispatcher is None:
            self.pool.forget_losses()
            self._dispatcher = RequestDispatcher(self.pool, self.concurrent_requests, self.request_timeout_s)
        return self._dispatcher

    def close_dispatcher(self) -> None:
        """Ends all sampling; no request is left running."""
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None

    def _in_owner(self, work: Callable[[], object]) -> None:
        if threading.current_thread() is self._owner or self._dispatcher is None:
            work()
        else:
            self._dispatcher.post(work)

    def take_loads(self) -> tuple[dict[str, Load], Load]:
        """Returns the load since the last call: of each server, by URL, and of requests that waited for a server."""
        return {server.url: server.meter.take() for server in self.pool.servers}, self.pool.waiting.take()

    # ---- memory

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Releases these parts of every server's memory. Waits until no request runs.

        Released weights come back with the first weight sync after `resume_memory`. A server that mrl started and that
        dies, or does not respond within rollout.request_timeout_s, is restarted as often as `pool.restarts` allows,
        releases the same parts, and lacks its weights (`lacks_weights`). Raises RolloutError if no restart is left, or
        a server rejects the request.
        """
        self.wait_ready()
        self.pool.settle(lambda released: released | set(parts))

    def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Restores these parts of every server's memory if they are released; restarts and errors as in
        `release_memory`."""
        self.pool.settle(lambda released: released - set(parts))

    @property
    def lacks_weights(self) -> bool:
        """True if a server has released its weights or lost them in a restart, and needs a weight sync before it
        samples."""
        return not all(server.has_weights for server in self.pool.servers)

    def check_sync(self, url: str) -> None:
        """Raises EngineError if the weights of the server at `url` are released."""
        (server,) = (server for server in self.pool.all if server.url == url)
        if "weights" in server.released:
            text = "not asked: the memory of its weights is released; restore it before the weight sync"
            raise EngineError(url, BEGIN_UPDATE.name, None, text)

    @contextmanager
    def weight_sync(self, version: str) -> Iterator[None]:
        """Context of a weight sync to all engines: only the sync itself restarts a lost engine meanwhile, and samples
        may have this version from now on."""
        self.versions.add(version)
        self.pool.is_syncing = True
        try:
            yield
        finally:
            self.pool.is_syncing = False

    def has_synced(self, version: str, adapters: Mapping[str, str] | None = None) -> None:
        """Call at the end of each weight sync to all servers: samples of other weights are rejected from now on.

        adapters: names of the loaded adapters, by name of the run's adapter, if the sync was of adapters only
        """
        self.weight_version, self.pool.adapters = version, adapters or {}
        self.pool.use_joined()
        for server in self.pool.servers:
            server.has_weights = True
        if self._dispatcher is not None:
            self._dispatcher.have_weights()

    def present(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the addresses of all engines that need the next weight sync, and of those among them that are new
        processes. Waits until no engine is being restarted. Raises RolloutError if there has been no engine for too
        long."""
        lack: tuple[str, ...] = ()
        if self._dispatcher is not None:
            self._dispatcher.serve(lambda: not self.dispatcher.is_restarting)
            lack = self._dispatcher.awaiting_weights
        servers = self.pool.present()
        new = [server.url for server in servers if server not in self.pool.servers or server.url in lack]
        return tuple(server.url for server in servers), tuple(new)
