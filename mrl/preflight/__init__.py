"""What `mrl preflight` shows and `mrl train` demands before it starts a process."""

from mrl.preflight.finding import Finding, problems
from mrl.preflight.inputs import check_of_sampled, check_own
from mrl.preflight.look import OF_INPUTS, OF_MACHINE, OF_RUN, look, of_configuration

__all__ = [
    "OF_INPUTS",
    "OF_MACHINE",
    "OF_RUN",
    "Finding",
    "check_of_sampled",
    "check_own",
    "look",
    "of_configuration",
    "problems",
]
