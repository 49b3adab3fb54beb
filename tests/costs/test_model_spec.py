"""Parameter counts of the specs against the models that transformers builds."""

from typing import Any

import pytest
import torch
import transformers

from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.errors import ConfigError

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def hf_model(config_name: str, model_name: str, values: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(transformers, model_name)(getattr(transformers, config_name)(**values))


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Mistral", {"head_dim": 16}),
    ],
)
def test_text_parameters(family: str, extra: dict[str, Any]) -> None:
    model = hf_model(f"{family}Config", f"{family}ForCausalLM", TEXT | extra)
    assert from_hf_text_config(model.config.to_dict()).num_parameters == numel(model)


@pytest.mark.parametrize(
    ("config_name", "model_name", "extra"),
    [
        ("SiglipVisionConfig", "SiglipVisionModel", {}),
        ("SiglipVisionConfig", "SiglipVisionModel", {"vision_use_head": False, "image_size": 42}),
        ("CLIPVisionConfig", "CLIPVisionModel", {}),
        ("Dinov2Config", "Dinov2Model", {"mlp_ratio": 2}),
        ("Dinov2Config", "Dinov2Model", {"use_swiglu_ffn": True, "qkv_bias": False, "use_mask_token": False}),
        ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", {"num_register_tokens": 3}),
        ("ViTConfig", "ViTModel", {}),
        ("ViTConfig", "ViTModel", {"qkv_bias": False, "pooler_output_size": 20}),
        ("InternVLVisionConfig", "InternVLVisionModel", {}),
        ("InternVLVisionConfig", "InternVLVisionModel", {"use_qk_norm": True, "norm_type": "rms_norm"}),
        ("InternVLVisionConfig", "InternVLVisionModel", {"use_mask_token": True, "use_mean_pooling": False}),
    ],
)
def test_vision_parameters(config_name: str, model_name: str, extra: dict[str, Any]) -> None:
    values = VISION | extra
    if config_name.startswith("Dinov2"):
        values.pop("intermediate_size")
    model = hf_model(config_name, model_name, values)
    assert from_hf_vision_config(model.config.to_dict()).num_parameters == numel(model)


def test_published_size_of_qwen3_8b() -> None:
    spec = from_hf_text_config(
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
    )
    assert spec.num_parameters == 8_190_735_360  # as counted from the published checkpoint


def test_a_whole_model_is_the_sum_of_its_modules() -> None:
    llava = hf_model(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "vision_config": transformers.CLIPVisionConfig(**VISION),
            "text_config": transformers.LlamaConfig(**TEXT | {"hidden_size": 24}),
        },
    )
    spec = ModelSpec(
        {"vit": from_hf_vision_config(llava.config.vision_config.to_dict())},
        ConnectorSpec(feature_dim=32, hidden_size=24, out_dim=24),
        from_hf_text_config(llava.config.text_config.to_dict()),
    )
    assert spec.num_parameters == numel(llava)


def test_a_whole_internvl_is_the_sum_of_its_modules() -> None:
    vision, text = (
        transformers.InternVLVisionConfig(**VISION),
        transformers.Qwen2Config(**TEXT | {"hidden_size": 24, "tie_word_embeddings": False}),
    )
    whole = hf_model(
        "InternVLConfig",
        "InternVLForConditionalGeneration",
        {"vision_config": vision, "text_config": text, "tie_word_embeddings": False},
    )
    spec = ModelSpec(
        {"vit": from_hf_vision_config(vision.to_dict())},
        ConnectorSpec(feature_dim=4 * 32, hidden_size=24, out_dim=24, norm=True),
        from_hf_text_config(text.to_dict()),
    )
    assert spec.num_parameters == numel(whole)


def test_vision_config_inside_a_config_of_both_towers() -> None:
    inner = transformers.SiglipVisionConfig(**VISION).to_dict()
    assert from_hf_vision_config({"model_type": "siglip", "vision_config": inner}) == from_hf_vision_config(inner)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (TEXT | {"model_type": "llama", "hidden_size": None}, "hidden_size = None"),
        (TEXT | {"model_type": "qwen3"}, "head_dim = None.*write the key out"),
        (TEXT | {"model_type": "qwen3", "num_key_value_heads": None}, "num_key_value_heads = None"),
        (TEXT | {"model_type": "qwen3_moe", "num_experts": 128}, r"num_experts \(128\).*dense"),
    ],
)
def test_text_config_that_cannot_be_counted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf_text_config(values)


def test_unknown_vision_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'swin'.*clip_vision_model, dinov2, .*siglip_vision_model, vit"):
        from_hf_vision_config({"model_type": "swin"})
