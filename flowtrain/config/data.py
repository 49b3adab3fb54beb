"""What is trained on: sources, their mixture, the order, what is rejected, evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from flowtrain.config.base import ConfigModel
from flowtrain.config.secrets import secret_in
from flowtrain.errors import Fault, FaultCode

if TYPE_CHECKING:
    from flowtrain.config.run import RunConfig

Shuffle = Literal["blocks", "rows", "none"]


class ColumnsConfig(ConfigModel):
    """Names of a parquet file's columns."""

    images: str = "images"
    """Images of a sample."""
    texts: str = "texts"
    """Turns as ``{user, assistant}``."""
    messages: str = "messages"
    """Turns as ``{role, content}``; read where there is no column of ``texts``."""


class StoredConfig(ConfigModel):
    """Where samples are stored."""

    path: str
    """A file, a directory, or a pattern (``shards/*.tar``), on a local file system or as a URL (``s3://``, ``gs://``,
    ``hf://datasets/<id>``). Credentials come from the environment alone."""
    format: Literal["auto", "parquet", "json", "webdataset"] = "auto"
    """``auto``: chosen by the files' ending."""
    image_root: str | None = None
    """Directory that image paths start from, and stay beneath; None: the directory of the file."""
    columns: ColumnsConfig = ColumnsConfig()

    @field_validator("path", "image_root")
    @classmethod
    def _has_no_secret(cls, value: str | None) -> str | None:
        """Refuse a URL with a password, key or token: a run writes its configuration down."""
        if value is not None and (secret := secret_in(value)) is not None:
            raise ValueError(f"has {secret} in its URL; credentials come from the environment alone")
        return value


class SourceConfig(StoredConfig):
    """One data source."""

    name: str | None = None
    weight: float = Field(1.0, ge=1e-9, le=1e9)
    """Share in the mixture, relative to the other sources' weights."""


class EvalConfig(StoredConfig):
    """A held-out set: every ``every_steps`` steps the loss over its first ``max_samples`` samples."""

    every_steps: int = Field(100, ge=1)
    max_samples: int = Field(256, ge=1, le=1 << 24)
    num_generated: int = Field(0, ge=0)
    """How many of these samples, from the first on, the model answers after each evaluation: always with the likeliest
    token. Each token is a forward pass."""
    max_new_tokens: int = Field(64, ge=1, le=4096)
    """The most tokens of such an answer; with its prompt it never has more than ``data.max_seq_len``."""


THE_SET = "eval"
"""Name of a held-out set that is given without a name."""
_ONE_SET, _NAMED_SETS = "(one set)", "(sets by name)"
EVAL_FORMS = frozenset({_ONE_SET, _NAMED_SETS})
"""What pydantic adds to the places of faults in ``data.eval``."""


def _eval_form(value: Any) -> str:
    """Which form ``data.eval`` has: a mapping of mappings, none of whose keys is one of a set's."""
    if not isinstance(value, Mapping) or EvalConfig.model_fields.keys() & value.keys():
        return _ONE_SET
    return _NAMED_SETS if all(isinstance(each, Mapping | EvalConfig) for each in value.values()) else _ONE_SET


EvalSets = Annotated[
    Annotated[EvalConfig, Tag(_ONE_SET)] | Annotated[dict[str, EvalConfig], Field(min_length=1), Tag(_NAMED_SETS)],
    Discriminator(_eval_form),
]


class GroupingConfig(ConfigModel):
    """Groups of samples over the whole data set, each of which becomes a microbatch (OmniBal 4.1)."""

    sizes: str
    """The sizes of the source's samples: a CSV that ``flowtrain data check --sizes`` wrote with this configuration. All
    nodes read it."""
    vision_tokens: int | None = Field(None, ge=1)
    """The most vision tokens of a group (Q_v). None: what mean samples have in ``scheduler.microbatch_tokens`` tokens,
    which are the most tokens of a group."""


class DataConfig(ConfigModel):
    """The training data."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    order: Literal["deterministic", "arrival"] = "deterministic"
    """``deterministic``: steps and the order of microbatches depend on the seed alone. ``arrival``: steps are built
    from the samples that are ready, within ``scheduler.lookahead_steps``."""
    max_seq_len: int = Field(2048, ge=8, le=1 << 26)
    """The most backbone tokens that one sample may have."""
    oversized: Literal["reject", "truncate_text"] = "reject"
    """What happens to a longer sample: it is rejected, or its text is cut at the end. Images are never cut: a sample is
    also rejected if its images alone are too long, or if no token with loss would be left."""
    max_rejected_fraction: float = Field(0.05, ge=0, le=1)
    """The run fails when a larger share of the samples is rejected."""
    max_image_pixels: int = Field(64_000_000, ge=1, le=1 << 40)
    """Larger images are rejected before they are decoded."""
    max_image_nbytes: int = Field(8 << 20, ge=1 << 10, le=1 << 32)
    """The most bytes that the encoded images of one sample may have together. A feeder's segment holds a step of such
    samples."""
    max_text_nbytes: int | None = Field(None, ge=1 << 10)
    """The most bytes of text that one sample may have: more is rejected before it is tokenised. None: 64 for each token
    of ``max_seq_len``."""
    shuffle: Shuffle = "blocks"
    """``blocks`` (or true): ``shuffle_blocks`` random blocks are open at a time and mixed row by row; each block is
    read once an epoch. ``rows``: any row may follow any other, so that each row costs the reading of its block.
    ``none`` (or false): the order of the files."""
    grouping: GroupingConfig | None = None
    """Order the rows of each epoch in balanced groups. Needs one source, ``shuffle: rows``, ``order: deterministic``
    and ``scheduler.packing: groups``."""
    shuffle_blocks: int = Field(64, ge=1, le=1 << 20)
    """Blocks of each source that are mixed."""
    read_ahead_blocks: int = Field(1, ge=1, le=1 << 16)
    """Blocks that each feeder reads at the same time, before their turn. More help where storage is slow. Each takes
    memory beside the segment: a parquet row group about four times its size while it is read."""
    num_feeders: int | None = Field(None, ge=1, le=4096)
    """Processes that read and size samples; None: as many as the rate of a ``flowtrain plan`` needs, at most
    one for each device, else one."""
    system_prompt: str | None = None
    """Put before every conversation, if given."""
    eval: EvalSets | None = None
    """A held-out set, or several by name."""

    @field_validator("shuffle", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """Take true for ``blocks`` and false for ``none``."""
        return {True: "blocks", False: "none"}[value] if isinstance(value, bool) else value

    @property
    def eval_sets(self) -> dict[str, EvalConfig]:
        """The held-out sets by name, in their order."""
        if self.eval is None:
            return {}
        return {THE_SET: self.eval} if isinstance(self.eval, EvalConfig) else self.eval

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Their names in the quarantine file."""
        is_one = isinstance(self.eval, EvalConfig)
        return tuple(name if is_one else f"eval/{name}" for name in self.eval_sets)

    @property
    def text_limit_nbytes(self) -> int:
        """The most bytes of text that one sample may have."""
        return self.max_text_nbytes if self.max_text_nbytes is not None else max(1 << 10, 64 * self.max_seq_len)


def grouping_has_its_order(config: RunConfig) -> Iterator[Fault]:
    """Refuse grouping with what would break the groups up again, and packing by groups without them."""
    data, packing = config.data, config.scheduler.packing
    if data.grouping is None:
        if packing == "groups":
            yield Fault(
                "scheduler.packing",
                FaultCode.CONFLICT,
                "scheduler.packing ('groups') needs data.grouping (not given), which orders the samples in groups; "
                "give it, or set the packing to 'best_fit_balanced'",
            )
        return
    for key, value, wanted in (
        ("scheduler.packing", packing, "groups"),
        ("data.shuffle", data.shuffle, "rows"),
        ("data.order", data.order, "deterministic"),
    ):
        if value != wanted:
            yield Fault(
                key,
                FaultCode.CONFLICT,
                f"data.grouping needs {key} {wanted!r} (now {value!r}): others mix the samples of groups; set it, "
                "or leave out data.grouping",
            )
    if len(data.sources) > 1:
        yield Fault(
            "data.grouping",
            FaultCode.CONFLICT,
            f"data.grouping groups the samples of one source, and data.sources has {len(data.sources)} entries, whose "
            "samples take turns; join them into one, or leave out data.grouping",
        )
    policy = config.pipeline.policy
    if policy != "none":
        yield Fault(
            "pipeline.policy",
            FaultCode.CONFLICT,
            f"pipeline.policy ({policy!r}) packs each step anew, and data.grouping has decided the microbatches; set "
            "the first to 'none', or leave out the second",
        )
