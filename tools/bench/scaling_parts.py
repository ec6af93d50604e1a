"""The parts of a step that `tools/bench/scaling.py` measures: production code on made-up input of a given size."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCAB = 151_000
PROMPT = 256
Row = dict[str, float]


class Clock:
    """Processor seconds (cpu_s: of all threads, main_s: of the one that waits) and wall seconds of parts, by name."""

    def __init__(self) -> None:
        self.row: Row = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        clocks = {"cpu_s": time.process_time, "main_s": time.thread_time, "wall_s": time.monotonic}
        began = {kind: clock() for kind, clock in clocks.items()}
        yield
        for kind, clock in clocks.items():
            self.row[f"{name}_{kind}"] = self.row.get(f"{name}_{kind}", 0.0) + clock() - began[kind]

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Counts what `owner.method` takes."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def far_engine(tokens: int) -> Iterator[int]:
    """The port of an engine in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "port"
        engine = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "far_engine.py"), str(file), str(tokens)]
        )
        try:
            while not file.is_file():
                assert engine.poll() is None
                time.sleep(0.05)
            yield int(file.read_text())
        finally:
            engine.kill()
            engine.wait()


# ---- rank 0: sampling


def tokenizer() -> Any:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mrl.data import Tokenizer

    draw, letters = random.Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab: dict[str, int] = {"<eos>": 0}
    while len(vocab) < VOCAB:
        vocab.setdefault("".join(draw.choices(letters, k=draw.randint(1, 6))), len(vocab))
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>"), [])


def sampling(samples: int, tokens: int, servers: int = 8) -> Row:
    """Rank 0: a step's prompts to engines, their answers to a Rollout and to the samples file, with exact_match."""
    from mrl import platform

    platform.install()
    from mrl.config.schema import RLConfig
    from mrl.core import Prompt
    from mrl.inference.access import OPEN
    from mrl.inference.engine import Engine
    from mrl.inference.engine_pool import EnginePool
    from mrl.inference.server import Server
    from mrl.inference.server_info import UNCHECKED
    from mrl.reward.manager import RewardManager
    from mrl.trainers.rl import generate

    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match", "workers": 2}, "algorithm": {"adv_estimator": "grpo", "lam": 1.0},
        "rollout": {"sampling": {"max_new_tokens": tokens}},
        "batch": {"prompts_per_step": samples // 8, "samples_per_prompt": 8},
    })  # fmt: skip
    ids = tuple(range(1, PROMPT + 1))
    prompts = [Prompt(i, ids, {"prompt": f"p{i}", "answer": "42"}, f"p{i}") for i in range(samples // 8)]
    data: Any = SimpleNamespace(prompts_for_step=lambda step, count, seed: prompts[step : step + count])
    clock = Clock()
    with far_engine(tokens) as port, tempfile.TemporaryDirectory() as folder, RewardManager(cfg.reward) as rewards:
        urls = [f"http://127.0.0.{i + 1}:{port}" for i in range(servers)]
        pool = EnginePool(
            [Server(url) for url in urls], OPEN, lambda url: (UNCHECKED, ()),
            startup_timeout_s=60, max_restarts=0, memory_timeout_s=60,
        )  # fmt: skip
        engine = Engine(pool, vocab_size=VOCAB, concurrent_requests=256, request_timeout_s=600)
        (Path(folder) / "rollouts").mkdir()
        made = generate.Generator(cfg, Path(folder), engine, rewards, print, tokenizer(), data, None)
        texts = "decode_all" if hasattr(made.tokenizer, "decode_all") else "decode"  # of trees before it
        made.open_scheduler(SimpleNamespace(most_s=600.0, left_s=lambda since: 600.0))
        watched = [(made.scheduler, "wait"), (made.tokenizer, texts), (rewards, "submit"), (rewards, "collect")]
        for owner, method in [*watched, (generate, "collate"), (generate, "save_samples")]:
            clock.watch(owner, method, method)
        base = peak_mib()
        with clock.of("all"):
            rollout, _ = made.step(0)
        assert rollout.num_response_tokens == samples * tokens
    return clock.row | {"memory_mib": peak_mib() - base}


def client(samples: int, tokens: int, in_flight: int, servers: int = 8) -> Row:
    """Rank 0: one request per sample to engines, their answers to samples, which nobody keeps."""
    from mrl.core import Prompt, Request, SamplingParams
    from mrl.inference.access import OPEN
    from mrl.inference.engine_pool import EnginePool
    from mrl.inference.request_dispatcher import Generation, PromptGroup, RequestDispatcher, by_prompt
    from mrl.inference.samples import Expected
    from mrl.inference.server import Server
    from mrl.inference.server_info import UNCHECKED

    prompts, clock, answered = [Prompt(i, tuple(range(1, PROMPT + 1)), {}) for i in range(64)], Clock(), 0

    requests = [Request(i, i // 8, prompts[i // 8 % 64], i) for i in range(samples)]

    async def one(request: Request, group: PromptGroup) -> None:
        nonlocal answered
        await dispatcher.generate(request, how, group)
        answered += 1

    async def every() -> None:
        await asyncio.gather(*(one(request, group) for group in by_prompt(requests) for request in group.requests))

    with far_engine(tokens) as port:
        pool = EnginePool(
            [Server(f"http://127.0.0.{i + 1}:{port}") for i in range(servers)], OPEN, lambda url: (UNCHECKED, ()),
            startup_timeout_s=60, max_restarts=0, memory_timeout_s=60,
        )  # fmt: skip
        how = Generation(SamplingParams(max_new_tokens=tokens), Expected(VOCAB, tokens))
        dispatcher = RequestDispatcher(pool, in_flight, 600)
        dispatcher.submit(every()).result()
        base, answered = peak_mib(), 0
        with clock.of("all"):
            dispatcher.submit(every()).result()
        dispatcher.close()
        assert answered == samples
    return clock.row | {"sample_cpu_ms": 1000 * clock.row["all_cpu_s"] / samples, "memory_mib": peak_mib() - base}


# ---- every rank: from samples to updates, without the model


def a_rollout(samples: int, tokens: int) -> Any:
    import torch

    from mrl.core import Rollout

    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(tokens // 2, tokens * 3 // 2, (samples,), generator=generator)
    lens[-1] += samples * tokens - int(lens.sum()) if samples * tokens - int(lens.sum()) > -tokens // 2 else 0
    total = int(lens.sum())
    tokens = torch.randint(VOCAB, (total + samples * PROMPT,), generator=generator)
    starts = (lens + PROMPT).cumsum(0) - lens - PROMPT
    for first, own in zip(starts[torch.arange(samples) // 8 * 8].tolist(), starts.tolist(), strict=True):
        tokens[own : own + PROMPT] = tokens[first : first + PROMPT]
    return Rollout(
        step=0,
        tokens=tokens,
        seq_lens=lens + PROMPT,
        prompt_lens=torch.full((samples,), PROMPT),
        group=torch.arange(samples) // 8,
        scores=torch.rand(samples, generator=generator).round(),
        rollout_log_probs=-torch.rand(total, generator=generator),
        rows=torch.arange(samples) // 8,
        weight_versions=torch.zeros(samples, dtype=torch.int64),
    )


def an_arch() -> Any:
    """A model of 7B parameters, whose costs are balanced."""
    from mrl.families import LayerArch, ModelArch

    return ModelArch(
        family="qwen2", vocab_size=VOCAB, hidden_size=3584, layers=(LayerArch(18944),) * 28, num_heads=28,
        num_kv_heads=4, head_dim=128, norm_eps=1e-6, tied_embeddings=False, qkv_bias=True, qk_norm=False,
        max_positions=1 << 17, initializer_range=0.02, eos_token_ids=(),
    )  # fmt: skip


def host_learner(role: str, ranks: int) -> Any:
    """A Learner of rank 0 of TP8 x PP2, whose model answers -1 to everything."""
    import torch

    from mrl.config.schema import ParallelConfig, PrecisionConfig
    from mrl.learner import Learner
    from mrl.learner.micro_batches import MicroBatchPlanner

    arch = an_arch()

    class HostLearner(Learner):
        def __init__(self) -> None:
            self.role, self.arch, self.trainable = role, arch, True  # type: ignore[assignment]
            self.mesh: Any = SimpleNamespace(
                dp=ranks // 16,
                dp_rank=0,
                tp=8,
                tp_rank=0,
                cp=1,
                cp_rank=0,
                pp=2,
                vpp=None,
                cp_group=None,
                cfg=ParallelConfig(tensor=8, pipeline=2),
            )
            self.train: Any = SimpleNamespace(max_tokens_per_microbatch=32768, precision=PrecisionConfig())
            self.planner = MicroBatchPlanner(self.mesh, self.train, arch, self.role, shares=True)
            self.flop_counter: Any = SimpleNamespace(add=lambda *args, **more: None)
            self.last_outputs: Any = SimpleNamespace(begin=lambda: None, add=lambda *args: None)
            self.adapters = self.replay = None
            self.bare = []
            self.memory: Any = SimpleNamespace(require=lambda *args: None)
            self.chunks = []
            self.optimizer: Any = SimpleNamespace(zero_grad=lambda: None)

        def _schedule(self, batches: Any, rollouts: Any, output: Any, on_output: Any, **megatron: Any) -> None:
            for batch in batches:
                on_output(
                    torch.full((2 if output == "log_probs" else 1, batch.packed.response_indices.numel()), -1.0), batch
                )

        def _reduce_metrics(self, terms: Any) -> Row:
            return {"loss": sum(float(part.loss) for _, parts in terms for part in parts)}

        def step(self) -> Row:
            return {"grad_norm": 1.0, "lr": 1.0, "skipped": 0.0}

    return HostLearner()


def host(samples: int, tokens: int, ranks: int, minibatch: int, critic: bool = False) -> Row:
    """One rank: a pass for log-probs, experience and updates of a step, with a model that takes no time."""
    from mrl import platform

    platform.install()
    import torch

    from mrl.config.schema import RLConfig
    from mrl.learner import losses
    from mrl.platform.fake_rank import fake_rank
    from mrl.trainers.rl.experience import forward_passes, make_experience
    from mrl.trainers.rl.loop import update
    from tests.helpers.bare_run import bare_run

    estimator = {"adv_estimator": "gae"} if critic else {"adv_estimator": "grpo", "lam": 1.0}
    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match"}, "algorithm": estimator, "critic": {} if critic else None,
        "batch": {"prompts_per_step": samples // 8, "samples_per_prompt": 8, "samples_per_minibatch": minibatch},
    })  # fmt: skip
    rollout, clock, moved = a_rollout(samples, tokens), Clock(), [0]
    to = losses.PolicyTargets.to

    def counted(self: Any, device: Any) -> Any:
        parts = [x for x in vars(self).values() if isinstance(x, torch.Tensor)]
        parts += [self.sequences.member, self.sequences.counted] if self.sequences is not None else []
        moved[0] = max(moved[0], sum(x.numel() * x.element_size() for x in parts))
        return to(self, device)

    losses.PolicyTargets.to = counted  # type: ignore[method-assign]
    with fake_rank(0, ranks, device="cpu"):
        actor, values = host_learner("policy", ranks), host_learner("critic", ranks) if critic else None
        run, base = bare_run(cfg, actor, values), peak_mib()
        for learner in filter(None, (actor, values)):
            clock.watch(learner.planner, "micro_batches", "micro_batches")
        with clock.of("passes"):
            passes = forward_passes(cfg.algorithm, rollout, 1.0, actor, values)
        with clock.of("experience"):
            made = make_experience(cfg.algorithm, rollout, passes, 0.0)
        with clock.of("update"):
            update(run, made, trains_actor=True)
    return clock.row | {"memory_mib": peak_mib() - base, "to_device_mib": moved[0] / 2**20}


def plan(samples: int, tokens: int, ranks: int) -> Row:
    """Which samples go into which micro-batch."""
    from mrl.data.balance import plan_micro_batches

    lens, clock = a_rollout(samples, tokens).seq_lens, Clock()
    with clock.of("plan"):
        made = plan_micro_batches(lens, ranks // 16, 32768)
    return clock.row | {"micro_batches": sum(map(len, made))}


# ---- rank 0: many engines


def engines(servers: int) -> Row:
    """Rank 0 and its engines, one request after the other or all at once: checks at the start, a push without bytes."""
    from mrl import platform

    platform.install()
    from mrl.config.schema import RolloutConfig, SyncConfig
    from mrl.inference.access import OPEN
    from mrl.inference.check import check_server
    from mrl.inference.engine_pool import EnginePool
    from mrl.inference.server import Server
    from mrl.weights.sync.weight_sync import WeightSync

    exporter: Any = SimpleNamespace(arch=an_arch(), metas=list, stream=lambda: iter(()))
    cfg, clock = RolloutConfig(), Clock()
    with far_engine(2) as port:
        urls = [f"http://127.0.{i // 250}.{i % 250 + 1}:{port}" for i in range(servers)]
        pool = EnginePool(
            [Server(url) for url in urls], OPEN,
            lambda url: check_server(url, OPEN, cfg, "far", "llama", "float32", outlives=True),
            startup_timeout_s=60, max_restarts=0, memory_timeout_s=60,
        )  # fmt: skip
        with clock.of("checks"):
            pool.wait_ready()
        sync = WeightSync(exporter, urls, SyncConfig(transport="http"))
        for name in ("push", "again"):
            with clock.of(name):
                sync.update_weights("1")
        sync.close()
    return clock.row


def broadcast(receivers: int, mib: int) -> Row:
    """A sender: weights by gloo to so many engines of another process, of which all take the same cores; the bytes that
    it writes to sockets by gloo."""
    from mrl import platform

    platform.install()
    import torch

    from mrl.config.schema import SyncConfig
    from mrl.inference.access import Access
    from mrl.weights.meta import TensorMeta
    from mrl.weights.sync.weight_sync import WeightSync
    from tests.helpers.receiving_engine import KEY

    def written() -> int:
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    tensors = {f"w{i}": torch.rand(1 << 18) for i in range(mib)}
    metas = [TensorMeta(name, tuple(tensor.shape), tensor.dtype, 0) for name, tensor in tensors.items()]
    exporter: Any = SimpleNamespace(arch=an_arch(), metas=lambda: metas, stream=lambda: iter(tensors.items()))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "urls"
        engine = subprocess.Popen([sys.executable, "-m", "tests.helpers.receiving_engine", str(file), str(receivers)])
        try:
            while not file.is_file():
                assert engine.poll() is None
                time.sleep(0.05)
            config = SyncConfig(transport="distributed", bucket_mib=16)
            sync = WeightSync(exporter, file.read_text().split(), config, access=Access(KEY))
            with clock.of("first"):
                sync.update_weights("1")
            before = written()
            with clock.of("again"):
                sync.update_weights("2")
            sent = written() - before
            sync.close()
        finally:
            engine.kill()
            engine.wait()
    return clock.row | {"sent_mib": sent / 2**20}


PARTS: dict[str, Callable[..., Row]] = {
    "sampling": sampling, "client": client, "host": host, "plan": plan, "engines": engines, "broadcast": broadcast,
}  # fmt: skip
os.environ.setdefault("OMP_NUM_THREADS", "1")
