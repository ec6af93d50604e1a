"""The package layers: which package may import which, checked by reading the imports."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mrl"
BELOW = (
    *("units", "core", "options", "families", "config", "platform", "parallel", "models", "kernels", "algo", "data"),
    "weights",
)
ON_DISK = ("directories", "files", "foreign")

# package -> what it may import from mrl, besides itself; "package.module" allows that module only
ALLOWED: dict[str, tuple[str, ...]] = {
    "units": (),
    "core": ("units",),
    "options": ("float32",),
    "families": ("float32", "foreign"),
    "config": (
        *("core", "options", "families", "directories", "float32", "foreign", "packages", "redaction", "strict_json"),
    ),
    "fp8_chips": (),
    "platform": ("ports", "gloo_loop", "fp8_chips", "kernels.native", "kernels.triton_support"),
    "parallel": ("config", "platform"),
    "kernels": (),
    "models": ("core", "units", "families", "config", "platform", "parallel", "kernels"),
    "inference": (
        *("core", "families", "config", "forks", "files", "gloo_loop", "imports", "kernels.native", "packages"),
        *("http_server", "ports", "stopping"),
    ),
    "workers": ("forks", "strict_json"),
    "http_server": ("ports", "workers.event_loop"),
    "reward": ("core", "config", "foreign", "user_functions", "verl_config", "workers"),
    "agents": (
        "core",
        "config",
        "data",
        "reward.sandbox",
        "inference.routed",
        "inference.seeds",
        *("http_server", "packages", "ports", "strict_json", "user_functions", "workers"),
    ),
    "sampling": ("core", "config", "observe", "reward", "inference"),
    "algo": ("kernels", "options", "stopping", "user_functions", "verl_config"),
    "data": ("core", "units", "families", "config", "foreign", "strict_json"),
    "weights": (
        *("core", "families", "config", "platform", "parallel", "kernels", "models", *ON_DISK),
        *("inference.errors", "inference.access", "inference.protocol", "inference.client", "inference.delta"),
        "data.packing",
    ),
    "learner": BELOW,
    "checkpoint": ("core", "config", "platform", "parallel", "weights", "learner", *ON_DISK),
    "observe": ("core", "config", "files", "packages", "redaction", "resilience.protocol", "strict_json"),
    "cards": ("families", "observe", "weights.disk", "directories", "packages", "redaction"),
    "resilience": ("core", "config", "forks", "platform", "parallel", "failure", "files", "stopping"),
    "diffusion": (
        *("core", "config", "platform", "parallel", "data", "observe", "cards", "directories", "files", "failure"),
        *("checkpoint", "foreign", "reward", "trainers.shared", "inference.seeds", "plan.chips", "weights.disk"),
        "weights.errors",
    ),
    "plan": (
        *("core", "families", "config", "platform", "parallel", "models", "learner", "data", "fp8_chips"),
        "kernels.head_chunks",
    ),
    "precision": (*BELOW, "learner", "observe"),
    "evaluation": (*BELOW, "learner", "observe", "reward", "inference", "scoring", "packages"),
    "scoring": (*BELOW, "learner"),
    "trainers": (
        *(*BELOW, "inference", "sampling", "reward", "agents", "learner", "checkpoint", "observe", "cards", "plan"),
        *("resilience", "failure", "files", "ports"),
    ),
    "rank_imports": ("config", "kernels.native", "platform", "checkpoint"),
    "preflight": (
        *("families", "config", "platform", "algo", "options", "data", "reward", "inference", "observe", "launcher"),
        *("plan", "weights.disk", "weights.errors", "directories", "files", "packages", "ports", "redaction"),
        "user_functions",
    ),
    "forks": ("imports",),
    "doctor": ("platform", "reward", "inference", "preflight", "packages"),
    "packages": (),
    "terminal": (),
    "failure": ("files", "redaction"),
    "directories": ("files", "foreign"),
    "files": (),
    "float32": (),
    "foreign": ("strict_json",),
    "strict_json": (),
    "gloo_loop": ("ports",),
    "imports": (),
    "ports": (),
    "redaction": (),
    "stopping": (),
    "user_functions": ("stopping",),
    "verl_config": (),
    "launcher": (
        *("forks", "terminal", "failure", "files", "imports", "packages", "ports", "redaction"),
        *("resilience.protocol", "resilience.rank", "resilience.preemption"),
    ),
}
LOWEST = ("errors", "agreement", "parameter_layout", "meta")
TALK = ("errors", "answers", "server_info", "protocol", "access", "client")
# package with subpackages -> submodule, "*" for any other -> what it may import of the package, besides itself
INSIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "inference": {
        "errors": (),
        "seeds": (),
        "supervisor": (),
        "serving": (),
        "load": (),
        "delta": (),
        "answers": ("errors",),
        "server_info": ("answers", "delta"),
        "protocol": ("errors", "answers", "server_info"),
        "access": ("errors",),
        "client": ("errors", "answers", "server_info", "protocol", "access"),
        "routed": ("errors", "answers"),
        "samples": ("errors", "answers", "protocol", "routed"),
        "teacher_engine": (*TALK, "samples"),
        "launch": ("delta", "routed"),
        "sglang": ("errors", "launch"),
        "transformers_engine": ("errors", "delta", "launch", "protocol", "routed", "serving", "sglang.cpu_shim"),
        "fork_server": ("launch", "supervisor"),
        "process": ("errors", "access", "client", "launch", "fork_server"),
        "agent": ("errors", "access", "process", "serving"),
        "server": ("errors", "server_info", "protocol", "client", "process", "load"),
        "engine_pool": (*TALK, "process", "agent", "load", "server"),
        "membership": ("errors", "access", "agent", "client", "launch", "process", "protocol"),
        "open_engine_pool": ("errors", "agent", "server", "engine_pool", "membership"),
        "check": (*TALK, "samples"),
        "request_dispatcher": (*TALK, "samples", "server", "engine_pool"),
        "engine": (*TALK, "routed", "samples", "load", "server", "engine_pool", "request_dispatcher"),
        "start": (
            *(*TALK, "routed", "launch", "process", "agent", "server", "engine_pool", "check", "engine"),
            *("membership", "open_engine_pool"),
        ),
        "serve": ("errors", "access", "launch", "agent", "membership", "start"),
        "__init__": (),
    },
    "weights": {
        "errors": (),
        "agreement": ("errors",),
        "parameter_layout": (),
        "meta": (),
        "disk": LOWEST,
        "model": (*LOWEST, "disk"),
        "sync": ("errors", "agreement", "meta"),
        "convert": (*LOWEST, "disk", "model"),
        "compare": (*LOWEST, "disk", "model"),
        "merge": (*LOWEST, "disk", "model"),
    },
    "trainers": {"shared": (), "*": ("shared",)},  # no trainer imports another trainer
}
ANYTHING = ("api", "cli", "commands", "__main__", "__init__")
WITHOUT_MEGATRON = (
    *("options", "algo", "reward", "inference", "data", "config", "observe", "kernels", "core", "units", "workers"),
)
FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True)
class Code:
    """imports: dotted names of all imports, relative ones resolved; cuda: numbers of lines with torch.cuda"""

    imports: tuple[str, ...]
    cuda: tuple[int, ...]


def module_name(file: Path) -> str:
    parts = ("mrl", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def read(file: Path, text: str) -> Code:
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    names, cuda = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name):
            cuda += [node.lineno] if node.value.id == "torch" else []
    return Code(tuple(names), tuple(cuda))


@cache
def code_of(file: Path) -> Code:
    return read(file, file.read_text())


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def own(file: Path) -> list[str]:
    """Returns what the file may import of its own package. A module that INSIDE does not list, if there is no "*", may
    import nothing of it."""
    room, *inner = file.relative_to(PACKAGE).with_suffix("").parts
    if room not in INSIDE:
        return [room]
    below = INSIDE[room].get(inner[0], INSIDE[room].get("*", ()))
    return [f"{room}.{name}" for name in (inner[0], *below)]


def broken_arrows(file: Path, code: Code) -> list[str]:
    room = room_of(file)
    if room in ANYTHING:
        return []
    allowed = [f"mrl.{name}" for name in (*own(file), *ALLOWED[room])]
    ours = [name for name in code.imports if within(name, "mrl") and name != "mrl.__version__"]
    return [name for name in ours if not any(within(name, prefix) for prefix in allowed)]


def arrows() -> dict[str, set[str]]:
    """Returns module -> the modules that it imports, including lazy imports and those for type checkers."""
    modules = {module_name(file): file for file in FILES}
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = {name for name in code_of(file).imports if within(name, "mrl")}
        found[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module}
    return found


def circles(arrows: dict[str, set[str]]) -> set[str]:
    """Returns the modules on import cycles: all that remain after those without imports, or without importers, are
    removed repeatedly."""
    left = set(arrows)
    while True:
        targets = {name for module in left for name in arrows[module]}
        inner = {module for module in left if arrows[module] & left and module in targets}
        if inner == left:
            return left
        left = inner


def forbidden(file: Path, code: Code) -> list[str]:
    room = room_of(file)
    found = []
    if room in WITHOUT_MEGATRON:
        found += [name for name in code.imports if within(name, "megatron")]
    if room != "platform":
        found += [name for name in code.imports if within(name, "torch.cuda")]
        found += [f"torch.cuda (line {line})" for line in code.cuda]
    return found


def test_every_room_has_a_place_in_the_plan() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms <= set(ALLOWED) | set(ANYTHING), "add the room to ALLOWED, with what it may import"


@pytest.mark.parametrize("room", sorted({room_of(file) for file in FILES}))
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    broken = {
        str(file.relative_to(PACKAGE)): names
        for file in FILES
        if room_of(file) == room and (names := broken_arrows(file, code_of(file)))
    }
    assert not broken


def test_no_module_imports_itself_by_way_of_another() -> None:
    assert circles(arrows()) == set()


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


@pytest.mark.parametrize("room", INSIDE)
def test_a_plan_inside_a_room_has_no_circle(room: str) -> None:
    """The layers within a package have no cycle: each line of INSIDE names only modules above it."""
    above: set[str] = set()
    for name, below in INSIDE[room].items():
        assert {imported.partition(".")[0] for imported in below} <= above, name
        above.add(name)


def test_the_families_are_plain() -> None:
    """mrl.families imports only the standard library and readers of foreign files, since `config` reads it."""
    standard = {*("__future__", "collections", "dataclasses", "functools", "json", "math", "os", "pathlib", "stat")}
    standard |= {"importlib", "itertools"}  # importlib.metadata: a family may need a newer megatron-core
    files = [*(PACKAGE / "families").rglob("*.py"), PACKAGE / "foreign.py", PACKAGE / "float32.py"]
    found = {name for file in files for name in code_of(file).imports}
    assert {name.split(".")[0] for name in found} == standard | {"types", "typing", "mrl"}


def test_the_machine_is_the_platform_room_s_alone() -> None:
    """Only the package `platform` distinguishes machines. torch.cuda elsewhere breaks CPU machines, and Megatron in the
    other listed packages would make them untestable without it."""
    found = {str(f.relative_to(PACKAGE)): names for f in FILES if (names := forbidden(f, code_of(f)))}
    assert not found


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("algo", "from mrl.core import Rollout"),
        ("inference", "from mrl import weights"),
        ("weights", "from mrl.inference.sglang import server"),
        ("learner", "import mrl.trainers.rl.loop"),
        ("config", "from ..models import build"),
        ("families", "from mrl.config.schema import TrainConfig"),
        ("weights/disk", "from mrl.weights.model import load"),
        ("weights/convert", "from mrl.weights.compare.verdict import compare_models"),
        ("weights/sync", "from ..model.export import Exporter"),
        ("trainers/shared", "from mrl.trainers.rl.replay import Replay"),
        ("trainers/dpo", "from mrl.trainers.rl.loop import update"),
    ],
)
def test_a_broken_arrow_is_seen(room: str, code: str) -> None:
    file = PACKAGE / room / "made_up.py"
    assert broken_arrows(file, read(file, code))


@pytest.mark.parametrize(
    ("room", "code"),
    [("data", "import megatron.core"), ("learner", "torch.cuda.synchronize()"), ("models", "from torch import cuda")],
)
def test_a_forbidden_name_is_seen(room: str, code: str) -> None:
    file = PACKAGE / room / "made_up.py"
    assert forbidden(file, read(file, code))
