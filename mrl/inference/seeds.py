"""One random stream for each sample of a run."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(x: int) -> int:
    """Steele, Lea & Flood, "Fast splittable pseudorandom number generators" (2014): a bijection of 64-bit integers."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def sample_seed(run_seed: int, step: int, sample_id: int) -> int:
    """The seed of sample `sample_id` of step `step`: a number in [0, 2**63), which every engine accepts.

    A function of its three arguments alone, so a resumed run draws what the first one would have drawn. Each argument
    goes through a full 64-bit mix before the next is added, so that neighbouring runs, steps and samples share no
    pattern. Two different triples collide with probability 2**-63. All arguments must be >= 0.
    """
    if min(run_seed, step, sample_id) < 0:
        raise ValueError(f"negative seed part: run seed {run_seed}, step {step}, sample {sample_id}")
    state = _splitmix64(run_seed & _MASK64)
    state = _splitmix64(state ^ step)
    state = _splitmix64(state ^ sample_id)
    return state >> 1
