"""The models of OmniBal's tables: shapes of the published ones (the paper only names them), and its layouts."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, TransformerSpec, VisionSpec

PATCHES_PER_TILE = 1024
"""Of 448 pixels, in patches of 14."""
PATCHES_PER_ROW = 4
"""InternVL joins four patches to one feature row: 256 tokens a tile."""
TOKENS_PER_TILE = PATCHES_PER_TILE // PATCHES_PER_ROW


def _tower(num_layers: int, width: int, mlp: int, heads: int, *, intern: bool = False) -> VisionSpec:
    outside = (3 * 14 * 14 + PATCHES_PER_TILE + 1) * width
    return VisionSpec(
        num_layers,
        width,
        mlp,
        heads,
        14,
        3,
        1,
        outside,
        qkv_bias=not intern,
        layer_scale=intern,
        rms_norm=intern,
        qk_norm=intern,
        patches_per_row=PATCHES_PER_ROW,
    )


def _decoder(num_layers: int, width: int, mlp: int, heads: int, vocab: int) -> TransformerSpec:
    return TransformerSpec(num_layers, width, mlp, heads, 8, 128, vocab)


TOWERS = {
    "InternVL-6B": _tower(45, 3200, 12800, 25, intern=True),
    "EVA-CLIP-1B": _tower(40, 1408, 6144, 16),
    "EVA-CLIP-4B": _tower(54, 1792, 15360, 16),
    "EVA-CLIP-8B": _tower(32, 4096, 20480, 32),
    "EVA-CLIP-18B": _tower(48, 5120, 25600, 40),
}
"""Layers are those that the paper's layouts add up to."""
DECODERS = {
    "Llama3-8B": _decoder(32, 4096, 14336, 32, 128256),
    "InternLM2-20B": _decoder(48, 6144, 16384, 48, 92544),
    "Yi-34B": _decoder(60, 7168, 20480, 56, 64000),
    "Llama3-70B": _decoder(80, 8192, 28672, 64, 128256),
    "Qwen1.5-110B": _decoder(80, 8192, 49152, 64, 152064),
}


@dataclass(frozen=True)
class Case:
    """A row of Table 9."""

    tower: str
    decoder: str
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...]
    """The paper's, of each stage."""
    recomputed: tuple[int, ...]
    """The paper's, of each stage."""
    baseline_days: float
    """GPU days without balance."""
    days: float

    @property
    def name(self) -> str:
        """Both models."""
        return f"{self.tower}+{self.decoder}"

    @property
    def model(self) -> ModelSpec:
        """The shapes."""
        tower, decoder = TOWERS[self.tower], DECODERS[self.decoder]
        width = tower.hidden_size * PATCHES_PER_ROW
        return ModelSpec({"vision": tower}, ConnectorSpec(width, decoder.hidden_size, decoder.hidden_size), decoder)


CASES = (
    Case("InternVL-6B", "Llama3-8B", 1, 4, 8, (16, 17, 20, 24), (8, 7, 10, 24), 27.7, 13.8),
    Case("InternVL-6B", "InternLM2-20B", 2, 4, 4, (22, 23, 24, 24), (0, 0, 0, 0), 61.8, 21.3),
    Case("InternVL-6B", "Yi-34B", 4, 4, 2, (28, 29, 24, 24), (3, 2, 0, 0), 75.4, 30.5),
    Case(
        "InternVL-6B",
        "Llama3-70B",
        4,
        8,
        2,
        (22, 23, 13, 14, 14, 14, 13, 12),
        (11, 12, 8, 5, 3, 2, 0, 0),
        129.0,
        52.5,
    ),
    Case(
        "InternVL-6B",
        "Qwen1.5-110B",
        8,
        8,
        1,
        (21, 22, 13, 13, 14, 14, 14, 14),
        (6, 9, 1, 3, 0, 0, 0, 0),
        243.0,
        75.2,
    ),
    Case("EVA-CLIP-1B", "InternLM2-20B", 2, 4, 4, (43, 16, 15, 14), (0, 0, 0, 0), 23.6, 12.2),
    Case("EVA-CLIP-4B", "InternLM2-20B", 2, 4, 4, (39, 22, 21, 20), (10, 8, 1, 3), 38.1, 17.0),
    Case("EVA-CLIP-8B", "InternLM2-20B", 2, 4, 4, (17, 18, 23, 22), (5, 5, 8, 10), 41.8, 20.3),
    Case("EVA-CLIP-18B", "InternLM2-20B", 4, 4, 4, (18, 19, 25, 34), (2, 2, 0, 0), 63.6, 33.8),
)
CHAT_1_5 = CASES[1]
"""InternVL-Chat-1.5, of all tables but this."""
