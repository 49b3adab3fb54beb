"""Reads Hugging Face configurations, as plain mappings, into model specs, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowtrain.costs.model_spec import TransformerSpec, VisionSpec
from flowtrain.errors import ConfigError

HFConfig = Mapping[str, Any]
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Facts that a config does not state, because HF hard-wires them by model type.
_TWO_MATRIX_MLP = {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "phi", "starcoder2"}
_OWN_NUM_KV_HEADS = {"mistral", "qwen2", "qwen3", "qwen3_vl_text"}
_LIKE_QWEN3 = {"qwen3", "qwen3_vl_text"}


def from_hf_text_config(config: HFConfig) -> TransformerSpec:
    """Return the spec of a causal LM from its HF config (``config.to_dict()`` or the content of ``config.json``).

    Exact in every parameter for ``llama``, ``mistral``, ``qwen2``, ``qwen3`` and ``qwen3_vl_text``. For other types the
    matrices are right if their config uses the same keys. Raises ConfigError for a missing key, and for mixtures of
    experts, which no formula here covers.
    """
    model_type = config.get("model_type", "")
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise ConfigError(
                f"backbone config ({model_type!r}) has {key} ({config[key]}): the cost model has no mixture of experts "
                "yet; use a dense backbone"
            )
    hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    return TransformerSpec(
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, hidden_size, num_heads),
        vocab_size=_int(config, "vocab_size"),
        gated_mlp=model_type not in _TWO_MATRIX_MLP,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type in _LIKE_QWEN3,
    )


def from_hf_vision_config(config: HFConfig) -> VisionSpec:
    """Return the spec of a vision tower from its HF config; a CLIP or SigLIP config of both towers works too.

    Types: ``siglip_vision_model``, ``clip_vision_model``, ``dinov2``, ``dinov2_with_registers``, ``vit``,
    ``internvl_vision``, ``qwen3_vl_vision`` (without its mergers). Raises ConfigError for others or a missing key.
    """
    config = config.get("vision_config", config)
    model_type = config.get("model_type", "")
    if model_type not in _VISION_READERS:
        raise ConfigError(
            f"encoder config has model_type ({model_type!r}), which the cost model does not know; "
            f"it knows {', '.join(sorted(_VISION_READERS))}"
        )
    return _VISION_READERS[model_type](config)


def _siglip(config: HFConfig) -> VisionSpec:
    hidden, intermediate, patches = _int(config, "hidden_size"), _int(config, "intermediate_size"), _num_patches(config)
    outside, unused = _patch_parameters(config) + hidden + patches * hidden + 2 * hidden, 2 * hidden
    if config.get("vision_use_head", True):
        attention, mlp = 4 * hidden * (hidden + 1), 2 * hidden * intermediate + intermediate + hidden
        head = hidden + attention + 2 * hidden + mlp  # probe, attention over the patches, norm, MLP
        outside, unused = outside + head, unused + head
    return _vision_spec(config, intermediate, num_prefix_tokens=0, outside_parameters=outside, unused_parameters=unused)


def _clip(config: HFConfig) -> VisionSpec:
    hidden = _int(config, "hidden_size")
    outside = _patch_parameters(config) + hidden + (_num_patches(config) + 1) * hidden + 4 * hidden
    return _vision_spec(
        config,
        _int(config, "intermediate_size"),
        num_prefix_tokens=1,
        outside_parameters=outside,
        unused_parameters=2 * hidden,
        quick_gelu=config.get("hidden_act", "quick_gelu") == "quick_gelu",
    )


def _dinov2(config: HFConfig) -> VisionSpec:
    hidden, gated = _int(config, "hidden_size"), bool(config.get("use_swiglu_ffn", False))
    intermediate = int(hidden * config.get("mlp_ratio", 4))
    if gated:
        intermediate = (int(intermediate * 2 / 3) + 7) // 8 * 8  # as Dinov2SwiGLUFFN rounds it
    num_prefix = 1 + config.get("num_register_tokens", 0)  # a plain dinov2 has none
    outside = _patch_parameters(config) + hidden + (num_prefix + _num_patches(config) + 1) * hidden + 2 * hidden
    mask = hidden * bool(config.get("use_mask_token", True))
    return _vision_spec(
        config,
        intermediate,
        num_prefix_tokens=num_prefix,
        outside_parameters=outside + mask,
        unused_parameters=2 * hidden + mask,
        gated_mlp=gated,
        qkv_bias=bool(config.get("qkv_bias", True)),
        layer_scale=True,
    )


def _vit(config: HFConfig) -> VisionSpec:
    hidden, pooled = _int(config, "hidden_size"), config.get("pooler_output_size") or _int(config, "hidden_size")
    outside = _patch_parameters(config) + hidden + hidden + (_num_patches(config) + 1) * hidden + 2 * hidden
    return _vision_spec(
        config,
        _int(config, "intermediate_size"),
        num_prefix_tokens=1,
        outside_parameters=outside + (hidden + 1) * pooled,
        unused_parameters=2 * hidden + (hidden + 1) * pooled,
        qkv_bias=bool(config.get("qkv_bias", True)),
    )


def _internvl(config: HFConfig) -> VisionSpec:
    hidden = _int(config, "hidden_size")
    positions = (_num_patches(config) + 1) * hidden * bool(config.get("use_absolute_position_embeddings", True))
    mask = hidden * bool(config.get("use_mask_token", False))
    norm = 2 * hidden * (not config.get("use_mean_pooling", True))
    outside = _patch_parameters(config) + hidden + hidden + positions + mask + norm
    return _vision_spec(
        config,
        _int(config, "intermediate_size"),
        num_prefix_tokens=1,
        outside_parameters=outside,
        unused_parameters=mask + norm,
        qkv_bias=bool(config.get("attention_bias", False)),
        layer_scale=True,
        rms_norm=config.get("norm_type", "layer_norm") == "rms_norm",
        qk_norm=bool(config.get("use_qk_norm", False)),
    )


def _qwen3_vl(config: HFConfig) -> VisionSpec:
    hidden, channels = _int(config, "hidden_size"), _int(config, "in_channels") * _int(config, "temporal_patch_size")
    patches = channels * _int(config, "patch_size") ** 2 * hidden + hidden
    return VisionSpec(
        num_layers=_int(config, "depth"),
        hidden_size=hidden,
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=_int(config, "num_heads"),
        patch_size=_int(config, "patch_size"),
        num_channels=channels,
        num_prefix_tokens=0,
        outside_parameters=patches + _int(config, "num_position_embeddings") * hidden,
        fused_qkv=True,
        rotary=True,
    )


def _vision_spec(config: HFConfig, intermediate_size: int, **traits: Any) -> VisionSpec:
    return VisionSpec(
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=_int(config, "hidden_size"),
        intermediate_size=intermediate_size,
        num_heads=_int(config, "num_attention_heads"),
        patch_size=_side(config, "patch_size"),
        num_channels=config.get("num_channels", 3),
        **traits,
    )


_VISION_READERS: dict[str, Callable[[HFConfig], VisionSpec]] = {
    "siglip_vision_model": _siglip,
    "clip_vision_model": _clip,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "vit": _vit,
    "internvl_vision": _internvl,
    "qwen3_vl_vision": _qwen3_vl,
}


def _int(config: HFConfig, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"model config ({config.get('model_type', 'no model_type')}) has {key} = {value!r}, but the cost model "
            "needs an integer; write the key out: only transformers knows its default"
        )
    return value


def _side(config: HFConfig, key: str) -> int:
    """The side of a square, which some types have as two equal numbers."""
    value = config.get(key)
    if isinstance(value, list | tuple) and len(set(value)) == 1:
        return _int({**config, key: value[0]}, key)
    return _int(config, key)


def _num_kv_heads(config: HFConfig, num_heads: int) -> int:
    if config.get("model_type") in _OWN_NUM_KV_HEADS:
        return _int(config, "num_key_value_heads")  # a missing key would not mean num_heads there
    return config.get("num_key_value_heads") or num_heads


def _head_dim(config: HFConfig, hidden_size: int, num_heads: int) -> int:
    if config.get("model_type") in _LIKE_QWEN3:
        return _int(config, "head_dim")
    return config.get("head_dim") or hidden_size // num_heads


def _num_patches(config: HFConfig) -> int:
    return (_side(config, "image_size") // _side(config, "patch_size")) ** 2


def _patch_parameters(config: HFConfig) -> int:
    return int(config.get("num_channels", 3)) * _side(config, "patch_size") ** 2 * _int(config, "hidden_size")
