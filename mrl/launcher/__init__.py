"""Starts the ranks of one machine, by itself or through torchrun or ft_launcher, alone or as one node of several.

No rank outlives the launcher.
"""

from mrl.launcher.elastic import Elastic, launch_elastic
from mrl.launcher.environment import FOR_COPIES
from mrl.launcher.logs import LaunchError
from mrl.launcher.node import NodePlace, launch_node
from mrl.launcher.nursery import Nursery
from mrl.launcher.world import launch

__all__ = ["FOR_COPIES", "Elastic", "LaunchError", "NodePlace", "Nursery", "launch", "launch_elastic", "launch_node"]
