"""A valid model directory, and single mistakes in its config.json, tokenizer, links or weight files, with the error."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TOKENIZER = {
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, "unk_token": "<unk>"},
    "added_tokens": [{"id": 1, "content": "</s>", "special": True, **dict.fromkeys(FLAGS, False)}],
}
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
MANY = json.dumps(dict.fromkeys(map(str, range(300_000)), 1)).encode()  # comparing these one by one would take minutes
NESTED = "[" * 100_000 + "]" * 100_000


@dataclass
class Bad:
    """A mistake: `change` edits the valid directory, and the one-line error must contain all of `says`."""

    id: str
    change: Callable[[Path], Any]
    says: tuple[str, ...]


def write_model(path: Path) -> Path:
    path.mkdir(parents=True)
    for name, content in (("config", CONFIG), ("tokenizer", TOKENIZER), ("tokenizer_config", SETTINGS)):
        (path / f"{name}.json").write_text(json.dumps(content))
    (path / "model.safetensors").write_bytes(safetensors({"a": entry(0, 8), "b": entry(8, 16)}, 16))
    return path


def config(key: str, value: Any, *says: str, **more: Any) -> Bad:
    """Returns a mistake in config.json: another value for `key`, or no such key if `value` is None."""
    content = {name: v for name, v in (CONFIG | more | {key: value}).items() if v is not None}
    name = f"{key} {'missing' if value is None else str(value)[:40]}"
    return Bad(name, text("config.json", json.dumps(content)), ("model/config.json", key, *says))


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(content)


def tokenizer(**changes: Any) -> Callable[[Path], Any]:
    return text("tokenizer.json", json.dumps(TOKENIZER | changes))


def settings(**changes: Any) -> Callable[[Path], Any]:
    return text("tokenizer_config.json", json.dumps(SETTINGS | changes))


def link(name: str, target: str) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).symlink_to(target)

    return change


def folder_link(path: Path) -> None:
    (path.parent / "templates").mkdir()
    (path.parent / "templates" / "x.jinja").write_text("secret")
    (path / "additional_chat_templates").symlink_to(path.parent / "templates")


def pipe(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    os.mkfifo(path / "tokenizer.json")


BAD_MODELS = [
    Bad("config.json a list", text("config.json", "[]"), ("config.json", "a JSON object, not list")),
    Bad("config.json a number", text("config.json", "7"), ("config.json", "a JSON object, not int")),
    Bad("config.json no JSON", text("config.json", "{"), ("config.json", "cannot be read as JSON")),
    Bad("config.json too deep", text("config.json", NESTED), ("config.json", "nested too deep")),
    Bad(
        "config.json with a key twice",
        text("config.json", '{"vocab_size": 1, "vocab_size": 2}'),
        ("config.json", "the key 'vocab_size' occurs twice"),
    ),
    Bad("config.json not UTF-8", lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}'), ("config.json", "UTF-8")),
    Bad(
        "config.json with a byte order mark",
        text("config.json", "\ufeff" + json.dumps(CONFIG)),
        ("config.json", "BOM"),
    ),
    Bad(
        "config.json in UTF-16",
        lambda p: (p / "config.json").write_bytes(json.dumps(CONFIG).encode("utf-16")),
        ("config.json", "not UTF-8: byte 0xff at position 1"),
    ),
    config("architectures", "LlamaForCausalLM", "must be a list of names"),
    config("architectures", [7], "must be a list of names"),
    config("model_type", "qwen2", "architectures say llama"),
    config("model_type", None, "architectures say llama"),
    config("model_type", "x" * 9999, "architectures say llama", "..."),
    config("hidden_act", ["x" * 9999], "only silu", "..."),
    config("vocab_size", None, "lacks"),
    config("vocab_size", "sixteen", "an integer", "'sixteen'"),
    config("vocab_size", True, "an integer"),
    config("vocab_size", 0, "from 1"),
    config("hidden_size", -64, "from 1", "-64"),
    config("hidden_size", 64.5, "an integer"),
    config("hidden_size", 66, "a multiple of num_attention_heads (4)"),
    config("hidden_size", 10**12, "from 1 to 1048576"),
    config("num_hidden_layers", 0, "from 1"),
    config("num_hidden_layers", 10**9, "from 1 to 4096"),
    config("num_attention_heads", 0, "from 1"),
    config("num_attention_heads", [4], "an integer"),
    config("num_key_value_heads", 3, "a divisor of num_attention_heads (4)"),
    config("num_key_value_heads", -2, "from 1"),
    config("intermediate_size", None, "lacks"),
    config("max_position_embeddings", "64", "an integer"),
    config("rms_norm_eps", 0, "number from 1.175e-38"),
    config("rms_norm_eps", 1e-40, "number from 1.175e-38"),
    config("rms_norm_eps", float("nan"), "number"),
    config("rms_norm_eps", "small", "number", "'small'"),
    config("initializer_range", -1, "number from 0"),
    config("tie_word_embeddings", "no", "true or false"),
    config("eos_token_id", 16, "token ids from 0 to 15"),
    config("eos_token_id", [1, "</s>"], "token ids"),
    config("rope_scaling", {"rope_type": "ntk"}, "rope_type=ntk; supported: default, linear, llama3"),
    config("rope_scaling", {"type": ["linear"]}, "supported"),
    config("rope_scaling", "linear", "must be an object"),
    config("rope_scaling", {"type": "linear"}, "lacks 'factor'"),
    config("rope_parameters", {"rope_type": "linear", "factor": 0}, "factor must be a number"),
    config("rope_theta", -1.0, "number from 1"),
    config("partial_rotary_factor", 0.5, "supported: 1"),
    config("auto_map", {"AutoModelForCausalLM": "modeling.Mine"}, "never run"),
    config("layer_types", ["sliding_attention"] * 4, "only full_attention"),
    config("layer_types", ["full_attention"] * 3, "for every layer"),
    config("num_experts_per_tok", 5, "from 1 to 4", **EXPERTS),
    config("num_experts_per_tok", 1, "2 or more", **EXPERTS),
    config("num_local_experts", None, "lacks", **{k: EXPERTS[k] for k in ("architectures", "model_type")}),
    config("sliding_window", "all", "an integer", **(EXPERTS | {"num_experts_per_tok": 2})),
    config("sliding_window", None, "4096 below max_position_embeddings", **MISTRAL),
    Bad(
        "tokenizer larger than the vocabulary",
        tokenizer(added_tokens=[{"id": 1, "content": "</s>"}, {"id": 16, "content": "<pad>"}]),
        ("tokenizer.json", "17 tokens", "(vocab_size in config.json) 16"),
    ),
    Bad(
        "tokenizer larger by its settings",
        settings(added_tokens_decoder={"20": {"content": "<x>"}}),
        ("21 tokens", "(vocab_size in config.json) 16"),
    ),
    Bad(
        "end token unknown",
        settings(eos_token="<|end|>"),
        ("tokenizer_config.json", "'<|end|>' is not in the vocabulary"),
    ),
    Bad("end token a list", settings(eos_token=["</s>"]), ("tokenizer_config.json", "is not in the vocabulary")),
    Bad(
        "tokenizer with code of its own",
        settings(auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        ("tokenizer_config.json", "auto_map", "never run"),
    ),
    Bad("tokenizer a list", text("tokenizer.json", "[]"), ("tokenizer.json", "a JSON object, not list")),
    Bad("tokenizer too deep", text("tokenizer.json", NESTED), ("tokenizer.json", "nested too deep")),
    Bad("tokenizer without a model", text("tokenizer.json", '{"version": 1}'), ("is not a valid tokenizer file",)),
    Bad("tokenizer with text for ids", tokenizer(model={"vocab": {"a": "b"}}), ("tokenizer.json",)),
    Bad("tokenizer is a pipe that nobody writes to", pipe, ("tokenizer.json", "not a regular file")),
    Bad("config.json a link", link("config.json", "/etc/hostname"), ("config.json is a link to /etc/", "outside")),
    Bad("tokenizer a link", link("tokenizer.json", "/etc/hostname"), ("tokenizer.json is a link to", "outside")),
    Bad("any file a link", link("notes.txt", "/etc/shadow"), ("notes.txt is a link to /etc/shadow", "outside")),
    Bad("a link upwards", link("vocab.txt", "../../secret"), ("vocab.txt is a link to", "outside")),
    Bad("weights a link", link("model.safetensors", "/dev/zero"), ("model.safetensors is a link to /dev/zero",)),
    Bad("a folder of templates a link", folder_link, ("x.jinja is a link to", "outside")),
]


def entry(start: int, stop: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]} | changes


def safetensors(header: Any, nbytes: int) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + bytes(nbytes)


def weights(id: str, header: Any, nbytes: int, *says: str) -> Bad:
    content = safetensors(header, nbytes)
    return Bad(id, lambda path: (path / "model.safetensors").write_bytes(content), ("model.safetensors", *says))


def index(id: str, content: Any, *says: str) -> Bad:
    written = content if isinstance(content, str) else json.dumps({"weight_map": content})
    return Bad(id, text("model.safetensors.index.json", written), ("model.safetensors.index.json", *says))


def converted(id: str, *says: str, then: Callable[[Path], Any] | None = None, **changes: Any) -> Bad:
    """Returns a converted directory (Megatron format) with a changed manifest."""

    def change(path: Path) -> None:
        (path / "release").mkdir()
        (path / "release" / ".metadata").write_bytes(b"no pickle")
        manifest = {"format": "mrl-converted", "version": 1, "role": "policy", "keys": {}, "files": {}} | changes
        (path / "complete").write_text(json.dumps(manifest))
        if then is not None:
            then(path)

    return Bad(id, change, says)


def run_checkpoint(id: str, *says: str, config: str | None = None, **changes: Any) -> Bad:
    """Returns a step_N checkpoint of a run with a changed manifest or config.yaml."""

    def change(path: Path) -> None:
        (path / "state.json").write_text("{}")
        manifest = {"learners": {"actor": {"role": "policy"}}, "files": {}} | changes
        (path / "complete").write_text(json.dumps(manifest))
        if config is not None:
            (path.parent.parent / "config.yaml").write_text(config)

    return Bad(id, change, says)


METADATA = "release/.metadata"
BAD_CHECKPOINTS = [
    converted("manifest too deep", "complete", "nested too deep", then=text("complete", NESTED)),
    converted("manifest a list", "complete is not a list of files", then=text("complete", "[]")),
    converted("manifest of another version", "format mrl-converted 99", version=99),
    converted("manifest without keys", "complete lacks the model's role or its tensor names", keys=None),
    converted("manifest with numbers for keys", "complete lacks the model's role or its tensor names", keys={"a": 1}),
    converted("manifest of no known role", "complete lacks the model's role or its tensor names", role="oracle"),
    converted("a file is missing", "x.distcp is missing", files={"x.distcp": 3}),
    converted("a file is cut off", "release/.metadata has 9 bytes instead of 10", files={METADATA: 10}),
    converted("files outside", "'../x', outside of the directory", files={"../x": 1}),
    converted("a size is text", "complete is not a list of files", files={METADATA: "many"}),
    converted(
        "a part is a link",
        "release/.metadata is a link to",
        files={METADATA: Path("/etc/hostname").stat().st_size},
        then=link(METADATA, "/etc/hostname"),
    ),
    converted(
        "its config.json a list", "config.json must contain a JSON object, not list", then=text("config.json", "[]")
    ),
    run_checkpoint("models a list", "complete does not list the checkpoint's models", learners=[]),
    run_checkpoint("a model without a role", "complete does not list the checkpoint's models", learners={"actor": {}}),
    run_checkpoint("no actor", "has no actor, only critic", learners={"critic": {"role": "critic"}}),
    run_checkpoint("run's configuration no YAML", "config.yaml does not name the model", config="a: [b"),
    run_checkpoint("run's configuration a list", "config.yaml does not name the model", config="- a"),
    run_checkpoint("run's model a number", "config.yaml does not name the model", config="model: {path: 7}"),
    Bad(
        "iteration is text",
        text("latest_checkpointed_iteration.txt", "the last"),
        ("latest_checkpointed_iteration.txt contains 'the last' instead of an iteration number",),
    ),
]

GAPS = "leave gaps or overlap"
BAD_WEIGHTS = [
    weights("header too deep", b'{"a": ' + NESTED.encode() + b"}", 0, "nested too deep"),
    weights("header a list", [], 0, "not a JSON object"),
    weights("header empty", {}, 0, "do not fill it"),
    weights("header no JSON", b"\xff\xfe\x00", 0, "damaged"),
    weights("first offset negative", {"a": entry(-8, 8, shape=[4])}, 8, "data_offsets"),
    weights("first offset not 0", {"a": entry(8, 16)}, 16, GAPS),
    weights("a gap", {"a": entry(0, 8), "b": entry(12, 20)}, 20, GAPS),
    weights("an overlap", {"a": entry(0, 8), "b": entry(4, 12)}, 12, GAPS),
    weights("twice the same place", {"a": entry(0, 8), "b": entry(0, 8)}, 8, GAPS),
    weights("bytes left over", {"a": entry(0, 8)}, 12, "do not fill it"),
    weights("bytes missing", {"a": entry(0, 8)}, 4, "do not fill it"),
    weights("shape of other bytes", {"a": entry(0, 8, shape=[3])}, 8, "a has 8 bytes, which do not match [3] F32"),
    weights("shape negative", {"a": entry(0, 8, shape=[-1, -2])}, 8, "shape"),
    weights("shape of true", {"a": entry(0, 4, shape=[True])}, 4, "shape"),
    weights("dtype a list", {"a": entry(0, 8, dtype=["F32"])}, 8, "dtype"),
    weights("an entry a number", {"a": 3}, 8, "data_offsets"),
    weights("three offsets", {"a": entry(0, 8, data_offsets=[0, 4, 8])}, 8, "data_offsets"),
    weights("name with NUL", {"a\0b": entry(0, 8)}, 8, "is not a valid name"),
    weights("name too long", {"a" * 5000: entry(0, 8)}, 8, "is not a valid name"),
    weights("name twice", b'{"a": 1, "a": 2}', 0, "the key 'a' occurs twice"),
    weights("name twice after many", MANY[:-1] + b', "299999": 2}', 0, "the key '299999' occurs twice"),
    Bad(
        "header longer than any file",
        lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63)),
        ("model.safetensors", "a header of 9223372036854775808 bytes in 8"),
    ),
    index("index too deep", NESTED, "nested too deep"),
    index("index of a list", '{"weight_map": []}', "not a weight index"),
    index("index names a file too long", {"a": "x" * 5000 + ".safetensors"}, "is not a valid name"),
    index("index names a file with NUL", {"a": "x\0.safetensors"}, "is not a valid name"),
    index("index names a number", {"a": 7}, "is not a valid name"),
    index("index leaves the directory", {"a": "../x.safetensors"}, "outside of the directory"),
    Bad(
        "index names a link",
        lambda path: (
            (path / "model.safetensors").unlink(),
            text("model.safetensors.index.json", '{"weight_map": {"a": "sub/x.safetensors"}}')(path),
            link("sub/x.safetensors", "/etc/hostname")(path),
        ),
        ("x.safetensors is a link to /etc/hostname", "outside of the directory"),
    ),
]
