"""Process groups: one layout a Mesh, several Meshes a process."""

from mrl.parallel.mesh import Mesh, Meshes, rank, world_size

__all__ = ["Mesh", "Meshes", "rank", "world_size"]
