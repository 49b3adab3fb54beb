"""What a microbatch costs the backbone, as the scheduler sees it: only ratios matter."""

from __future__ import annotations

from collections.abc import Collection

from flowtrain.costs.flops import backbone_training_flops
from flowtrain.costs.model_spec import TransformerSpec
from flowtrain.errors import ConfigError
from flowtrain.types.plan import CostModel


def eq3(capacity: int) -> CostModel:
    """Return the cost of FlowTrain 3.4, Eq. 3: tokens / L + (longest / L) ** 2 with ``L = capacity`` in tokens.

    The first term stands for the linear layers, the second for attention over the longest sub-sequence.
    """
    return CostModel("eq3", per_token=1.0 / capacity, per_longest=1.0 / capacity**2)


def tokens(capacity: int) -> CostModel:
    """Return the share of the capacity that is filled: the linear term of Eq. 3 alone."""
    return CostModel("tokens", per_token=1.0 / capacity)


def flops(spec: TransformerSpec, freeze: Collection[str] = ()) -> CostModel:
    """Return the training FLOPs of the backbone, exact for packed causal attention.

    freeze: modules that are not trained, as in ``model.freeze``. FLOPs are linear in tokens and in squares, so the
    FLOPs of two lengths give both coefficients.
    """
    one, two = (backbone_training_flops(spec, (length,), freeze) for length in (1, 2))
    per_square = (two - 2.0 * one) / 2.0
    return CostModel("flops", per_token=one - per_square, per_square=per_square)


COSTS = ("eq3", "tokens", "flops", "profile")


def make_cost_model(
    name: str,
    capacity: int,
    backbone: TransformerSpec | None = None,
    freeze: Collection[str] = (),
    profile: CostModel | None = None,
) -> CostModel:
    """Return the cost model called ``name`` for microbatches of ``capacity`` tokens.

    backbone, freeze: needed by ``flops``. profile: the fitted model, needed by ``profile``. Raises ConfigError for an
    unknown name, and if an input that the cost needs is missing.
    """
    if name == "eq3":
        return eq3(capacity)
    if name == "tokens":
        return tokens(capacity)
    if name == "flops":
        if backbone is None:
            raise ConfigError(
                "scheduler.cost ('flops') needs the backbone's shape; use 'eq3' or 'tokens' without a model"
            )
        return flops(backbone, freeze)
    if name == "profile":
        if profile is None:
            raise ConfigError(
                "scheduler.cost ('profile') needs a fitted cost: give scheduler.cost_profile, the profile.json that an "
                "earlier run of this model wrote into its directory"
            )
        return profile
    raise ConfigError(f"scheduler.cost ({name!r}) is unknown; choose one of {', '.join(COSTS)}")
