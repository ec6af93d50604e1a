"""The rollout engines of a run: samples in order, or one clear error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from types import TracebackType

from mrl.core import Request, Sample, SamplingParams
from mrl.rollout.access import Access
from mrl.rollout.client import EngineClient
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.errors import EngineError, EngineStartError, RolloutError, ServerLost
from mrl.rollout.load import Load
from mrl.rollout.protocol import BEGIN_UPDATE, MemoryPart
from mrl.rollout.request_dispatcher import OnSamples, RequestDispatcher
from mrl.rollout.request_queue import RequestQueue
from mrl.rollout.restarts import Restarts
from mrl.rollout.routed import ASK, RoutedShape
from mrl.rollout.samples import Expected
from mrl.rollout.server_info import ServerInfo


class Engine:
    """The rollout engines of a run. `start_engine` makes one.

    pool: its servers
    vocab_size: tokens of the model; a sample with any other one is refused
    concurrent_requests: in flight at once, over all servers
    request_timeout_s: of one request
    weight_version: the name of the weights that the run gave them last, once it did; a sample of others is refused
    adapter: the name of the one that samples are drawn with, where the run gives them adapters
    versions: all names of weights that the run has given them
    routed: of a model that has experts
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
        self.adapter: str | None = None
        self.versions: set[str] = set()
        self.routed = routed
        self._dispatchers: set[RequestDispatcher] = set()
        self._is_interrupted = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, one a server."""
        return tuple(server.url for server in self.pool.servers)

    @property
    def access(self) -> Access:
        """What opens them."""
        return self.pool.access

    @property
    def notes(self) -> list[str]:
        """What the user should know about these engines before the run starts, one sentence each."""
        return self.pool.notes

    @property
    def restarts(self) -> Restarts:
        """Who may start a lost server again; nobody, until `restarts.allow` is called."""
        return self.pool.restarts

    def wait_ready(self) -> None:
        """Until every server answers and has been checked; then `notes` is complete. Raises EngineStartError when a
        server of ours does not come up, EngineError when a given URL does not answer or serves something else."""
        self.pool.wait_ready()

    def check_experts(self) -> None:
        """Raises EngineStartError for a server that cannot say which experts tokens went to."""
        for url, info in self._infos().items():
            if not info.returns_experts:
                raise EngineStartError(
                    f"engine {url} does not say which experts tokens went to (actor.routing_replay: engine): "
                    f"start it with {ASK}"
                )

    def check_room(self, tokens: int) -> None:
        """Raises EngineStartError for a server that has no room for so many tokens of prompt and response: it would cut
        responses short, or refuse them in the middle of the run."""
        for url, info in self._infos().items():
            if info.room is not None and info.room < tokens:
                raise EngineStartError(
                    f"engine {url} has room for {info.room} tokens of prompt and response together (its context length "
                    f"or its KV cache), and the run may ask for {tokens}: start it with more, or lower "
                    "data.max_prompt_tokens, rollout.sampling.max_new_tokens or agent.max_tokens"
                )

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks of each server, of which `wait_ready` has found the same."""
        assert self.pool.tensor is not None, "wait_ready comes first"
        return self.pool.tensor

    @property
    def computes_in(self) -> set[tuple[str, str]]:
        """(device, dtype) of every server that is there now, as `ServerInfo` has them."""
        return {(info.device, info.dtype) for info in self._infos().values()}

    def _infos(self) -> dict[str, ServerInfo]:
        found = {}
        for url in self.urls:
            with closing(self.client(url)) as client:
                found[url] = client.server_info()
        return found

    def close(self) -> None:
        """End the servers that mrl started; given URLs are left alone."""
        self.pool.close()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_samples: OnSamples | None = None,
        *,
        over_pushes: bool = False,
    ) -> list[Sample]:
        """Finished samples ordered by sample_id. `on_samples` is called in this thread with those that finish together.

        Log-probs are of logits / temperature (raw logits when greedy), not renormalised for top_p and top_k.
        A server of ours that dies or does not answer within rollout.request_timeout_s is started again as often as
        `restarts` allows; what it had not finished is sampled again with the same seeds.
        Raises RolloutError when that is not allowed, an engine refuses, has given up memory or lacks its weights; no
        request is left running on the other servers then. over_pushes: as `follow`, which see.
        """
        self.wait_ready()
        for server in self.pool.servers if not over_pushes else ():
            if (reason := server.asleep()) is not None:
                raise RolloutError(reason)
        if sampling.stop and not self.pool.accepts_stop_strings:
            raise RolloutError(
                f"stop strings {list(sampling.stop)} need an engine with a tokenizer, but {self.urls[0]} was started "
                "without one: set them in rollout.sampling.stop, or use stop_token_ids"
            )
        if not requests:
            return []
        samples: list[Sample] = []

        def finished(some: list[Sample]) -> None:
            samples.extend(some)
            if on_samples is not None:
                on_samples(some)

        self.pool.forget_losses()
        self._dispatch(_once(requests), sampling, finished, over_pushes)
        return sorted(samples, key=lambda sample: sample.request.sample_id)

    def follow(self, queue: RequestQueue, sampling: SamplingParams, on_samples: OnSamples) -> None:
        """Samples the requests of `queue` until it ends and all have finished, also during weight syncs: samples say
        which version generated which token. For a thread of its own; another one restarts servers.

        Raises RolloutError as `generate`, ServerLost for a server that is lost (`replace`): no request is left running.
        """
        self._dispatch(queue.batches(), sampling, on_samples, over_pushes=True)

    def _dispatch(
        self,
        batches: AsyncIterator[Sequence[Request]],
        sampling: SamplingParams,
        on_samples: OnSamples,
        over_pushes: bool,
    ) -> None:
        routed = self.routed if sampling.return_routed_experts else None
        version, versions = (None, self.versions) if over_pushes else (self.weight_version, None)
        expected = Expected(self.vocab_size, sampling.max_new_tokens, version, versions, routed)
        limits = self.concurrent_requests, self.request_timeout_s
        dispatcher = RequestDispatcher(
            self.pool, sampling, expected, *limits, self.adapter, restarts_engines=not over_pushes
        )
        self._dispatchers.add(dispatcher)
        try:
            if self._is_interrupted:
                raise RolloutError("sampling was interrupted")
            dispatcher.run(batches, on_samples)
        finally:
            self._dispatchers.discard(dispatcher)

    def replace(self, lost: ServerLost) -> list[str]:
        """Starts a server again that `follow` has lost, unless that has been done; the weights are for the caller to
        push. Its address, if it lacks them now, or has left with its node. Raises RolloutError if it cannot be."""
        return self.pool.replace(lost)

    def interrupt(self) -> None:
        """Ends what another thread samples, and refuses all that would be later; no request is left running."""
        self._is_interrupted = True
        for dispatcher in self._dispatchers.copy():  # a copy is made at once, whatever other threads add
            dispatcher.cancel()

    def take_loads(self) -> tuple[dict[str, Load], Load]:
        """Since the last call: what each server had to do, by URL, and the requests that waited here for one."""
        return {server.url: server.meter.take() for server in self.pool.servers}, self.pool.waiting.take()

    # ---- memory

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Gives up these parts of every server's memory, as far as it holds them. Waits until no request runs.

        Weights are gone then, and back with the first push after `resume_memory`. A server of ours that dies or does
        not answer within rollout.request_timeout_s is started again as often as `restarts` allows, gives up as much,
        and lacks its weights (`lacks_weights`). Raises RolloutError when that is not allowed, or a server refuses.
        """
        self.wait_ready()
        self.pool.settle(lambda released: released | set(parts))

    def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Takes back these parts of every server's memory, as far as they are given up; restarts and errors as in
        `release_memory`."""
        self.pool.settle(lambda released: released - set(parts))

    @property
    def lacks_weights(self) -> bool:
        """Whether a server has given its weights up, or lost them with its life, and got no others since: they must be
        pushed before it samples."""
        return not all(server.has_weights for server in self.pool.servers)

    def check_push(self, url: str) -> None:
        """Raises EngineError if the weights of the server at `url` are given up: a push would write into nothing."""
        (server,) = (server for server in self.pool.all if server.url == url)
        if "weights" in server.released:
            text = "not asked: the memory of its weights is given up; take it back before the push"
            raise EngineError(url, BEGIN_UPDATE.name, None, text)

    def is_pushing(self, version: str) -> None:
        """To be called before each push: samples that are under way may come back with this version as soon as the
        engines go on."""
        self.versions.add(version)
        self.pool.stall.begin("all servers")

    def has_pushed(self, version: str, adapter: str | None = None) -> None:
        """To be called after each push of weights to all servers: from now on samples of others are refused.

        adapter: the name of what was pushed, where it is not the whole model
        """
        self.weight_version, self.adapter = version, adapter
        self.pool.stall.end("all servers")
        self.pool.welcome()
        for server in self.pool.servers:
            server.has_weights = True

    def present(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The addresses of all engines that a push is for now, and of those among them that have never had weights of
        the run. Engines that have left are out. Raises RolloutError if there has been none for too long."""
        servers = self.pool.present()
        return tuple(server.url for server in servers), tuple(s.url for s in servers if s not in self.pool.servers)

    def end_of_run(self) -> None:
        """The last step is made: `mrl serve` ends."""
        self.pool.end_of_run()

    def client(self, url: str, timeout_s: float = 300.0) -> EngineClient:
        """Of the server at `url`, one of `urls`."""
        return self.pool.client(url, timeout_s)

    def revive(self, error: Exception) -> bool:
        """After a failed push of weights: starts again what has died in it; the weights are for the caller to push.

        Returns whether there was such a server and a restart left for it.
        """
        return self.pool.revive(error)


async def _once(requests: Sequence[Request]) -> AsyncIterator[Sequence[Request]]:
    yield requests
