"""Table of the memory that models and engines hold in each phase of a step, applied at every phase boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mrl.inference.engine import Engine
from mrl.inference.protocol import MemoryPart
from mrl.learner.memory import Level
from mrl.trainers.shared.memory import AWAKE, PhaseMemory
from mrl.trainers.shared.world import World

ASLEEP: tuple[MemoryPart, ...] = ()
WEIGHTS: tuple[MemoryPart, ...] = ("weights",)
AS_IT_IS = None


def _row(actor: Level, critic: Level, ref: Level, reward: Level, engine: tuple[MemoryPart, ...] | None) -> PhaseMemory:
    return PhaseMemory({"actor": actor, "critic": critic, "ref": ref, "reward": reward}, engine)


# fmt: off
ORDER: dict[str, PhaseMemory] = {
    # a frozen reference is a model of its own; one that moves is computed with in the actor's place
    #                      actor         critic        ref           reward        the engines have awake
    "resume":         _row("nothing",    "nothing",    "nothing",    "nothing",    ASLEEP),
    "rollout":        _row("nothing",    "nothing",    "nothing",    "nothing",    AWAKE),
    "scoring":        _row("nothing",    "nothing",    "nothing",    "parameters", AS_IT_IS),
    "early_passes":   _row("parameters", "parameters", "parameters", "nothing",    AS_IT_IS),
    "engine_restart": _row("parameters", "nothing",    "nothing",    "nothing",    AS_IT_IS),
    "experience":     _row("parameters", "parameters", "parameters", "nothing",    ASLEEP),
    "actor_update":   _row("all",        "nothing",    "nothing",    "nothing",    ASLEEP),
    "critic_update":  _row("nothing",    "all",        "nothing",    "nothing",    ASLEEP),
    "sync":           _row("parameters", "nothing",    "nothing",    "nothing",    WEIGHTS),
    "validation":     _row("nothing",    "nothing",    "nothing",    "nothing",    AWAKE),
    "export":         _row("parameters", "nothing",    "nothing",    "nothing",    WEIGHTS),
    "end":            _row("nothing",    "nothing",    "nothing",    "nothing",    AWAKE),
    # "checkpoint" is not here: it reads what it writes where that lies. A load brings one model at a time.
}
# fmt: on


def order_with(teachers: Iterable[str]) -> dict[str, PhaseMemory]:
    """The table, with a phase of its own for each teacher, in which no other model is needed."""
    away: dict[str, Level] = dict.fromkeys((*ORDER["rollout"].models, *teachers), "nothing")
    order = {phase: PhaseMemory({**away, **row.models}, row.engine) for phase, row in ORDER.items()}
    return order | {name: PhaseMemory({**away, name: "parameters"}, ASLEEP) for name in teachers}


@dataclass(frozen=True)
class Engines:
    """The engines' memory, which rank 0 asks for.

    parts: what they give up (`rollout.release`)
    engine: None on the other ranks
    """

    world: World
    parts: tuple[MemoryPart, ...]
    engine: Engine | None

    def release(self, parts: tuple[MemoryPart, ...]) -> bool:
        return self._move("releasing the engines' memory", lambda engine: engine.release_memory(parts))

    def resume(self, parts: tuple[MemoryPart, ...]) -> bool:
        return self._move("resuming the engines' memory", lambda engine: engine.resume_memory(parts))

    def _move(self, what: str, move: Callable[[Engine], None]) -> bool:
        def on_main() -> bool:
            assert self.engine is not None, "only rank 0 talks to the engines"
            move(self.engine)
            return self.engine.lacks_weights

        return self.world.from_main(what, on_main)
