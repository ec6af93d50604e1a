"""All checks in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mrl.config.problems import ConfigError
from mrl.config.schema import AnyConfig, Config
from mrl.preflight import inputs, machine, space, tested, weights
from mrl.preflight.finding import Finding

Look = Callable[[Config], Iterator[Finding]]

OF_INPUTS: tuple[Look, ...] = (
    inputs.look_at_algorithm,
    inputs.look_at_rewards,
    inputs.look_at_data,
    inputs.look_at_image_processor,
)
OF_RUN: tuple[Look, ...] = (
    *OF_INPUTS,
    weights.look_at_weights,
    space.look_at_directory,
    space.look_at_space,
    machine.look_at_services,
)
OF_NODE: tuple[Look, ...] = (
    machine.look_at_packages,
    machine.look_at_layers,
    machine.look_at_dtype,
    machine.look_at_fp8,
    machine.look_at_quantization,
)
OF_ANY: tuple[Callable[[AnyConfig], Iterator[Finding]], ...] = (  # for any trainer
    space.look_at_directory,
    machine.look_at_services,
    machine.look_at_packages,
)
OF_MACHINE: tuple[Callable[[], Iterator[Finding]], ...] = (  # for any run
    machine.look_at_temporary_files,
    machine.look_at_switches,
    tested.look_at_versions,
    machine.look_at_ports,
    machine.look_at_gpus,
)


def of_configuration(error: ConfigError | None) -> list[Finding]:
    """Returns one finding a mistake, or an "ok" finding without any."""
    if error is None:
        return [Finding("configuration", "ok", "keys, layout, models and files fit together")]
    return [Finding("configuration", "problem", str(problem)) for problem in error.problems]


def look(cfg: AnyConfig, looks: Sequence[Look] = (*OF_RUN, *OF_NODE)) -> Iterator[Finding]:
    """Yields the findings of a checked configuration one by one; each check starts only what it needs.

    A configuration that is not of a language model gets the general checks among `looks`.
    """
    if isinstance(cfg, Config):
        for each in looks:
            yield from each(cfg)
    else:
        for general in OF_ANY:
            if general in looks:
                yield from general(cfg)


def look_at_machine() -> Iterator[Finding]:
    for each in OF_MACHINE:
        yield from each()
