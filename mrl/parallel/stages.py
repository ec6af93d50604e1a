"""Pipeline communication with tensor shapes known in advance.

Micro-batches differ in length, so Megatron's stages send each other the shape before every tensor, which costs a
message
and a device synchronisation. All stages of a pipeline cut the same samples into the same micro-batches, so each stage
knows the shapes it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mrl import platform
from mrl.parallel.mesh import Mesh

platform.install()
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

_GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"]


class StaticShapeCommunicator(P2PCommunicator):
    """Communicator for one call of a schedule. tokens: of each micro-batch, on this rank."""

    def __init__(self, mesh: Mesh, config: Any, tokens: Sequence[int]) -> None:
        super().__init__(mesh.pp_group, config)
        rows = [count // mesh.tp if config.sequence_parallel else count for count in tokens]
        shapes = [(count, 1, config.hidden_size) for count in rows]
        before, after = arrival_order(len(tokens), mesh.vpp or 1, mesh.pp)
        self._forward = iter([shapes[i] for i in (after if mesh.is_first_stage else before)])
        self._backward = iter([shapes[i] for i in (after if mesh.is_last_stage else before)])

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Returns the shapes of the tensors from the previous and the next stage; None where nothing is received."""
        return (next(self._forward) if recv_prev else None), (next(self._backward) if recv_next else None)


def arrival_order(micro_batches: int, chunks: int, stages: int) -> tuple[list[int], list[int]]:
    """Returns the micro-batch numbers in order of arrival, for two kinds of stages.

    First for a stage within the pipeline; then for the stage at its end that receives from the other end and sends them
    round again (every chunk but the last).
    """
    table = get_schedule_table(micro_batches, chunks, stages)
    return [number for number, _ in table], [number for number, chunk in table if chunk < chunks - 1]


def communication(mesh: Mesh, config: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """Returns arguments of a Megatron schedule over micro-batches of `tokens` tokens on this rank.

    Call inside the mesh.
    """
    if mesh.pp == 1:
        return {}
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=_GROUPS)
    return {"p2p_communicator": StaticShapeCommunicator(mesh, config, tokens), "pg_collection": groups}
