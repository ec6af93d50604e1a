"""The preflight checks, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mrl.config.problems import ConfigError
from mrl.config.schema import AnyConfig, Config
from mrl.preflight import disk_space, inputs, machine, versions, weights
from mrl.preflight.finding import Finding

Check = Callable[[Config], Iterator[Finding]]


def of_each_adapter(check: Check) -> Check:
    """Returns the check of all of a run's adapters, which have data, rewards and algorithms of their own. A run with
    one policy is checked itself.
    """

    def check_each(cfg: Config) -> Iterator[Finding]:
        several = cfg.adapter_configs()
        for name, own in several.items():
            yield from (replace(finding, text=f"adapter {name}: {finding.text}") for finding in check(own))
        if not several:
            yield from check(cfg)

    return check_each


INPUT_CHECKS: tuple[Check, ...] = (
    of_each_adapter(inputs.check_algorithm),
    of_each_adapter(inputs.check_rewards),
    of_each_adapter(inputs.check_data),
    inputs.check_image_processors,
)
RUN_CHECKS: tuple[Check, ...] = (
    *INPUT_CHECKS,
    weights.check_weights,
    disk_space.check_directory,
    disk_space.check_space,
    machine.check_services,
)
NODE_CHECKS: tuple[Check, ...] = (
    machine.check_packages,
    machine.check_layers,
    machine.check_dtype,
    machine.check_fp8,
    machine.check_quantization,
)
GENERAL_CHECKS: tuple[Callable[[AnyConfig], Iterator[Finding]], ...] = (  # for any trainer
    disk_space.check_directory,
    machine.check_services,
    machine.check_packages,
)
MACHINE_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (  # for any run
    machine.check_temporary_files,
    machine.check_switches,
    versions.check_versions,
    machine.check_ports,
    machine.check_gpus,
)


def configuration_findings(error: ConfigError | None) -> list[Finding]:
    """Returns one finding a mistake, or an "ok" finding without any."""
    if error is None:
        return [Finding("configuration", "ok", "keys, layout, models and files are consistent")]
    return [Finding("configuration", "problem", str(problem)) for problem in error.problems]


def run_checks(cfg: AnyConfig, checks: Sequence[Check] = (*RUN_CHECKS, *NODE_CHECKS)) -> Iterator[Finding]:
    """Yields the findings of a checked configuration one by one; each check starts only what it needs.

    A configuration that is not of a language model gets the general checks among `checks`.
    """
    if isinstance(cfg, Config):
        for each in checks:
            yield from each(cfg)
    else:
        for general in GENERAL_CHECKS:
            if general in checks:
                yield from general(cfg)


def check_machine() -> Iterator[Finding]:
    for each in MACHINE_CHECKS:
        yield from each()
