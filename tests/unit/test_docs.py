"""Files, modules and names mentioned in pages, comments and configurations exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mrl", "tests", "tools", "docs", "yaml_configs", "examples")
TEXTS = "*.md docs/**/*.md yaml_configs/* tools/**/*.py mrl/**/*.py tests/**/*.py examples/* Makefile setup.py".split()
PAGES = [file for pattern in TEXTS for file in sorted(ROOT.glob(pattern)) if file.is_file()]
FILE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
MODULE = re.compile(r"(?<![\w/.-])(?:mrl(?!\.yaml)|(?<=`)tests|(?<=from )tests)(?:\.\w+)+")
PYTHON = re.compile(r"`([\w/]+\.py)`")
# files that recipes create, and a user's own
MADE = re.compile(r"[A-Z]{4}|\b(?:mine|forget|paced_http|brevity|csv_table|echo|made_up)\b")


def wrong_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not MADE.search(name) and not is_file(name)]


@cache
def is_file(name: str) -> bool:
    return (ROOT / name).exists() or any(ROOT.glob(f"{name}*"))


def wrong_modules(text: str) -> list[str]:
    return [name for name in MODULE.findall(text) if not MADE.search(name) and not is_there(name)]


@cache
def is_there(name: str) -> bool:
    """Returns True if the name is a module, or a name within a module's text."""
    place, parts = ROOT, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    file = place / "__init__.py" if place.is_dir() else place
    return not parts or (file.is_file() and re.search(rf"\b{parts[0]}\b", file.read_text()) is not None)


@cache
def programs() -> list[str]:
    return [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    short = [name for name in PYTHON.findall(text) if not MADE.search(name)]
    assert wrong_files(text) + wrong_modules(text) == []
    assert [name for name in short if not any(path.endswith(f"/{name}") for path in programs())] == []


def test_what_programs_and_configurations_name_is_there() -> None:
    rest = [page for page in PAGES if page.suffix != ".md" and page != Path(__file__)]
    found = {
        str(page.relative_to(ROOT)): wrong_files(text) + wrong_modules(text)
        for page in rest
        if (text := page.read_text())
    }
    assert {page: names for page, names in found.items() if names} == {}


def test_a_name_that_is_gone_is_seen() -> None:
    assert wrong_files("see mrl/algo/losses_of_old.py and mrl/algo") == ["mrl/algo/losses_of_old.py"]
    assert wrong_modules("mrl.algo.kl, mrl.algo.gone, mrl.algo.kl.penalty") == ["mrl.algo.gone"]
