"""How the model is trained: batch, optimizer, schedule, loss, checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from flowtrain.config.base import ConfigModel
from flowtrain.config.parameter_names import ENCODERS, MODULES, is_pattern, module_of, stands_for
from flowtrain.errors import ConfigError, FaultCode

Beta = Annotated[float, Field(ge=0, lt=1)]


class LearningRateConfig(ConfigModel):
    """Peak learning rate by module, and by patterns of parameter names (``model.freeze``), which win over modules.

    A pattern is a key of its own. None: the module has ``training.learning_rate``. Two patterns may name a parameter
    only if their rates are equal: the order of a mapping's keys decides nothing.
    """

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Annotated[float, Field(ge=0)]] = Field(init=False)
    connector: float | None = Field(None, ge=0)
    backbone: float | None = Field(None, ge=0)
    encoders: float | None = Field(None, ge=0)
    """Of encoders that are ``trainable``."""

    @model_validator(mode="after")
    def _only_patterns_beside_modules(self) -> LearningRateConfig:
        for key, rate in self.patterns.items():
            if not is_pattern(key):
                near = difflib.get_close_matches(key, (*MODULES, ENCODERS), n=1)
                way_out = f"did you mean {near[0]!r}?" if near else "a pattern of parameter names has a * or a dot"
                raise ConfigError.of(
                    f"training.learning_rates.{key}",
                    FaultCode.KEY,
                    f"training.learning_rates.{key} = {rate:g}: no module ({', '.join((*MODULES, ENCODERS))}) has this "
                    f"name; {way_out}",
                )
        return self

    @property
    def patterns(self) -> dict[str, float]:
        """The rates by pattern."""
        return dict(self.model_extra or {})

    @property
    def given(self) -> dict[str, float]:
        """The rates of connector and backbone, where they have one, and of patterns."""
        modules = {name: getattr(self, name) for name in MODULES}
        return {name: rate for name, rate in modules.items() if rate is not None} | self.patterns

    def rate_of(self, names: Collection[str]) -> float | None:
        """Return the rate of a parameter with these names; None: it has ``training.learning_rate``.

        names: one, or several of a tied weight. Patterns name no parameters of encoders. Raises ConfigError if they
        give a parameter different rates.
        """
        module = module_of(next(iter(names)))
        patterns = {} if module == ENCODERS else self.patterns
        rates = {key: rate for key, rate in patterns.items() if any(stands_for(key, name) for name in names)}
        if not rates:
            rate: float | None = getattr(self, module)
            return rate
        (one, of_one), *others = rates.items()
        for other, of_other in others:
            if of_other != of_one:
                raise ConfigError.of(
                    f"training.learning_rates.{other}",
                    FaultCode.CONFLICT,
                    f"training.learning_rates: {one!r} ({of_one:g}) and {other!r} ({of_other:g}) both name "
                    f"{next(iter(names))}; give them one rate, or patterns that share no parameter",
                )
        return of_one


class TrainingConfig(ConfigModel):
    """Optimisation."""

    global_batch_size: int = Field(8, ge=1, le=1 << 20)
    """Samples of an optimizer step, over all ranks."""
    max_steps: int | None = Field(None, ge=1)
    """Length of the run; give either this or ``num_epochs``."""
    num_epochs: float | None = Field(None, gt=0, le=1e9)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-4, ge=0)
    """The peak."""
    learning_rates: LearningRateConfig = LearningRateConfig()
    """Overrides it by module and by pattern of parameter names."""
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1)
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0)
    """0 turns clipping off."""
    loss_normalization: Literal["token", "sample"] = "token"
    """``token``: the sum of token losses over the step's number of target tokens. ``sample``: the mean over samples of
    their mean token loss."""
    on_nonfinite: Literal["skip", "stop", "rewind"] = "skip"
    """What follows a step whose loss or gradients are not finite. ``skip``: the step makes no update. ``stop``: the run
    ends with an error. ``rewind``: weights and optimizer go back to the last checkpoint, and the data goes on."""
    on_spike: Literal["off", "skip", "stop", "rewind"] = "off"
    """The same for a step whose loss stands far above those of the steps before it (docs/running.md). ``off``: it is a
    step like any other."""
    max_skipped_steps: int = Field(10, ge=0)
    """Steps in a row that may be skipped for one of these; one more ends the run with an error, or rewinds it."""

    @model_validator(mode="after")
    def _one_end(self) -> TrainingConfig:
        if (self.max_steps is None) == (self.num_epochs is None):
            way_out = "" if self.max_steps is None else "; unset the other with =null"
            raise ConfigError.of(
                "training.max_steps",
                FaultCode.CONFLICT,
                f"give exactly one of training.max_steps (now {self.max_steps}) "
                f"and training.num_epochs (now {self.num_epochs}){way_out}",
            )
        return self


class CheckpointConfig(ConfigModel):
    """Resumable checkpoints: every ``every_steps`` steps and at the end; the last ``keep`` complete ones stay."""

    every_steps: int = Field(100, ge=1)
    at_end: bool = True
    """Without one a run cannot be exported; for runs that only measure."""
    keep: int = Field(2, ge=1)
    keep_best: str | None = None
    """Also keep the checkpoint with the lowest ``eval_loss``, or with the lowest one of a held-out set
    (``eval_loss/<name>``); None: age alone decides."""
    background: Literal["auto"] | bool = "auto"
    """Copy the state to host memory and write it while training goes on. ``auto``: where host memory can hold the
    copy."""
    snapshot_every_steps: int | None = Field(None, ge=1)
    """Also keep the state in the memory of the ranks' nodes, every so many steps: a run that loses a rank starts again
    from there; None: from the last checkpoint. A node's memory must hold two states of its ranks. Emulated devices have
    no state."""

    @model_validator(mode="after")
    def _more_snapshots_than_checkpoints(self) -> CheckpointConfig:
        if self.snapshot_every_steps is not None and self.snapshot_every_steps >= self.every_steps:
            raise ConfigError.of(
                "checkpoint.snapshot_every_steps",
                FaultCode.CONFLICT,
                f"checkpoint.snapshot_every_steps ({self.snapshot_every_steps}) must be below checkpoint.every_steps "
                f"({self.every_steps}), whose checkpoints are newer; lower it, or set it to null",
            )
        return self
