"""Packages that imitate transformer-engine for tests of its import: a complete one, and broken ones."""

from __future__ import annotations

from pathlib import Path

VERSION = "2.11.0"
_SHELL = f"""
import importlib
__version__ = "{VERSION}"
try:
    importlib.import_module("transformer_engine.pytorch")
except (ImportError, FileNotFoundError):
    pass
"""
_WHOLE = f"""
import importlib.abc, importlib.machinery, sys
import torch
__version__ = "{VERSION}"
class Anything(type):
    def __getattr__(cls, name):
        return anything(name)
def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (torch.nn.Module,), {{}})
class Everywhere(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("transformer_engine."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def exec_module(self, module):
        module.__getattr__ = anything
sys.meta_path.append(Everywhere())
import transformer_engine.common.recipe, transformer_engine.pytorch.ops
"""
# name -> (transformer_engine/pytorch/__init__.py, expected problem)
BROKEN = {
    "no compiled part": ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
    "no file": ("raise FileNotFoundError('libtransformer_engine.so')", "FileNotFoundError: libtransformer_engine.so"),
    "versions that differ": ("assert 0, 'core 2.20.2, torch 2.11.0'", "AssertionError: core 2.20.2, torch 2.11.0"),
    "other CUDA": ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
}


def make(root: Path, pytorch: str | None = None) -> Path:
    """Writes the package and returns `root`, for PYTHONPATH.

    pytorch: source of transformer_engine.pytorch; None: a package with every module, all of them empty torch modules
    """
    package = root / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_WHOLE if pytorch is None else _SHELL)
    if pytorch is not None:
        (package / "pytorch").mkdir()
        (package / "pytorch" / "__init__.py").write_text(pytorch)
    info = root / f"transformer_engine-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {VERSION}\n")
    return root
