"""Starts the ranks of one machine, by itself or through torchrun or ft_launcher, alone or as one node of several.

No rank outlives the launcher.
"""

from mrl.launcher.elastic import ElasticJob, launch_elastic
from mrl.launcher.environment import FOR_FORK_SERVERS
from mrl.launcher.fork_server import ForkServer
from mrl.launcher.logs import LaunchError
from mrl.launcher.node import NodeRank, launch_node
from mrl.launcher.world import launch

__all__ = [
    "FOR_FORK_SERVERS",
    "ElasticJob",
    "LaunchError",
    "NodeRank",
    "ForkServer",
    "launch",
    "launch_elastic",
    "launch_node",
]
