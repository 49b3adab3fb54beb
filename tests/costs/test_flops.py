"""FLOPs against what torch counts in real models, and the conventions that differ from it."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flowtrain.costs.flops import SampleFlops, backbone_training_flops, sample_flops
from flowtrain.costs.hf_config import from_hf_text_config, from_hf_vision_config
from flowtrain.costs.model_spec import ConnectorSpec, ModelSpec, VisionSpec
from flowtrain.models.loss import IGNORE_INDEX, weighted_nll_sum

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
ENCODERS, ALL_FROZEN = ("encoders",), ("encoders", "connector", "backbone")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT))


def expected_by_torch(flops: float, spec: Any, passes: int) -> float:
    """Ours as torch counts: both triangles of the attention matrix."""
    return flops + passes * 2 * spec.num_layers * spec.num_heads * spec.head_dim * LENGTH**2


@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Phi3", "Starcoder2"])
def test_with_everything_frozen_a_backbone_only_runs_forward(family: str) -> None:
    values = TEXT | ({"pad_token_id": 0} if family == "Phi3" else {})
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**values))
    spec = from_hf_text_config(model.config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.long))
    forward = backbone_training_flops(spec, [LENGTH], ALL_FROZEN)
    assert counter.get_total_flops() == expected_by_torch(forward, spec, passes=1)


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


def test_attention_is_per_sub_sequence() -> None:
    spec = from_hf_text_config(qwen3().config.to_dict())
    packed, alone = backbone_training_flops(spec, [5, 7]), [backbone_training_flops(spec, [n]) for n in (5, 7)]
    assert packed == sum(alone)
    cross_pairs = 5 * 7  # what one sequence of 12 would add: (144 - 25 - 49) / 2 pairs below the diagonal
    assert backbone_training_flops(spec, [12]) - packed == 3 * 4 * cross_pairs * 4 * 16 * 2


@pytest.mark.parametrize("freeze", [(), ENCODERS, ("connector",), ("connector", "encoders")])
def test_connector(freeze: tuple[str, ...]) -> None:
    spec = ConnectorSpec(feature_dim=10, hidden_size=20, out_dim=30)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.GELU(), torch.nn.Linear(20, 30))
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        features = torch.zeros(7, 10, requires_grad="encoders" not in freeze)
        out = model.requires_grad_("connector" not in freeze)(features)
        if out.requires_grad:
            out.sum().backward()
    assert counter.get_total_flops() == flops_of(ModelSpec({}, spec, MODEL.backbone), rows=7, freeze=freeze).connector


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
    assert counter.get_total_flops() == encoder_flops(spec, num_images=3, num_patches=3 * 16)
    with FlopCounterMode(display=False) as counter:
        model(pixel_values=torch.zeros(3, 3, 28, 28)).last_hidden_state.sum().backward()
    assert counter.get_total_flops() == encoder_flops(spec, num_images=3, num_patches=3 * 16, freeze=())


def test_the_head_counts_for_tokens_that_carry_loss() -> None:
    spec = from_hf_text_config(qwen3().config.to_dict())
    head = 2 * spec.hidden_size * spec.vocab_size
    for freeze, passes in (((), 3), (("backbone",), 2), (ALL_FROZEN, 1)):
        every, some = (backbone_training_flops(spec, [5, 7], freeze, targets) for targets in (None, 2))
        assert every - some == passes * 10 * head, freeze


@pytest.mark.parametrize("num_targets", [0, 1, 5])
def test_as_many_as_the_loss_really_computes(num_targets: int) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(12, 32, requires_grad=True), torch.nn.Linear(32, 64, bias=False)
    targets = torch.full((12,), IGNORE_INDEX)
    targets[3 : 3 + num_targets] = 7
    with FlopCounterMode(display=False) as counter:
        weighted_nll_sum(hidden, targets, torch.ones(12), head).backward()
    # One row even without targets: it keeps the collectives of all ranks in step, and is no model FLOPs.
    assert counter.get_total_flops() == 3 * 2 * 32 * 64 * max(1, num_targets)


MODEL = ModelSpec(
    {
        "vit": from_hf_vision_config(transformers.CLIPVisionConfig(**VISION).to_dict()),
        "dino": from_hf_vision_config(transformers.Dinov2Config(**VISION | {"mlp_ratio": 2}).to_dict()),
    },
    ConnectorSpec(32, 32, 32),
    from_hf_text_config(transformers.Qwen3Config(**TEXT).to_dict()),
)
part_lists = st.lists(st.tuples(st.integers(1, 5), st.integers(5, 60)), min_size=1, max_size=1) | st.just([])
sample_lists = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 50), st.integers(0, 100), part_lists, part_lists), max_size=9
)


@given(
    samples=sample_lists, freeze=st.sampled_from([(), ENCODERS, ("connector",), ("backbone", "encoders"), ALL_FROZEN])
)
def test_columns_say_what_single_samples_do(samples: list[Any], freeze: tuple[str, ...]) -> None:
    counted = sample_flops(
        MODEL,
        positions=column([10 * k for k in range(len(samples))]),
        lengths=column([sample[0] for sample in samples]),
        vision_lengths=column([sample[1] for sample in samples]),
        target_lengths=column([sample[2] for sample in samples]),
        images={
            name: tuple(column([sum(part[i] for part in sample[place]) for sample in samples]) for i in range(2))
            for name, place in (("vit", 3), ("dino", 4))
        },
        freeze=freeze,
    )
    for k, (length, rows, targets, vit, dino) in enumerate(samples):
        assert counted.backbone[k] == pytest.approx(backbone_training_flops(MODEL.backbone, [length], freeze, targets))
        assert counted.connector[k] == flops_of(MODEL, rows=rows, freeze=freeze).connector
        encoders = zip(("vit", "dino"), (vit, dino), strict=True)
        expected = [
            encoder_flops(MODEL.encoders[name], num_images=1, num_patches=image, freeze=freeze)
            for name, parts in encoders
            for part in parts
            for image in split(*part)
        ]
        assert counted.encoders[k] == pytest.approx(sum(expected))
    whole = counted.sum()
    assert whole.total == pytest.approx(sum(c.sum() for c in (counted.encoders, counted.connector, counted.backbone)))
    without = counted.sum(without={0, 40, 99})
    kept = [k for k in range(len(samples)) if k not in (0, 4)]
    assert without.backbone == pytest.approx(sum(counted.backbone[kept]))
    assert counted.sum(without=set()) == whole and counted.sum(without={7}) == whole


def test_unknown_encoders_are_refused() -> None:
    one = column([1])
    with pytest.raises(KeyError, match="sam"):
        sample_flops(
            MODEL, positions=one, lengths=one, vision_lengths=one, target_lengths=one, images={"sam": (one, one)}
        )


def flops_of(
    spec: ModelSpec, rows: int = 0, freeze: tuple[str, ...] = ENCODERS, images: dict[str, tuple[int, int]] | None = None
) -> SampleFlops:
    """FLOPs of one sample; images: by encoder, number of images and of patches."""
    one = column([1])
    return sample_flops(
        spec,
        positions=one,
        lengths=one,
        vision_lengths=column([rows]),
        target_lengths=one,
        images={name: tuple(column([each]) for each in part) for name, part in (images or {}).items()},
        freeze=freeze,
    )


def encoder_flops(spec: VisionSpec, num_images: int, num_patches: int, freeze: tuple[str, ...] = ENCODERS) -> float:
    """FLOPs of one tower over images of sizes as even as possible."""
    model = ModelSpec({"tower": spec}, MODEL.connector, MODEL.backbone)
    return float(flops_of(model, images={"tower": (num_images, num_patches)}, freeze=freeze).encoders[0])


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def split(num_images: int, num_patches: int) -> list[int]:
    """Patches of a sample's images, as even as possible."""
    return [num_patches // num_images + (k < num_patches % num_images) for k in range(num_images)]
