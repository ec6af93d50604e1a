"""Run by Python at start-up in the engine process and in the processes that it spawns. See mrl_cpu_engine."""

import mrl_cpu_engine

mrl_cpu_engine.install()
