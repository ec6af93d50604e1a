"""Process groups (one Mesh per layout, several per process) and collective error checks."""

from mrl.parallel.error_check import CollectiveErrorCheck, gather
from mrl.parallel.mesh import Mesh, Meshes, rank, world_size
from mrl.parallel.nodes import Nodes
from mrl.parallel.stages import communication

__all__ = ["CollectiveErrorCheck", "Mesh", "Meshes", "Nodes", "communication", "gather", "rank", "world_size"]
