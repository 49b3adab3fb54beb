"""What the memory and the time of a training step depend on, besides the model: settings, chunks, microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FLOAT32_NBYTES = 4
LOSS_CHUNK_TOKENS = 2048
"""Rows of logits that exist at once; the same value as in ``flowtrain.models.loss``."""

CPU_PROBABILITIES = 2**19
"""Logits that the loss turns into probabilities at once on a CPU; the same value as there."""

DTYPE_NBYTES = {"float32": FLOAT32_NBYTES, "bfloat16": 2}
"""Bytes per number, by ``model.dtype``."""

Checkpointing = Literal["none", "full", "selective", "every_n", "offload"] | tuple[str, ...]
"""As ``backbone.activation_checkpointing``: one word for all decoder layers, or one word each."""
ReductionName = Literal["microbatch", "step"]
"""When data parallel ranks sum gradients: with each microbatch, or with a step's last one."""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The settings of backbone training that memory depends on; names and values as in the configuration."""

    dp: int = 1
    """Data parallel degree."""
    tp: int = 1
    """Tensor parallel degree."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    sharding: Literal["full", "gradients", "hybrid"] = "full"
    shard_size: int | None = None
    """DP ranks that share one set of shards under ``hybrid``; None: all."""
    gradient_reduction: ReductionName = "step"
    sequence_parallel: bool = True
    activation_checkpointing: Checkpointing = "none"
    checkpoint_every: int = 2
    encoder_checkpointing: Checkpointing | None = None
    """Of a trained encoder, as ``encoders.<name>.activation_checkpointing``; None: as ``of_encoder`` tells."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    attention: Literal["flash_attn", "torch_varlen", "sdpa"] = "flash_attn"
    """``sdpa`` keeps its output twice, because it copies the sequences' outputs into one tensor."""
    repeats_kv: bool = False
    """The attention kernel needs as many heads of keys and values as of queries (an older ``varlen_attn``)."""
    accumulates: bool = True
    """Several microbatches per step: gradients of the earlier ones exist during each later one."""
    loss_chunk_tokens: int = LOSS_CHUNK_TOKENS
    probabilities_at_once: int | None = None
    """Logits that the loss turns into float32 probabilities at once; None: all of a chunk."""

    @property
    def dtype_nbytes(self) -> int:
        """Bytes per number in the compute type."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def checkpointing_text(self) -> str:
        """``activation_checkpointing`` in words."""
        if isinstance(self.activation_checkpointing, str):
            return self.activation_checkpointing
        counts = Counter(self.activation_checkpointing)
        return ", ".join(f"{word} in {count} layers" for word, count in counts.items())

    @property
    def of_encoder(self) -> Checkpointing:
        """What a trained encoder follows: its own words, else the backbone's word; beside a list it keeps all."""
        if self.encoder_checkpointing is not None:
            return self.encoder_checkpointing
        return self.activation_checkpointing if isinstance(self.activation_checkpointing, str) else "none"

    def share_of_layers(self, word: str) -> float:
        """Return the share of decoder layers that follow a strategy; ``every_n`` is ``full`` in each n-th layer."""
        return _share(self.activation_checkpointing, word, self.checkpoint_every)

    def share_of_encoder_layers(self, word: str) -> float:
        """Return the same of a trained encoder's layers."""
        return _share(self.of_encoder, word, self.checkpoint_every)

    @property
    def num_shards(self) -> int:
        """DP ranks that hold one set of parameters, gradients and optimizer state together."""
        return self.shard_size or self.dp if self.sharding == "hybrid" else self.dp

    def sliced(self, num_tokens: int) -> int:
        """Tokens that a rank has of each tensor between the tensor parallel regions: norms, residuals, transfers."""
        return -(-num_tokens // self.tp) if self.sequence_parallel else num_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of decoder layers that a rank holds."""

    num_layers: int
    is_first: bool = True
    """It includes the embedding and the connector."""
    is_last: bool = True
    """It includes the final norm, the head and the loss."""
    in_flight: int = 1
    """Microbatches whose activations it keeps at once (1F1B: the pipeline ranks from this one to the last)."""
    first_layer: int = 0
    """Number of its first layer in the whole backbone; per-layer strategies depend on it."""

    @property
    def layers(self) -> range:
        """Numbers of its layers in the whole backbone."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def words(self, setup: TrainingSetup) -> Sequence[str]:
        """Return the strategy of each of its layers, in order."""
        words, every = setup.activation_checkpointing, setup.checkpoint_every
        if words == "every_n":
            return ["none" if layer % every else "full" for layer in range(self.num_layers)]
        if isinstance(words, str):
            return [words] * self.num_layers
        return words[self.first_layer : self.first_layer + self.num_layers]

    def layers_by_strategy(self, setup: TrainingSetup) -> Mapping[str, int]:
        """Return how many of its layers follow each strategy; ``every_n`` is ``full`` in the first of every n."""
        words = setup.activation_checkpointing
        if isinstance(words, str):
            return _by_strategy(words, self.num_layers, setup)
        return Counter(words[self.first_layer : self.first_layer + self.num_layers])


@dataclass(frozen=True, slots=True)
class EncoderChunk:
    """A run of an encoder's layers that a rank of the pipeline holds."""

    num_layers: int
    is_first: bool = True
    """It includes the embedding of images."""
    is_last: bool = True
    """Its output are features."""
    is_trained: bool = False
    sends: bool = False
    """Its output goes to another rank."""
    in_flight: int = 1
    """Microbatches whose activations it keeps at once if it is trained."""
    first_layer: int = 0
    """Number of its first layer in the whole encoder; per-layer strategies depend on it."""

    def layers_by_strategy(self, setup: TrainingSetup) -> Mapping[str, int]:
        """Return how many of its layers follow each strategy (``TrainingSetup.of_encoder``)."""
        words = setup.of_encoder
        if isinstance(words, str):
            return _by_strategy(words, self.num_layers, setup)
        return Counter(words[self.first_layer : self.first_layer + self.num_layers])


def _share(words: Checkpointing, word: str, every: int) -> float:
    if not isinstance(words, str):
        return words.count(word) / len(words)
    if words == "every_n":
        recomputed = 1.0 / every
        return {"full": recomputed, "none": 1.0 - recomputed}.get(word, 0.0)
    return float(words == word)


def _by_strategy(word: str, num_layers: int, setup: TrainingSetup) -> dict[str, int]:
    if word != "every_n":
        return {word: num_layers}
    recomputed = -(-num_layers // setup.checkpoint_every)
    return {"full": recomputed, "none": num_layers - recomputed}


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """Size of a packed microbatch."""

    num_tokens: int
    num_target_tokens: int
    """Tokens that carry loss."""
    num_rows: int = 0
    """Feature rows from encoders."""
    num_tower_tokens: int = 0
    """Tokens of its images inside an encoder that the pipeline holds."""
