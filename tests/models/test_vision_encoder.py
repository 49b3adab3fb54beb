"""Encoder features against HF's own towers and HF's own Llava."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPModel,
    LlavaForConditionalGeneration,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import family_from_config

SIZES = [(50, 20), (13, 61), (28, 28)]


def encoder_config(path, tower, **settings):
    return {"vision": {"path": str(path), **settings}} if path else {"vision": {"config": tower, **settings}}


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
@pytest.mark.parametrize("feature_layer", [-1, -2, 0, 1])
def test_features_equal_hf_hidden_states(make_config, tower_configs, noise, tower, feature_layer):
    family = family_from_config(
        make_config(encoders=encoder_config(None, tower_configs[tower], feature_layer=feature_layer))
    )
    pixels = [family.preprocess("vision", noise(*size)) for size in SIZES]
    features = family.load_encoder("vision").encode(pixels)
    batch = torch.from_numpy(np.stack(pixels))
    with torch.no_grad():
        model: LlavaForConditionalGeneration = family.load_joined().eval()
        hidden = model.model.vision_tower(batch, output_hidden_states=True).hidden_states[feature_layer]
        llava = model.get_image_features(batch, return_dict=True).pooler_output
        projected = family.load_backbone().connector(torch.stack(features))
    assert torch.equal(torch.stack(features), hidden if tower == "siglip" else hidden[:, 1:])
    assert torch.equal(projected, torch.stack(llava))


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2"])
def test_layers_past_the_chosen_one_are_not_computed(make_config, tower_configs, noise, tower):
    family = family_from_config(make_config(encoders=encoder_config(None, tower_configs[tower], feature_layer=-2)))
    encoder = family.load_encoder("vision")
    stack = getattr(encoder.tower.encoder, "layers", None) or encoder.tower.encoder.layer
    assert len(stack) == 1
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize("whole_class", [CLIPModel, SiglipModel])
def test_vision_part_of_a_whole_checkpoint(make_config, tower_configs, noise, tmp_path, whole_class):
    kind, config_class = ("clip", CLIPConfig) if whole_class is CLIPModel else ("siglip", SiglipConfig)
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = whole_class(config_class(vision_config=tower_configs[kind], text_config={**text, "vocab_size": 50}))
    whole.save_pretrained(tmp_path)
    family = family_from_config(make_config(encoders=encoder_config(tmp_path, None, feature_layer=-1)))
    pixels = [family.preprocess("vision", noise(*size)) for size in SIZES]
    with torch.no_grad():
        states = whole.vision_model.eval()(torch.from_numpy(np.stack(pixels)), output_hidden_states=True).hidden_states
    features = torch.stack(family.load_encoder("vision").encode(pixels))
    assert torch.equal(features, states[-1][:, 1:] if kind == "clip" else states[-1])


def test_tower_of_its_own_directory_in_bf16(make_config, noise, tmp_path, caplog):
    config = family_from_config(make_config()).vision_config
    tower = AutoModel.from_config(config).eval()
    tower.save_pretrained(tmp_path)
    family = family_from_config(
        make_config(model={"dtype": "bfloat16"}, encoders=encoder_config(tmp_path, None, feature_layer=-1))
    )
    family_from_config(make_config(encoders=encoder_config(tmp_path, None, feature_layer=-1)))
    assert caplog.text.count("usual image processor") == 1, "a start builds a family several times"
    pixels = family.preprocess("vision", noise(30, 40))
    (features,) = family.load_encoder("vision").encode([pixels])
    with torch.no_grad():
        inputs = torch.from_numpy(pixels)[None].to(torch.bfloat16)
        expected = tower.to(torch.bfloat16)(inputs, output_hidden_states=True).hidden_states[-1]
    assert features.dtype == torch.bfloat16 and torch.equal(features, expected[0])
    assert features[0].numel() * features.element_size() == family.row_nbytes("vision")


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "vit"])
def test_variable_sizes_are_forwarded_together_and_keep_their_order(make_config, tower_configs, noise, tower):
    family = family_from_config(
        make_config(
            model={"family": "variable_llava"},
            encoders=encoder_config(None, tower_configs[tower], image_processor={"size": {"longest_edge": 56}}),
        )
    )
    encoder = family.load_encoder("vision")
    sizes = [(50, 20), (13, 61), (28, 28), (52, 30), (200, 200), (60, 13)]
    pixels = [family.preprocess("vision", noise(*size, seed)) for seed, size in enumerate(sizes)]
    assert len({pixel.shape for pixel in pixels}) == 5
    together = encoder.encode(pixels)
    for pixel, features in zip(pixels, together, strict=True):
        (alone,) = encoder.encode([pixel])
        assert features.shape == alone.shape and torch.allclose(features, alone, atol=1e-5)
    again = encoder.encode(pixels)
    assert all(torch.equal(first, second) for first, second in zip(together, again, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature_layer", [-1, -2, 0])
@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit"])
def test_images_of_all_sizes_are_one_forward_and_equal_hf_one_by_one(
    make_config, tower_configs, noise, tower, feature_layer, dtype
):
    settings = {"image_processor": {"size": {"longest_edge": 56}}, "feature_layer": feature_layer}
    family = family_from_config(
        make_config(
            model={"family": "variable_llava", "dtype": dtype},
            encoders=encoder_config(None, tower_configs[tower], **settings),
        )
    )
    sizes = [(50, 20), (13, 61), (28, 28), (52, 30), (28, 28), (200, 200), (60, 13)]
    pixels = [family.preprocess("vision", noise(*size, seed)) for seed, size in enumerate(sizes)]
    encoder, calls = family.load_encoder("vision"), []
    for layer in encoder.stage.layers:
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    found = encoder.encode(pixels)
    assert calls == encoder.stage.layers
    plain = family._load_tower().to(getattr(torch, dtype)).eval()
    options = {} if "dinov2" in plain.config.model_type else {"interpolate_pos_encoding": True}
    for image, features in zip(pixels, found, strict=True):
        batch = torch.from_numpy(image)[None].to(plain.dtype)
        with torch.no_grad():
            expected = plain(batch, output_hidden_states=True, **options).hidden_states[feature_layer][0]
        expected = expected if tower == "siglip" else expected[1:]
        assert features.shape == expected.shape and features.dtype == expected.dtype
        assert (features - expected).norm() < (1e-5 if dtype == "float32" else 0.02) * expected.norm()


def test_image_processor_of_the_checkpoint_is_taken(make_config, noise, tmp_path):
    family = family_from_config(make_config())
    AutoModel.from_config(family.vision_config).save_pretrained(tmp_path)
    settings = {"size": {"height": 28, "width": 28}, "image_mean": [0.3, 0.3, 0.3]}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "SiglipImageProcessor", **settings})
    )
    own = family_from_config(make_config(encoders=encoder_config(tmp_path, None)))
    assert type(own.image_processor) is SiglipImageProcessorPil and own.image_processor.image_mean == (0.3, 0.3, 0.3)
    (tmp_path / "preprocessor_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="no image processor can be read"):
        family_from_config(make_config(encoders=encoder_config(tmp_path, None)))


def test_nothing_to_encode(make_config):
    assert family_from_config(make_config()).load_encoder("vision").encode([]) == []
