"""FLOPs against what torch counts in real models, and the conventions that differ from it."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from flowtrain.costs.flops import (
    Flops,
    backbone_forward_flops,
    backbone_training_flops,
    connector_forward_flops,
    connector_training_flops,
    encoder_forward_flops,
    unit_flops,
)
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec
from flowtrain.types import PartSize, SampleRef, SizedSample

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "attn_implementation": "eager",  # so that every product is a matmul that torch counts
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "attn_implementation": "eager",
}
LENGTH = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT))


def expected_by_torch(flops: float, spec: Any, passes: int) -> float:
    """Ours as torch counts: both triangles of the attention matrix."""
    return flops + passes * 2 * spec.num_layers * spec.num_heads * spec.head_dim * LENGTH**2


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Phi3", "Starcoder2"])
def test_backbone_forward(family: str) -> None:
    values = TEXT | ({"pad_token_id": 0} if family == "Phi3" else {})
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values))
    spec = from_hf_text_config(model.config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    assert counter.get_total_flops() == expected_by_torch(backbone_forward_flops(spec, [LENGTH]), spec, passes=1)


@pytest.mark.parametrize("freeze", [(), ("backbone",), ("connector",)])
def test_backbone_training(freeze: tuple[str, ...]) -> None:
    model = qwen3()
    model.requires_grad_("backbone" not in freeze)
    spec = from_hf_text_config(model.config.to_dict())
    with FlopCounterMode(display=False) as counter:
        embeddings = torch.zeros(1, LENGTH, 32, requires_grad=True)  # as merged from text and connector
        model(inputs_embeds=embeddings).logits.sum().backward()
    assert counter.get_total_flops() == expected_by_torch(
        backbone_training_flops(spec, [LENGTH], freeze), spec, passes=3
    )


def test_with_everything_frozen_there_is_no_backward() -> None:
    spec, freeze = from_hf_text_config(qwen3().config.to_dict()), ("connector", "backbone")
    assert backbone_training_flops(spec, [5, 7], freeze) == backbone_forward_flops(spec, [5, 7])


def test_attention_is_per_sub_sequence() -> None:
    spec = from_hf_text_config(qwen3().config.to_dict())
    packed, alone = backbone_training_flops(spec, [5, 7]), [backbone_training_flops(spec, [n]) for n in (5, 7)]
    assert packed == sum(alone)
    cross_pairs = 5 * 7  # what one sequence of 12 would add: (144 - 25 - 49) / 2 pairs below the diagonal
    assert backbone_training_flops(spec, [12]) - packed == 3 * 4 * cross_pairs * 4 * 16 * 2


@pytest.mark.parametrize("freeze", [(), ("connector",)])
def test_connector(freeze: tuple[str, ...]) -> None:
    spec = ConnectorSpec(feature_dim=10, hidden_size=20, out_dim=30)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.GELU(), torch.nn.Linear(20, 30))
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        out = model.requires_grad_(not freeze)(torch.zeros(7, 10))
        if not freeze:
            out.sum().backward()
    assert counter.get_total_flops() == connector_training_flops(spec, 7, freeze)
    assert connector_forward_flops(spec, 7) == connector_training_flops(spec, 7, ("connector",))


@pytest.mark.parametrize(
    ("config_name", "model_name", "extra"),
    [
        ("SiglipVisionConfig", "SiglipVisionModel", {"vision_use_head": False}),
        ("CLIPVisionConfig", "CLIPVisionModel", {}),
        ("Dinov2Config", "Dinov2Model", {"mlp_ratio": 2}),
        ("Dinov2Config", "Dinov2Model", {"mlp_ratio": 2, "use_swiglu_ffn": True}),
        ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", {"mlp_ratio": 2}),
    ],
)
def test_encoder(config_name: str, model_name: str, extra: dict[str, Any]) -> None:
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**VISION | extra))
    spec = from_hf_vision_config(model.config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(pixel_values=torch.zeros(3, 3, 28, 28))
    assert counter.get_total_flops() == encoder_forward_flops(spec, [16, 16, 16])


def test_flops_are_the_sum_of_their_modules() -> None:
    vision = from_hf_vision_config(transformers.CLIPVisionConfig(**VISION).to_dict())
    text = from_hf_text_config(transformers.Qwen3Config(**TEXT).to_dict())
    spec = ModelSpec({"vit": vision}, ConnectorSpec(32, 32, 32), text)
    parts = (PartSize("text", 1, 0, 20, 160), PartSize("vit", 2, 9, 9, 1152))
    sample = SizedSample(SampleRef(0, 0, 0, 0), 20, 9, 5, parts)
    flops = unit_flops(spec, [sample])
    assert flops.encoders == encoder_forward_flops(vision, [5, 4])
    assert flops.connector == connector_training_flops(spec.connector, 9)
    assert flops.backbone == backbone_training_flops(text, [20])
    assert flops.total == flops.encoders + flops.connector + flops.backbone
    text_only = SizedSample(SampleRef(1, 0, 1, 0), 30, 0, 5, parts[:1])
    assert unit_flops(spec, [text_only]) == Flops(0, 0, backbone_training_flops(text, [30]))
    assert unit_flops(spec, []) == Flops(0, 0, 0)


def test_a_unit_is_the_sum_of_its_samples() -> None:
    vision = from_hf_vision_config(transformers.CLIPVisionConfig(**VISION).to_dict())
    text = from_hf_text_config(transformers.Qwen3Config(**TEXT).to_dict())
    spec = ModelSpec({"vit": vision}, ConnectorSpec(32, 32, 32), text)
    samples = [
        SizedSample(SampleRef(k, 0, k, 0), 20 + k, 9, 5, (PartSize("vit", 1 + k % 3, 9 + k % 2, 9, 1152),))
        for k in range(12)
    ]
    alone = [unit_flops(spec, [sample], freeze=["backbone"]) for sample in samples]
    together = unit_flops(spec, samples, freeze=["backbone"])
    for module in ("encoders", "connector", "backbone", "total"):
        assert getattr(together, module) == pytest.approx(sum(getattr(flops, module) for flops in alone))
