"""fp8: not there yet."""

from __future__ import annotations

from tools.gpu.stage import Numbers, Setting, Skipped


def fp8(setting: Setting) -> Numbers:
    raise Skipped("mrl has no fp8 yet")


CHECKS = {"fp8": fp8}
