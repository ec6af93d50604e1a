"""Mistakes that preflight finds, in a run's configuration, files or machine."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mrl import platform, ports
from mrl.platform.gpu_health import SIZE, GpuHealth, assess

Edit = Callable[[Path, dict[str, Any]], None]


@dataclass(frozen=True)
class Mistake:
    """keys: overrides of the configuration; edit: changes the run's folder and environment; says: words that one
    finding contains"""

    id: str
    says: tuple[str, ...]
    keys: tuple[str, ...] = ()
    edit: Edit | None = None
    code: int = 1
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def in_config_json(**values: Any) -> Edit:
    def edit(folder: Path, _: dict[str, Any]) -> None:
        file = folder / "model/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def in_header(change: Callable[[dict[str, Any]], None]) -> Edit:
    """Changes the header of the safetensors file, which describes its tensors; the data stay as they are."""

    def edit(folder: Path, _: dict[str, Any]) -> None:
        file = folder / "model/model.safetensors"
        raw = file.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        change(header)
        content = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(content)) + content + raw[8 + size :])

    return edit


def renamed(old: str, new: str) -> Edit:
    return in_header(lambda header: header.update({new: header.pop(old)}))


def written(name: str, text: str | bytes) -> Edit:
    def edit(folder: Path, _: dict[str, Any]) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def removed(name: str) -> Edit:
    return lambda folder, _: (folder / name).unlink()


def left_by_a_run(folder: Path, _: dict[str, Any]) -> None:
    (folder / "runs/run").mkdir(parents=True)
    (folder / "runs/run/metrics.jsonl").write_text('{"step": 1}\n')


def versions(**found: str) -> Edit:
    """Pretends that another version of a package is installed; "" means that the package is missing."""

    def edit(_: Path, patch: dict[str, Any]) -> None:
        def version(part: str) -> str:
            if found.get(part) == "":
                raise importlib.metadata.PackageNotFoundError(part)
            return found.get(part) or importlib.metadata.version(part)

        patch["mrl.preflight.versions.metadata"] = SimpleNamespace(
            version=version,
            requires=lambda name: ["torch>=2.8", "transformers>=5.0,<6"],
            PackageNotFoundError=importlib.metadata.PackageNotFoundError,
        )

    return edit


def patched(name: str, value: Any) -> Edit:
    return lambda _, patch: patch.update({name: value})


def full(free: int) -> Edit:
    return patched(
        "mrl.preflight.disk_space.shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free))
    )


def sick(**of: Any) -> Edit:
    gpu = {"name": "H100", "free": 79, "total": 80, "capability": (9, 0)}
    gpus = [GpuHealth(index=0, **gpu), GpuHealth(**{"index": 1, **gpu, **of})]
    return patched("mrl.platform.gpu_health", lambda: gpus)


def hangs() -> list[GpuHealth]:
    raise platform.GpuTimeout("a small product on every GPU did not finish within 60 s")


def gpus_of(gib: float) -> Edit:
    """Pretends that the machine has a GPU of 80 GiB and one of `gib` GiB."""
    sizes = {"H100": 80 << 30, "L4": int(gib * (1 << 30))}
    found = [GpuHealth(number, name, size, size, (8, 9)) for number, (name, size) in enumerate(sizes.items())]
    return patched("mrl.platform.gpu_health", lambda: found)


def host_memory(total: int, available: int) -> Edit:
    seen = SimpleNamespace(total=total, available=available)
    return patched("mrl.preflight.memory.psutil", SimpleNamespace(virtual_memory=lambda: seen))


def none_free() -> int:
    raise ports.NoFreePort("no free port on 127.0.0.1 among 100 tried")


def without_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


SCORE = "reward.function=score.py:score"
A_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def scores(body: str) -> Edit:
    return written("score.py", f"def score(prompt, response, row):\n    {body}\n")


def no_room(dir: Path) -> None:
    raise OSError(28, "No space left on device")


MISTAKES = [
    # configuration and layout
    Mistake("a key misspelt", ("run.sed", "did you mean seed?"), ("run.sed=3",), code=2),
    Mistake("a value of another kind", ("run.steps", "must be an integer"), ("run.steps=many",), code=2),
    Mistake(
        "heads that do not divide", ("actor.parallel.tensor", "key-value heads"), ("actor.parallel.tensor=3",), code=2
    ),
    Mistake("more stages than layers", ("actor.parallel.pipeline", "2 layers"), ("actor.parallel.pipeline=4",), code=2),
    Mistake(
        "a layout that does not fill the world",
        ("actor.parallel.tensor", "do not divide the world", "of 3 ranks"),
        ("actor.parallel.tensor=2",),
        code=2,
        arguments=("--ranks", "3"),
    ),
    Mistake(
        "experts of a dense model", ("actor.parallel.expert", "not a dense one"), ("actor.parallel.expert=2",), code=2
    ),
    Mistake(
        "minibatches that do not divide",
        ("samples_per_minibatch", "does not divide"),
        ("batch.samples_per_minibatch=3",),
        code=2,
    ),
    Mistake("fewer samples than replicas", ("fewer than the 16",), ("run.nproc=16",), code=2),
    Mistake("no critic for gae", ("adv_estimator", "needs a critic"), ("algorithm.adv_estimator=gae",), code=2),
    Mistake(
        "a column of data sources that no row has",
        ("data.data_source_key has no effect", "no row has 'task'"),
        ("data.data_source_key=task",),
    ),
    Mistake("a group of one", ("samples_per_prompt", "at least 2"), ("batch.samples_per_prompt=1",), code=2),
    Mistake("restarts without checkpoints", ("run.launcher", "none is written"), ("run.launcher=ft",), code=2),
    Mistake(
        "a tracker twice",
        ("run.trackers", "names a tracker twice"),
        ("run.trackers=[tensorboard, tensorboard]",),
        code=2,
    ),
    Mistake(
        "keys of a tracker that is off", ("run.wandb", "not among the trackers"), ("run.wandb.project=mine",), code=2
    ),
    Mistake(
        "a step to profile that is none",
        ("run.profile.steps", "step 9 is after the last step"),
        ("run.profile={steps: [9]}",),
        code=2,
    ),
    Mistake(
        "a rank to profile that is none",
        ("run.profile.ranks", "rank 4 does not exist"),
        ("run.profile={steps: [1], ranks: [4]}",),
        code=2,
    ),
    Mistake(
        "nsys under another launcher",
        ("run.launcher", "torchrun starts the ranks itself, without nsys"),
        ("run.profile={tool: nsys, steps: [1]}", "run.launcher=torchrun"),
        code=2,
    ),
    Mistake(
        "a history of memory that no GPU has",
        ("run.memory_history", "this machine has no GPUs"),
        ("run.memory_history={steps: [1]}",),
        code=2,
    ),
    Mistake(
        "a history of memory of a step that is none",
        ("run.memory_history.steps", "step 9 is after the last step"),
        ("run.memory_history={steps: [9]}",),
        code=2,
    ),
    Mistake(
        "a history of memory that nobody sees",
        ("run.memory_history", "writes no snapshot"),
        ("run.memory_history={on_out_of_memory: false}",),
        code=2,
    ),
    Mistake(
        "a repository that is none",
        ("checkpoint.push_to_hub", "'mine' is not the name of a repository", "OWNER/NAME"),
        ("checkpoint.push_to_hub=mine", "checkpoint.export_hf=true"),
        code=2,
    ),
    Mistake(
        "an upload without an export",
        ("checkpoint.push_to_hub", "set export_hf: true"),
        ("checkpoint.push_to_hub=me/mine", "checkpoint.export_hf=false"),
        code=2,
    ),
    Mistake(
        "the visibility of nothing",
        ("checkpoint.hub_private", "nothing is uploaded"),
        ("checkpoint.hub_private=false",),
        code=2,
    ),
    Mistake("a name that is a path", ("run.name", "one plain directory name"), ("run.name=a/b",), code=2),
    # model, vocabulary, tokenizer
    Mistake("no model there", ("model.path", "config.json does not exist"), ("model.path=nowhere",), code=2),
    Mistake(
        "an unknown architecture",
        ("model.path", "is not supported"),
        edit=in_config_json(architectures=["MambaForCausalLM"]),
        code=2,
    ),
    Mistake(
        "a sliding window", ("model.path", "use_sliding_window"), edit=in_config_json(use_sliding_window=True), code=2
    ),
    Mistake(
        "a tokenizer larger than the model",
        ("model.path", "ids beyond it"),
        edit=in_config_json(vocab_size=100),
        code=2,
    ),
    Mistake(
        "an end token of another model",
        ("model.eos_token", "not in the vocabulary"),
        ("model.eos_token=<|im_end|>",),
        code=2,
    ),
    Mistake("no weights", ("model.path", "no safetensors"), edit=removed("model/model.safetensors"), code=2),
    Mistake(
        "another vocabulary's weights",
        ("model.embed_tokens.weight", "config.json requires [328"),
        edit=in_config_json(vocab_size=328),
    ),
    Mistake(
        "an output layer for a tied model",
        ("lm_head.weight", "tie_word_embeddings"),
        edit=in_config_json(tie_word_embeddings=True),
    ),
    Mistake(
        "no output layer for an untied one",
        ("no tensor lm_head.weight",),
        edit=renamed("lm_head.weight", "head.weight"),
    ),
    Mistake(
        "a layer too few", ("no tensor model.layers.2",), edit=in_config_json(num_hidden_layers=3, layer_types=None)
    ),
    Mistake(
        "a layer too many",
        ("does not use its tensor model.layers.1",),
        edit=in_config_json(num_hidden_layers=1, layer_types=None),
    ),
    Mistake("a tensor by another name", ("does not use its tensor norm",), edit=renamed("model.norm.weight", "norm")),
    Mistake("another width", ("gate_proj", "shape [128, 64]"), edit=in_config_json(intermediate_size=96)),
    Mistake(
        "a cut file",
        ("model.path", "model.safetensors"),
        edit=lambda folder, _: os.truncate(folder / "model/model.safetensors", 5000),
    ),
    # data, template
    Mistake("no data", ("data.train", "is not on this machine"), ("data.train=none.jsonl",), code=2),
    Mistake("prompts by another name", ("data.prompt_key", "question"), ("data.prompt_key=question",), code=2),
    Mistake(
        "a row without a prompt",
        ("train.jsonl:2", "no key 'prompt'"),
        edit=written("train.jsonl", '{"prompt": "a", "answer": "b"}\n{"answer": "b"}\n'),
    ),
    Mistake(
        "a row that is no JSON",
        ("train.jsonl:2",),
        edit=written("train.jsonl", '{"prompt": "a", "answer": "b"}\n{"pro\n'),
    ),
    Mistake(
        "messages without a template",
        ("train.jsonl:2", "chat_template: true"),
        edit=written("train.jsonl", '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}\n'),
    ),
    Mistake(
        "a row that no reward can judge",
        ("train.jsonl:1", "answer"),
        ("reward.function=exact_match",),
        edit=written("train.jsonl", '{"prompt": "a"}\n'),
    ),
    Mistake(
        "a template that refuses",
        ("train.jsonl:1", "the chat template rejects it: no"),
        ("data.chat_template=true",),
        edit=written("model/chat_template.jinja", "{{ raise_exception('no') }}"),
    ),
    # reward
    Mistake(
        "no such function",
        ("reward.function", "does not define 'scor'"),
        ("reward.function=score.py:scor",),
        edit=scores("return 1.0"),
        code=2,
    ),
    Mistake(
        "a reward server that is not there",
        ("reward.servers.judge.url", "nothing answers at 127.0.0.1 port 1 ", "start the server"),
        ("reward={manager: remote, function: null, servers: {judge: {url: 'http://127.0.0.1:1/score'}}}",),
    ),
    # the user's own algorithm
    Mistake(
        "a loss of one's own that fails",
        ("mine.py:f", "tried out on a few tokens"),
        ("algorithm.policy_loss={function: mine.py:f}",),
        edit=written("mine.py", "def f(t):\n    return t.nothing\n"),
    ),
    # run directory, disk
    Mistake("a run that is there", ("runs/run", "run.existing=move_aside"), edit=left_by_a_run),
    Mistake(
        "no file can be made",
        ("run.root", "choose another run.root"),
        edit=patched("mrl.preflight.disk_space.tempfile", SimpleNamespace(TemporaryFile=no_room)),
    ),
    Mistake(
        "a file system without locks",
        ("run.root: the file system of ", "no locks (flock: Function not implemented)", "-o localflock"),
        edit=patched("fcntl.flock", without_locks),
    ),
    Mistake(
        "a disk too small for checkpoints",
        ("a checkpoint is 1.844 MB", "1 MB free", "checkpoint.keep_last"),
        ("checkpoint.every_steps=1", "run.steps=3"),
        edit=full(1_000_000),
    ),
    # memory
    Mistake(
        "the smallest GPU is too small",
        ("rollout: rank 0 needs", "its GPU has 1.0", "engine weights and cache", "more GPUs"),
        edit=gpus_of(1),
    ),
    Mistake(
        "GPUs that are named are too small",
        (
            "actor_update: rank 0 needs",
            "its GPU has 40.0",
            "actor activations",
            "a smaller actor.max_tokens_per_microbatch",
        ),
        ("actor.max_tokens_per_microbatch=4194304", "batch.prompts_per_step=65536"),
        arguments=("--gpu", "a100-40g"),
    ),
    Mistake(
        "an engine that keeps its memory",
        ("actor_update: rank 0 needs", "rollout.release: all (the engine holds"),
        ("actor.max_tokens_per_microbatch=1048576", "batch.prompts_per_step=16384", "rollout.memory_fraction=0.95"),
        arguments=("--gpu", "a100-40g"),
    ),
    Mistake("too little host memory", ("this machine has 1 MB", "fewer ranks"), edit=host_memory(10**6, 10**6)),
    Mistake(
        "a place for temporary files that is none",
        ("TMPDIR is '/nowhere'", "writable"),
        environment={"TMPDIR": "/nowhere"},
    ),
    # packages and versions
    Mistake(
        "no engine installed",
        ("rollout.engine: transformers", "not installed"),
        edit=patched("mrl.inference.sglang.command.importlib.util.find_spec", lambda name: None),
    ),
    Mistake(
        "no wandb installed",
        ("run.trackers: wandb", "pip install"),
        ("run.trackers=[wandb]",),
        edit=patched("mrl.observe.trackers.find_spec", lambda name: None),
    ),
    Mistake(
        "no token of the hub",
        ("checkpoint.push_to_hub: me/mine", "no token", "hf auth login"),
        ("checkpoint.push_to_hub=me/mine", "checkpoint.export_hf=true"),
        edit=patched("mrl.preflight.machine.get_token", lambda: None),
    ),
    Mistake(
        "no ft_launcher installed",
        ("run.launcher: ft", "pip install"),
        ("run.launcher=ft", "checkpoint.every_steps=1"),
        edit=patched("mrl.launcher.elastic.importlib.util.find_spec", lambda name: None),
    ),
    Mistake(
        "a torch that is too old",
        ("torch 2.7.1 ", "mrl needs >=2.8", "pip install torch==2.13.0"),
        edit=versions(torch="2.7.1"),
    ),
    Mistake(
        "no transformers",
        ("transformers is not installed", "pip install transformers=="),
        edit=versions(transformers=""),
    ),
    # machine and network
    Mistake(
        "kernels that nobody knows",
        ("MRL_KERNELS is 'troch'; known: torch", "or unset it"),
        environment={"MRL_KERNELS": "troch"},
    ),
    Mistake(
        "kernels by a name that nobody reads",
        ("MRL_KERNEL in the environment has no effect: did you mean MRL_KERNELS?", "or unset it"),
        environment={"MRL_KERNEL": "torch"},
    ),
    Mistake(
        "a repair that nobody knows",
        ("MRL_PLATFORM_OFF names ", "nonsense; known: all, ", "or unset it"),
        environment={"MRL_PLATFORM_OFF": "nonsense"},
    ),
    Mistake(
        "an interface that is not there", ("GLOO_SOCKET_IFNAME=eth9", "lo"), environment={"GLOO_SOCKET_IFNAME": "eth9"}
    ),
    Mistake(
        "an interface by a beginning, for gloo",
        ("GLOO_SOCKET_IFNAME==lo", "without the = and ^"),
        environment={"GLOO_SOCKET_IFNAME": "=lo"},
    ),
    Mistake(
        "no interface that begins so",
        ("NCCL_SOCKET_IFNAME=ib,eth9", "no such interface"),
        environment={"NCCL_SOCKET_IFNAME": "ib,eth9"},
    ),
    Mistake(
        "a first node that has no name",
        ("MASTER_ADDR=node..1", "not a host name"),
        environment=A_RANK | {"MASTER_ADDR": "node..1"},
    ),
    Mistake(
        "a first node that nobody knows",
        ("MASTER_ADDR=no.such.host.invalid",),
        environment=A_RANK | {"MASTER_ADDR": "no.such.host.invalid"},
    ),
    Mistake("all ports taken", ("no free port",), edit=patched("mrl.ports.free_port", none_free)),
    Mistake(
        "transformer-engine where there is none",
        ("actor.layers", "GPUs"),
        ("actor.layers=transformer_engine", "model.dtype=bfloat16"),
        code=2,
    ),
    Mistake(
        "a GPU that computes incorrectly",
        ("GPU 1 (H100): computes incorrectly", "CUDA_VISIBLE_DEVICES"),
        edit=sick(problem="computes incorrectly: a product"),
    ),
    Mistake(
        "a GPU that somebody uses",
        ("GPU 1 (H100): other processes use", "nvidia-smi"),
        edit=sick(**vars(assess(1, "H100", 20 * 10**9, 80 * 10**9, (9, 0), SIZE))),
    ),
    Mistake("GPUs that hang", ("did not finish within 60 s", "dmesg"), edit=patched("mrl.platform.gpu_health", hangs)),
]

MISTAKES_OF_FUNCTIONS = [  # found only by running the reward function in a process
    Mistake(
        "an import that fails",
        ("score.py", "No module named 'absent_part'"),
        (SCORE,),
        edit=written("score.py", "import absent_part\n\ndef score(prompt, response, row): ...\n"),
    ),
    Mistake(
        "a function that raises",
        ("train.jsonl:1", "with the response", "ZeroDivisionError"),
        (SCORE,),
        edit=scores("return 1 / 0"),
    ),
    Mistake("a score that is text", ("train.jsonl:1", "returned no score"), (SCORE,), edit=scores("return 'good'")),
    Mistake(
        "a score that is not finite",
        ("train.jsonl:1", "returned no score"),
        (SCORE,),
        edit=scores("return float('nan')"),
    ),
    Mistake(
        "a function that hangs",
        ("train.jsonl:1", "within 1 s (reward.timeout_s)"),
        (SCORE, "reward.timeout_s=1.0"),
        edit=scores("import time; time.sleep(60)"),
    ),
]
