"""Parts of a step that `tools/bench/scaling.py` measures: mrl's code on synthetic input of a given size."""

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
    """Measures parts by name: cpu_s, processor seconds of all threads; main_s, of the calling thread; wall_s."""

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
        """Measures every call of `owner.method`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def fake_engine(tokens: int) -> Iterator[int]:
    """Starts fake_engine.py and yields its port."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "port"
        engine = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fake_engine.py"), str(file), str(tokens)]
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

    rng, letters = random.Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab: dict[str, int] = {"<eos>": 0}
    while len(vocab) < VOCAB:
        vocab.setdefault("".join(rng.choices(letters, k=rng.randint(1, 6))), len(vocab))
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>"), [])


def sampling(samples: int, tokens: int, servers: int = 8) -> Row:
    """Rank 0: sends a step's prompts to engines; makes a Rollout and the samples file from the answers and rewards."""
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
    with fake_engine(tokens) as port, tempfile.TemporaryDirectory() as folder, RewardManager(cfg.reward) as rewards:
        urls = [f"http://127.0.0.{i + 1}:{port}" for i in range(servers)]
        pool = EnginePool(
            [Server(url) for url in urls], OPEN, lambda url: (UNCHECKED, ()),
            startup_timeout_s=60, max_restarts=0, memory_timeout_s=60,
        )  # fmt: skip
        engine = Engine(pool, vocab_size=VOCAB, concurrent_requests=256, request_timeout_s=600)
        (Path(folder) / "rollouts").mkdir()
        generator = generate.Generator(cfg, Path(folder), engine, rewards, print, tokenizer(), data, None)
        generator.open_scheduler(SimpleNamespace(most_s=600.0, left_s=lambda since: 600.0))
        methods = [(generator.scheduler, "wait"), (generator.tokenizer, "decode_all")]
        methods += [(rewards, "submit"), (rewards, "collect"), (generate, "collate"), (generate, "save_samples")]
        for owner, method in methods:
            clock.watch(owner, method, method)
        base = peak_mib()
        with clock.of("all"):
            rollout, _ = generator.step(0)
        assert rollout.num_response_tokens == samples * tokens
    return clock.row | {"memory_mib": peak_mib() - base}


def client(samples: int, tokens: int, in_flight: int, servers: int = 8) -> Row:
    """Rank 0: sends one request per sample to engines, and makes samples from the answers, which are discarded."""
    from mrl.core import Prompt, Request, SamplingParams
    from mrl.inference.access import OPEN
    from mrl.inference.engine_pool import EnginePool
    from mrl.inference.request_dispatcher import Generation, PromptGroup, RequestDispatcher, by_prompt
    from mrl.inference.samples import Expected
    from mrl.inference.server import Server
    from mrl.inference.server_info import UNCHECKED

    prompts, clock, num_answers = [Prompt(i, tuple(range(1, PROMPT + 1)), {}) for i in range(64)], Clock(), 0

    requests = [Request(i, i // 8, prompts[i // 8 % 64], i) for i in range(samples)]

    async def send(request: Request, group: PromptGroup) -> None:
        nonlocal num_answers
        await dispatcher.generate(request, generation, group)
        num_answers += 1

    async def send_all() -> None:
        await asyncio.gather(*(send(request, group) for group in by_prompt(requests) for request in group.requests))

    with fake_engine(tokens) as port:
        pool = EnginePool(
            [Server(f"http://127.0.0.{i + 1}:{port}") for i in range(servers)], OPEN, lambda url: (UNCHECKED, ()),
            startup_timeout_s=60, max_restarts=0, memory_timeout_s=60,
        )  # fmt: skip
        generation = Generation(SamplingParams(max_new_tokens=tokens), Expected(VOCAB, tokens))
        dispatcher = RequestDispatcher(pool, in_flight, 600)
        dispatcher.submit(send_all()).result()
        base, num_answers = peak_mib(), 0
        with clock.of("all"):
            dispatcher.submit(send_all()).result()
        dispatcher.close()
        assert num_answers == samples
    return clock.row | {"sample_cpu_ms": 1000 * clock.row["all_cpu_s"] / samples, "memory_mib": peak_mib() - base}


# ---- every rank: from samples to updates, without the model


def random_rollout(samples: int, tokens: int) -> Any:
    import torch

    from mrl.core import Rollout

    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(tokens // 2, tokens * 3 // 2, (samples,), generator=generator)
    missing = samples * tokens - int(lens.sum())
    lens[-1] += missing if missing > -tokens // 2 else 0
    total = int(lens.sum())
    ids = torch.randint(VOCAB, (total + samples * PROMPT,), generator=generator)
    starts = (lens + PROMPT).cumsum(0) - lens - PROMPT
    for first, start in zip(starts[torch.arange(samples) // 8 * 8].tolist(), starts.tolist(), strict=True):
        ids[start : start + PROMPT] = ids[first : first + PROMPT]  # a group shares its prompt
    return Rollout(
        step=0,
        tokens=ids,
        seq_lens=lens + PROMPT,
        prompt_lens=torch.full((samples,), PROMPT),
        group=torch.arange(samples) // 8,
        scores=torch.rand(samples, generator=generator).round(),
        rollout_log_probs=-torch.rand(total, generator=generator),
        rows=torch.arange(samples) // 8,
        weight_versions=torch.zeros(samples, dtype=torch.int64),
    )


def qwen_7b_arch() -> Any:
    """Returns the architecture of a model with 7B parameters."""
    from mrl.families import LayerArch, ModelArch

    return ModelArch(
        family="qwen2", vocab_size=VOCAB, hidden_size=3584, layers=(LayerArch(18944),) * 28, num_heads=28,
        num_kv_heads=4, head_dim=128, norm_eps=1e-6, tied_embeddings=False, qkv_bias=True, qk_norm=False,
        max_positions=1 << 17, initializer_range=0.02, eos_token_ids=(),
    )  # fmt: skip


def host_learner(role: str, ranks: int) -> Any:
    """Returns the Learner of rank 0 at TP8 x PP2, with a model whose outputs are all -1."""
    import torch

    from mrl.config.schema import ParallelConfig, PrecisionConfig
    from mrl.learner import Learner
    from mrl.learner.micro_batches import MicroBatchPlanner

    arch = qwen_7b_arch()

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
    """One rank: log-probs, experience and updates of a step, with a model that takes no time."""
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
    rollout, clock, moved = random_rollout(samples, tokens), Clock(), [0]
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
            experience = make_experience(cfg.algorithm, rollout, passes, 0.0)
        with clock.of("update"):
            update(run, experience, trains_actor=True)
    return clock.row | {"memory_mib": peak_mib() - base, "to_device_mib": moved[0] / 2**20}


def plan(samples: int, tokens: int, ranks: int) -> Row:
    """Assigns samples to micro-batches."""
    from mrl.data.balance import plan_micro_batches

    lens, clock = random_rollout(samples, tokens).seq_lens, Clock()
    with clock.of("plan"):
        micro_batches = plan_micro_batches(lens, ranks // 16, 32768)
    return clock.row | {"micro_batches": sum(map(len, micro_batches))}


# ---- rank 0: many engines


def engines(servers: int) -> Row:
    """Rank 0: checks of all engines at the start, and two weight syncs without bytes."""
    from mrl import platform

    platform.install()
    from mrl.config.schema import RolloutConfig, SyncConfig
    from mrl.inference.access import OPEN
    from mrl.inference.check import check_server
    from mrl.inference.engine_pool import EnginePool
    from mrl.inference.server import Server
    from mrl.weights.sync.weight_sync import WeightSync

    exporter: Any = SimpleNamespace(arch=qwen_7b_arch(), metas=list, stream=lambda: iter(()))
    cfg, clock = RolloutConfig(), Clock()
    with fake_engine(2) as port:
        urls = [f"http://127.0.{i // 250}.{i % 250 + 1}:{port}" for i in range(servers)]
        pool = EnginePool(
            [Server(url) for url in urls], OPEN,
            lambda url: check_server(url, OPEN, cfg, "fake", "llama", "float32", outlives=True),
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
    """The sender of a weight sync over gloo to engines in another process on the same cores.

    sent_mib: MiB that gloo writes to sockets
    """
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
    exporter: Any = SimpleNamespace(arch=qwen_7b_arch(), metas=lambda: metas, stream=lambda: iter(tensors.items()))
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
