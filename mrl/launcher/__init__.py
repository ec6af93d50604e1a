"""Starts the ranks of one machine, by itself or through torchrun or ft_launcher, alone or as one node of several.

No rank outlives the launcher.
"""

from mrl.launcher.elastic import ElasticJob, NodeRank, launch_elastic, launch_node
from mrl.launcher.fork_server import RankForkServer
from mrl.launcher.logs import LaunchError
from mrl.launcher.nsys import nsys_command
from mrl.launcher.world import launch

__all__ = [
    "ElasticJob",
    "LaunchError",
    "NodeRank",
    "RankForkServer",
    "launch",
    "launch_elastic",
    "launch_node",
    "nsys_command",
]
