"""Checks of the keys that name parameters, against the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator

from flowtrain.config.parameter_names import CONNECTOR, ParameterNames, is_pattern, module_of
from flowtrain.config.run import RunConfig
from flowtrain.config.startable import nothing_to_train
from flowtrain.errors import ConfigError, Fault, FaultCode


def names_parameters(config: RunConfig) -> bool:
    """Whether a configuration has keys for ``parameter_faults`` to check."""
    return bool(config.model.freeze or config.training.learning_rates.given)


def parameter_faults(config: RunConfig, names: ParameterNames) -> list[Fault]:
    """Return why ``model.freeze`` and ``training.learning_rates`` do not fit a model, or each other."""
    if unmatched := list(_unmatched(config, names)):
        return unmatched
    frozen = names.frozen(config.model.freeze)
    counted = (name for name in names.of_each if config.settled_mode != "llm_only" or module_of(name) != CONNECTOR)
    if frozen.issuperset(counted) and not config.trains_encoders:
        return [nothing_to_train(config)]
    return [*_rates_of_frozen(config, names, frozen), *_rates_in_conflict(config, names, frozen)]


def _unmatched(config: RunConfig, names: ParameterNames) -> Iterator[Fault]:
    freeze = config.model.freeze
    keys = [(f"model.freeze.{index}", "model.freeze", key) for index, key in enumerate(freeze) if is_pattern(key)]
    section = "training.learning_rates"
    keys += [(f"{section}.{key}", section, key) for key in config.training.learning_rates.patterns]
    for key, section, pattern in keys:
        if not names.named_by(pattern):
            text = f"{section}: {pattern!r} matches no parameter's whole name; {names.hint(pattern)}"
            yield Fault(key, FaultCode.VALUE, text)


def _rates_of_frozen(config: RunConfig, names: ParameterNames, frozen: frozenset[str]) -> Iterator[Fault]:
    for key, rate in config.training.learning_rates.given.items():
        if names.named_by(key) <= frozen:
            yield Fault(
                f"training.learning_rates.{key}",
                FaultCode.CONFLICT,
                f"training.learning_rates: {key!r} ({rate:g}) has no effect: model.freeze "
                f"({', '.join(config.model.freeze)}) freezes all that it stands for; take one of them out",
            )


def _rates_in_conflict(config: RunConfig, names: ParameterNames, frozen: frozenset[str]) -> Iterator[Fault]:
    """Yield each two patterns that give a parameter different rates once, with the first such parameter."""
    found: dict[str, Fault] = {}
    for first, aliases in names.of_each.items():
        if first in frozen:
            continue
        try:
            config.training.learning_rates.rate_of(aliases)
        except ConfigError as error:
            for fault in error.faults:
                found.setdefault(fault.key, fault)
    yield from found.values()
