"""nvidia-resiliency-ext's ft_launcher: `python -m mrl.launcher.ft_agent ...`.

Its rank monitors, which it forks, end with it however it ends, and what they print goes to its log.
"""

from __future__ import annotations

import os

from mrl.resilience.rank import die_with_parent


def main() -> None:
    os.register_at_fork(after_in_child=_become_a_monitor)
    from nvidia_resiliency_ext.fault_tolerance.launcher import main as ft_launcher

    ft_launcher()


def _become_a_monitor() -> None:
    die_with_parent()
    os.dup2(2, 1)


if __name__ == "__main__":
    main()
