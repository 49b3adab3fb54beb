"""Layouts against reality, tokenizers, and what a family refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, SiglipImageProcessorPil

from flowtrain.errors import ConfigError
from flowtrain.models.families.registry import family_from_config

ODD_SIZES = [(1, 1), (3, 200), (200, 3), (28, 28), (29, 27), (640, 480), (13, 61)]


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "vit", "uneven"])
@pytest.mark.parametrize("name", ["llava", "variable_llava"])
@pytest.mark.parametrize("select", ["default", "full", None])
def test_layout_agrees_with_what_the_encoder_gives(make_config, tower_configs, noise, tower, name, select):
    family = family_from_config(
        make_config(
            model={"family": name}, encoders={"vision": {"config": tower_configs[tower], "feature_select": select}}
        )
    )
    pixels = [family.preprocess("vision", noise(*size)) for size in ODD_SIZES]
    assert all(pixel.dtype == np.float32 and pixel.shape[0] == 3 for pixel in pixels)
    for size, pixel, rows in zip(ODD_SIZES, pixels, family.load_encoder("vision").encode(pixels), strict=True):
        layout = family.image_layout("vision", *size)
        assert rows.shape == (layout.num_rows, family.feature_dim("vision")), size
        assert layout.num_patches == (pixel.shape[1] // 14) * (pixel.shape[2] // 14)
        assert layout.num_tokens == layout.num_rows


def test_class_token_is_dropped_by_default(make_config, tower_configs):
    def num_rows(tower, select=None):
        encoders = {"vision": {"config": tower_configs[tower], "feature_select": select}}
        return family_from_config(make_config(encoders=encoders)).image_layout("vision", 9, 9).num_rows

    assert [num_rows(tower) for tower in ("siglip", "clip", "dinov2", "registers")] == [4, 4, 4, 7]
    assert num_rows("clip", "full") == 5


def test_an_aspect_ratio_that_would_be_resized_to_too_many_pixels(make_config, tower_configs):
    data = {"sources": [{"path": "unused.parquet"}], "max_image_pixels": 28 * 28 * 100}
    clip, siglip = (
        family_from_config(make_config(data=data, encoders={"vision": {"config": tower_configs[tower]}}))
        for tower in ("clip", "siglip")
    )
    assert clip.image_layout("vision", 2, 200) == clip.image_layout("vision", 200, 2)
    with pytest.raises(ValueError, match=r"image_processor.size .* 79184 pixels.* data.max_image_pixels \(78400\)"):
        clip.image_layout("vision", 1, 101)
    assert siglip.image_layout("vision", 1, 101), "this processor resizes both sides"


@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_variable_layout_keeps_aspect_within_the_maximum(variable_family, width, height):
    new_width, new_height = variable_family.resized_size(width, height)
    assert new_width % 14 == 0 and new_height % 14 == 0
    assert min(new_width, new_height) >= 14 and max(new_width, new_height) <= 112
    scale = min(1.0, 112 / max(width, height))
    for new, old in ((new_width, width), (new_height, height)):
        assert abs(new - old * scale) <= 7 or new == 14
    layout = variable_family.image_layout("vision", width, height)
    assert layout.num_patches == (new_width // 14) * (new_height // 14)


@pytest.fixture(scope="module")
def variable_family(make_config, tower_configs):
    encoder = {"config": tower_configs["siglip"], "image_processor": {"size": {"longest_edge": 120}}}
    return family_from_config(make_config(model={"family": "variable_llava"}, encoders={"vision": encoder}))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "LA", "1"])
@pytest.mark.parametrize("name", ["llava", "variable_llava"])
def test_any_image_mode_is_taken(make_config, noise, mode, name):
    family = family_from_config(make_config(model={"family": name}))
    assert family.preprocess("vision", noise(30, 20).convert("RGB").convert(mode)).shape[0] == 3


def test_pixels_are_hf_processors(make_config, noise, tmp_path, tower_configs):
    encoder = {
        "config": tower_configs["siglip"],
        "image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 1.0, 1.0]},
    }
    family = family_from_config(make_config(encoders={"vision": encoder}))
    hf = SiglipImageProcessorPil(
        size={"height": 28, "width": 28}, image_mean=[0.1, 0.2, 0.3], image_std=[1.0, 1.0, 1.0]
    )
    image = noise(50, 31)
    expected = hf(images=image, return_tensors="np")["pixel_values"][0]
    assert np.array_equal(family.preprocess("vision", image), expected)


def test_image_token_is_added_once(make_config, tokenizer_path, tmp_path):
    plain = AutoTokenizer.from_pretrained(tokenizer_path)
    family = family_from_config(make_config())
    assert family.image_token_id == len(plain) == 40
    assert family.tokenizer.encode("w1 <image> w2", add_special_tokens=False)[1] == 40
    family.tokenizer.save_pretrained(tmp_path)
    again = family_from_config(make_config(model={"tokenizer": str(tmp_path)}))
    assert again.image_token_id == 40 and len(again.tokenizer) == 41


def test_chat_template_may_be_given(make_config, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    for value in (template, str(file)):
        assert family_from_config(make_config(model={"chat_template": value})).tokenizer.chat_template == template
    with pytest.raises(ConfigError, match="neither a template nor"):
        family_from_config(make_config(model={"chat_template": "nowhere.jinja"}))


def test_pretrained_vocabulary_grows_for_the_image_token(make_config, tokenizer_path, tmp_path):
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(tmp_path)
    make = lambda: family_from_config(  # noqa: E731
        make_config(model={"tokenizer": None}, backbone={"path": str(tmp_path)})
    )
    family = make()
    assert family.text_config.vocab_size == 64
    first, second = family.load_backbone().language_model, make().load_backbone().language_model
    for embedding in ("get_input_embeddings", "get_output_embeddings"):
        weight = getattr(first, embedding)().weight
        assert torch.equal(weight[:40], getattr(model, embedding)().weight)
        assert weight.shape[0] == 64 and torch.equal(weight, getattr(second, embedding)().weight)


def test_ids_that_leave_some_out_need_as_large_a_vocabulary(make_config, tokenizer_path, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["w31"] = 70
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"vocab_size \(64\) is smaller than the tokenizer \(7[12] tokens"):
        family_from_config(make_config(model={"tokenizer": str(tmp_path)}))


SMALL_LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"backbone": {"config": {**SMALL_LLAMA, "vocab_size": 40}}}, r"vocab_size \(40\).*41 tokens"),
        ({"backbone": {"config": {**SMALL_LLAMA, "hiden_size": 1}}}, "hiden_size.*did you mean 'hidden_size'"),
        ({"backbone": {"config": {"model_type": "lama"}}}, "backbone.config.model_type: .*'lama'"),
        ({"backbone": {"config": {"hidden_size": 1}}}, "backbone.config has no model_type"),
        ({"backbone": {"config": {"model_type": "gpt2"}}}, "'gpt2' has no base_model_tp_plan"),
        ({"backbone": {"path": "no/such/dir/at/all"}}, "backbone.path.*'no/such/dir/at/all'"),
        ({"backbone": {"config": {"model_type": "qwen3_next"}}}, "linear_attention"),
        ({"backbone": {"config": {"model_type": "gemma2"}}}, "final_logit_softcapping"),
        (
            {"backbone": {"config": {**SMALL_LLAMA, "rms_norm_eps": "x"}}},
            "(?s)backbone.config: llama refuses it.*rms_norm_eps",
        ),
        (
            {"backbone": {"config": {**SMALL_LLAMA, "num_key_value_heads": 3}}},
            r"num_key_value_heads \(3\) does not divide num_attention_heads \(2\)",
        ),
        ({"connector": {"hidden_act": "gelo"}}, "hidden_act.*'gelo'.*did you mean"),
        ({"model": {"tokenizer": None}}, "model.tokenizer is not given"),
        ({"model": {"tokenizer": "no/such/tokenizer/here"}}, "no tokenizer can be read from"),
        ({"model": {"path": "no/such/model/here"}, "encoders": {"vision": {}}, "backbone": {}}, "model.path.*no/such"),
    ],
)
def test_refusals_name_key_and_values(make_config, sections, message):
    with pytest.raises(ConfigError, match=message):
        family_from_config(make_config(**sections))


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ({"feature_layer": 3}, r"encoders.vision.feature_layer \(3\).*-3 to 2"),
        ({"image_processor": {"image_men": [0, 0, 0]}}, "image_men.*did you mean 'image_mean'"),
        ({"image_processor": {"size": {"height": 14, "width": 42}}}, "14x42.*28x28"),
        ({"image_processor": {"size": {"shortest_edge": 28}}}, "varying size.*variable_llava"),
        (
            {"config": {"model_type": "vit", "hidden_size": 30, "num_attention_heads": 4}},
            r"encoders.vision.config: num_attention_heads \(4\) does not divide hidden_size \(30\)",
        ),
        ({"config": {"model_type": "resnet"}}, "encoders.vision: 'resnet' is no vision tower"),
    ],
)
def test_encoder_refusals(make_config, tower_configs, encoder, message):
    with pytest.raises(ConfigError, match=message):
        family_from_config(make_config(encoders={"vision": {"config": tower_configs["siglip"], **encoder}}))


def test_wrong_weights_are_refused(make_config, tower_configs, tmp_path):
    LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2)).save_pretrained(tmp_path)  # fmt: skip
    settings_file = tmp_path / "config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "num_hidden_layers": 2}))
    family = family_from_config(make_config(backbone={"path": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"backbone.path: 9 weights of LlamaForCausalLM are missing in .*layers.1"):
        family.load_backbone()


def test_building_a_family_loads_no_model_code(make_config):
    code = (
        "import sys; from flowtrain.config.run import RunConfig;"
        "from flowtrain.models.families.registry import family_from_config;"
        f"family_from_config(RunConfig.model_validate_json({make_config().model_dump_json()!r}));"
        "print([name for name in sys.modules if 'modeling_qwen3' in name or 'modeling_siglip' in name])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
