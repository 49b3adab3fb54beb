"""What can be planned but not run yet. Only a start refuses it, so that such configurations can be planned."""

from __future__ import annotations

from flowtrain.config.messages import refusal
from flowtrain.config.parameter_names import CONNECTOR, MODULES, is_pattern
from flowtrain.config.run import RunConfig
from flowtrain.errors import Fault, FaultCode


def startable_faults(config: RunConfig) -> list[Fault]:
    """Return why a run with this configuration cannot start; empty if it can."""
    faults = []
    if len(config.encoders) > 1:
        text = (
            f"encoders has {len(config.encoders)} entries ({', '.join(config.encoders)}); family "
            f"{config.model.family!r} has exactly one encoder"
        )
        faults.append(Fault("encoders", FaultCode.ENCODERS, text))
    dp_size, shard_size = config.backbone.data_parallel_size, config.backbone.hybrid_shard_size
    if shard_size is not None and dp_size % shard_size:
        text = (
            f"backbone.hybrid_shard_size ({shard_size}) does not divide backbone.data_parallel_size ({dp_size}); "
            "change one of them, or unset the first with =null: then the replicas on one node share shards"
        )
        faults.append(Fault("backbone.hybrid_shard_size", FaultCode.DEGREES, text))
    if not _trains_a_module(config):
        faults.append(nothing_to_train(config))
    return faults


def _trains_a_module(config: RunConfig) -> bool:
    """Whether a module is trained, as far as names of modules tell; the connector is only where images are."""
    trained = set(MODULES) - set(config.model.freeze)
    if config.settled_mode == "llm_only":
        trained -= {CONNECTOR}
    return bool(trained) or config.trains_encoders


def nothing_to_train(config: RunConfig) -> Fault:
    """Return the fault of a run that freezes everything."""
    frozen, way_out = ", ".join(config.model.freeze), "take connector or backbone out of it"
    if any(map(is_pattern, config.model.freeze)):
        way_out = "take a pattern out of it"
    elif config.settled_mode == "llm_only":
        way_out = "take backbone out of it: mode 'llm_only' has no images, which the connector needs"
    if config.settled_mode == "monolithic":
        way_out += ", or train an encoder with encoders.<name>.trainable=true"
    return Fault("model.freeze", FaultCode.CONFLICT, f"model.freeze ({frozen}) leaves nothing to train; {way_out}")


def check_startable(config: RunConfig) -> None:
    """Raise ConfigError, with all faults, if a run with this configuration cannot start."""
    if faults := startable_faults(config):
        raise refusal(f"run {config.name!r}", faults)
