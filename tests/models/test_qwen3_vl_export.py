"""What is exported of Qwen3-VL loads in stock transformers, computes the same, and is a valid start again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3VLForConditionalGeneration,
)
from transformers.utils import logging

from flowtrain.config.run import RunConfig
from flowtrain.errors import ConfigError
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.registry import family_from_config
from tests.models.test_qwen3_vl import IMAGES, config_of, pack
from tests.qwen3_vl import TEXT, stock_images, stock_inputs


@pytest.fixture
def make(make_config: Any) -> Any:
    """Build a tiny family; arguments as of ``config_of``."""
    return lambda sections=None, **encoder: family_from_config(config_of(make_config, sections, **encoder))


def trained_state(family: Qwen3VLFamily) -> Any:
    backbone = family.load_backbone()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.01)
    return backbone


def whole(config: RunConfig, path: Path) -> RunConfig:
    """The same run from a whole checkpoint."""
    values = config.model_dump()
    values["model"] |= {"path": str(path), "tokenizer": None}
    for section in (values["encoders"]["vision"], values["backbone"]):
        section["config"] = None
    values["encoders"]["vision"]["image_processor"] = {}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("freeze", [(), ("connector",)])
def test_an_export_loads_in_stock_transformers(
    make: Any, noise: Any, sample_of: Any, tmp_path: Path, without_videos: None, tied: bool, freeze: tuple[str, ...]
) -> None:
    family = make({"model": {"freeze": freeze}, "backbone": {"config": {**TEXT, "tie_word_embeddings": tied}}})
    backbone = trained_state(family)
    family.export(backbone.state_dict(), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert isinstance(model, Qwen3VLForConditionalGeneration) and model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied

    processor = AutoProcessor.from_pretrained(tmp_path)
    images = [noise(100, 30), noise(20, 20, 1)]
    framed = f"<|vision_start|>{processor.image_token}<|vision_end|>"
    chat = [{"role": "user", "content": f"{framed} w1 {framed} w2"}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=images, text=text, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], stock_images()(images, return_tensors="pt")["pixel_values"])
    num_tokens = sum(family.image_layout("vision", *image.size).num_tokens for image in images)
    assert int((inputs["input_ids"] == family.image_token_id).sum()) == num_tokens
    with torch.no_grad():
        joined = family.load_joined(backbone.state_dict()).eval()
        assert torch.equal(model(**inputs).logits, joined(**inputs).logits)
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]

    chosen = [sample_of(family, IMAGES[:2], 9), sample_of(family, [], 12)]
    with torch.no_grad():
        ours, theirs = backbone(**pack(family, chosen)), 0.0
        for sample in chosen:
            ids = torch.tensor([sample.input_ids])
            given = stock_inputs(sample.images, ids, family.image_token_id)
            mean = model(input_ids=ids, labels=torch.tensor([sample.labels]), **given).loss
            theirs += mean.item() * sum(label != -100 for label in sample.labels[1:])
    assert ours.item() == pytest.approx(theirs, rel=1e-6)


def test_an_export_names_the_processor_with_both_halves(make: Any, tmp_path: Path) -> None:
    family = make()
    family.export(family.load_backbone().state_dict(), tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["processor_class"] == "Qwen3VLProcessor"
    assert settings["image_processor"]["image_processor_type"] == "Qwen2VLImageProcessor"
    video = settings["video_processor"]
    assert video["video_processor_type"] == "Qwen3VLVideoProcessor" and video["patch_size"] == 4

    settings["video_processor"]["max_frames"] = 5
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    again = family_from_config(whole(family.config, tmp_path))
    again.export(again.load_backbone().state_dict(), tmp_path / "again")
    passed_on = json.loads((tmp_path / "again" / "processor_config.json").read_text())
    assert passed_on["video_processor"] == settings["video_processor"], "a start's settings stay"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("freeze", [(), ("connector",), ("connector", "backbone")])
def test_a_hugging_face_checkpoint_comes_out_as_it_went_in(
    make: Any, noise: Any, tmp_path: Path, tied: bool, freeze: tuple[str, ...]
) -> None:
    """Zero steps."""
    family = make({"backbone": {"config": {**TEXT, "tie_word_embeddings": tied}}})
    start, export = tmp_path / "start", tmp_path / "export"
    family.export(trained_state(family).state_dict(), start)
    model = AutoModelForImageTextToText.from_pretrained(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    model.save_pretrained(start)
    config = whole(family.config, start)
    config = config.model_copy(update={"model": config.model.model_copy(update={"freeze": freeze})})
    again = family_from_config(config)
    again.export(again.load_backbone().state_dict(), export)
    found, expected = AutoModelForImageTextToText.from_pretrained(export).state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    for size in IMAGES:
        assert again.image_layout("vision", *size) == family.image_layout("vision", *size)
        assert np.array_equal(again.preprocess("vision", noise(*size)), family.preprocess("vision", noise(*size)))


def test_an_export_is_what_hugging_face_writes_of_the_whole_model(make: Any, tmp_path: Path) -> None:
    family = make()
    state = trained_state(family).state_dict()
    family.export(state, tmp_path / "ours")
    family.load_joined(state).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


def test_a_trained_tower_is_exported(make: Any, tmp_path: Path) -> None:
    family = make({"mode": "monolithic"}, trainable=True)
    shapes = {name: tensor.shape for name, tensor in family.encoder_skeleton("vision").state_dict().items()}
    trained = {f"encoders.vision.{name}": torch.rand(shape) for name, shape in shapes.items()}
    state = trained_state(family).state_dict()
    family.export(state | trained, tmp_path)
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path).model.visual.state_dict()
    expected = {name.removeprefix("encoders.vision.tower."): tensor for name, tensor in trained.items()}
    expected |= {n.removeprefix("connector."): t for n, t in state.items() if n.startswith("connector.")}
    assert exported.keys() == expected.keys(), "tower and mergers are all of HF's tower"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())


def test_another_image_token_than_the_checkpoints_is_refused(make: Any, tmp_path: Path) -> None:
    family = make()
    family.export(family.load_backbone().state_dict(), tmp_path)
    config = whole(family.config, tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"image_token": "<picture>"})})
    said = r"'<picture>', and .* expands the tokenizer's '<\|image_pad\|>'; leave the key out"
    with pytest.raises(ConfigError, match=said):
        family_from_config(config)


def test_weights_of_a_checkpoint_are_loaded_without_a_progress_bar(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = make()
    family.export(family.load_backbone().state_dict(), tmp_path)
    logging.enable_progress_bar()  # as Hugging Face has it; a command that ran in this process has switched it off
    capsys.readouterr()
    family_from_config(whole(family.config, tmp_path)).load_encoder("vision")
    assert "Loading" not in capsys.readouterr().err and logging.is_progress_bar_enabled()
    AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert "Loading" in capsys.readouterr().err, "Hugging Face's own call has one"


def test_weights_come_tensor_by_tensor_from_a_checkpoint(make: Any, tmp_path: Path) -> None:
    """As ``load_encoder`` and ``load_backbone`` have them."""
    family = make()
    family.export(trained_state(family).state_dict(), tmp_path)
    again = family_from_config(whole(family.config, tmp_path))
    stage, weights = again.load_encoder("vision").stage, again.encoder_weights("vision")
    for name, parameter in stage.named_parameters():
        index = tuple(slice(0, size) for size in parameter.shape)
        assert torch.equal(weights.read(name, index), parameter), name
    assert not list(stage.named_buffers())


@pytest.mark.parametrize("freeze", [(), ("connector",)])
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "merger.linear_fc1.weight",
            lambda each: each[1:],
            r"has shape \[127, 128\], the model \[128, 128\]; correct its config\.json, or give the weights that "
            r"belong to it",
        ),
        (
            "deepstack_merger_list.1.norm.bias",
            None,
            r"'deepstack_merger_list\.1\.norm\.bias' first; is it the right kind of model\?",
        ),
    ],
)
def test_wrong_weights_of_a_merger_are_named(
    make: Any, tmp_path: Path, freeze: tuple[str, ...], name: str, change: Any, said: str
) -> None:
    family = make()
    family.export(trained_state(family).state_dict(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    wrong = weights.pop(f"model.visual.{name}")
    if change is not None:
        weights[f"model.visual.{name}"] = change(wrong).contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = whole(family.config, tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"freeze": freeze})})
    again = family_from_config(config)
    for read in (
        lambda: again.load_encoder("vision"),
        lambda: again.load_backbone() if not freeze else dict(again.merged_connector()),
    ):
        with pytest.raises(ConfigError, match=rf"^model\.path: .*{said}$"):
            read()


HUB = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""What Qwen/Qwen3-VL-2B-Instruct has on the hub, without the ids of its tokens."""
HUB_PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def test_a_checkpoint_of_the_hub_is_understood(make: Any, noise: Any, tmp_path: Path) -> None:
    """By its configurations; nothing is loaded."""
    family = make()
    family.tokenizer.save_pretrained(tmp_path)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{key}_token_id": family.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    (tmp_path / "config.json").write_text(json.dumps(HUB | ids))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HUB_PROCESSOR))
    hub = family_from_config(whole(family.config, tmp_path))
    hub.check()
    hub.check_tensor_parallel(8)
    spec = hub.model_spec
    assert spec.num_parameters == 2_127_532_032
    assert (spec.backbone.deepstack_layers, spec.encoders["vision"].levels) == (3, 4)
    assert hub.tower_shape.feature_width == 4 * 4096
    assert hub.image_layout("vision", 1000, 700).grid == (22, 31) and hub.image_layout("vision", 4, 4).num_tokens == 64
    expected = stock_images(size=HUB_PROCESSOR["size"], patch_size=16)(noise(300, 200), return_tensors="np")
    assert expected["image_grid_thw"].prod() == hub.image_layout("vision", 300, 200).num_patches
