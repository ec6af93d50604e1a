"""The house's plan: which room may import which, held by reading the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mrl"
BELOW = ("core", "options", "config", "platform", "parallel", "models", "kernels", "algo", "data", "weights")

# room -> what it may import from mrl, besides itself; "room.module" allows that module only
ALLOWED: dict[str, tuple[str, ...]] = {
    "core": (),
    "options": (),
    "config": ("core", "options", "models.arch", "foreign", "redaction"),
    "platform": ("ports",),
    "parallel": ("config", "platform"),
    "kernels": (),
    "models": ("core", "config", "platform", "parallel", "kernels", "foreign"),
    "rollout": ("core", "config", "ports"),
    "reward": ("core", "config", "user_functions"),
    "algo": ("kernels", "options", "user_functions"),
    "data": ("core", "config", "foreign"),
    "weights": (
        *("core", "config", "platform", "parallel", "models", "rollout.answers", "rollout.client", "files", "foreign"),
    ),
    "learner": BELOW,
    "checkpoint": ("core", "config", "platform", "parallel", "weights", "learner", "files", "foreign"),
    "observe": ("core", "config", "files", "redaction"),
    "resilience": ("core", "config", "platform", "parallel", "failure", "files"),
    "trainers": (*BELOW, "rollout", "reward", "learner", "checkpoint", "observe", "resilience", "failure"),
    "preflight": ("config", "data", "reward", "options", "algo"),
    "terminal": (),
    "failure": ("files", "redaction"),
    "files": (),
    "foreign": (),
    "ports": (),
    "redaction": (),
    "user_functions": (),
    "launcher": ("terminal", "failure", "files", "ports", "redaction", "resilience.protocol", "resilience.rank"),
}
TABLE = ("errors", "agreement", "kinds", "table")
# room with rooms inside -> inner room or module -> what it may import of the whole, besides itself
INSIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "weights": {
        "errors": (),
        "agreement": ("errors",),
        "kinds": (),
        "families": ("kinds",),
        "table": ("families", "kinds"),
        "disk": TABLE,
        "model": (*TABLE, "disk"),
        "sync": ("errors", "agreement"),
        "convert": (*TABLE, "disk", "model"),
        "compare": (*TABLE, "disk", "model"),
        "command": ("errors", "disk", "convert", "compare"),
    },
}
ANYTHING = ("cli", "__main__", "__init__")
WITHOUT_MEGATRON = ("options", "algo", "reward", "rollout", "data", "config", "observe", "kernels", "core")
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = ("mrl", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path, tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the file, relative imports resolved."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def own(file: Path) -> list[str]:
    """What the file may import of its own room; a module that INSIDE does not name imports nothing of it."""
    room, *inner = file.relative_to(PACKAGE).with_suffix("").parts
    if room not in INSIDE:
        return [room]
    return [f"{room}.{name}" for name in (inner[0], *INSIDE[room].get(inner[0], ()))]


def broken_arrows(file: Path, tree: ast.AST) -> list[str]:
    room = room_of(file)
    if room in ANYTHING:
        return []
    allowed = [f"mrl.{name}" for name in (*own(file), *ALLOWED[room])]
    ours = [name for name in imports(file, tree) if within(name, "mrl") and name != "mrl.__version__"]
    return [name for name in ours if not any(within(name, prefix) for prefix in allowed)]


def forbidden(file: Path, tree: ast.AST) -> list[str]:
    room = room_of(file)
    found = []
    if room in WITHOUT_MEGATRON:
        found += [name for name in imports(file, tree) if within(name, "megatron")]
    if room != "platform":
        found += [name for name in imports(file, tree) if within(name, "torch.cuda")]
        found += [
            f"torch.cuda (line {node.lineno})"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
    return found


def test_every_room_has_a_place_in_the_plan() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms <= set(ALLOWED) | set(ANYTHING), "add the room to ALLOWED, with what it may import"


@pytest.mark.parametrize("room", sorted({room_of(file) for file in FILES}))
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    broken = {
        str(file.relative_to(PACKAGE)): names
        for file in FILES
        if room_of(file) == room and (names := broken_arrows(file, ast.parse(file.read_text())))
    }
    assert not broken


def test_the_shapes_of_models_are_plain() -> None:
    """mrl.models.arch is read by the config room: the standard library only, and what reads foreign files with it."""
    standard = {"__future__", "dataclasses", "json", "math", "os", "pathlib", "stat", "typing"}
    for name, more in (("models/arch.py", {"mrl"}), ("models/config_keys.py", set()), ("foreign.py", set())):
        file = PACKAGE / name
        found = set(imports(file, ast.parse(file.read_text())))
        assert {name.split(".")[0] for name in found} <= standard | more
        ours = [name for name in found if within(name, "mrl")]
        assert all(name.startswith(("mrl.foreign.", "mrl.models.config_keys.")) for name in ours)


def test_the_machine_is_the_platform_room_s_alone() -> None:
    """torch.cuda elsewhere breaks CPU machines; megatron in these rooms would make them untestable without it."""
    found = {str(f.relative_to(PACKAGE)): names for f in FILES if (names := forbidden(f, ast.parse(f.read_text())))}
    assert not found


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("algo", "from mrl.core import Rollout"),
        ("rollout", "from mrl import weights"),
        ("weights", "from mrl.rollout.sglang import server"),
        ("learner", "import mrl.trainers.rl"),
        ("config", "from ..models import build"),
        ("weights/disk", "from mrl.weights.model import load"),
        ("weights/convert", "from mrl.weights.compare.verdict import judge"),
        ("weights/sync", "from ..model.export import Exporter"),
    ],
)
def test_a_broken_arrow_is_seen(room: str, code: str) -> None:
    assert broken_arrows(PACKAGE / room / "made_up.py", ast.parse(code))


@pytest.mark.parametrize(
    ("room", "code"),
    [("data", "import megatron.core"), ("learner", "torch.cuda.synchronize()"), ("models", "from torch import cuda")],
)
def test_a_forbidden_name_is_seen(room: str, code: str) -> None:
    assert forbidden(PACKAGE / room / "made_up.py", ast.parse(code))
