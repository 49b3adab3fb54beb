"""InternVL against Hugging Face's own classes: sizes, pixels, prompts, losses, gradients, exports."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    InternVLForConditionalGeneration,
)

from flowtrain.config.run import RunConfig
from flowtrain.controller.dataset.images import ImageViewer
from flowtrain.data.images import tiles_of
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import RawImage, RawSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.models.families.internvl import InternVLFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import materialize
from flowtrain.models.vision_stage import pixel_shuffle
from flowtrain.pipeline.executor import execute
from flowtrain.training.mesh import BackboneGroup, init_backbone_group
from flowtrain.training.trainer import Trainer
from flowtrain.types.plan import Degrees
from flowtrain.types.samples import Rejection, SampleRef
from tests.internvl import NORMED_VISION, PROCESSOR, TILE, VISION, stock_pixels, stock_processor
from tests.models.test_backbone_forward import assert_gradients_equal, reference_run
from tests.models.test_monolithic_llava import hf_name, packed, plan_of

TOLERANCE = 1e-5
CPU = torch.device("cpu")
TOWERS = {"plain": VISION, "normed": NORMED_VISION}
REF = SampleRef(0, 0, 0, 0)


@pytest.fixture
def make(make_config: Any, language_configs: Any) -> Callable[..., InternVLFamily]:
    """Build a tiny family; keyword arguments change the encoder's section."""

    def build(
        tower: str = "plain", language: str = "qwen3", sections: dict[str, Any] | None = None, **encoder: Any
    ) -> InternVLFamily:
        config = config_of(make_config, language_configs, tower, language, sections, **encoder)
        family = family_from_config(config)
        assert isinstance(family, InternVLFamily)
        return family

    return build


def config_of(
    make_config: Any,
    language_configs: Any,
    tower: str = "plain",
    language: str = "qwen3",
    sections: dict[str, Any] | None = None,
    **encoder: Any,
) -> RunConfig:
    languages = {**language_configs, "qwen2": {**language_configs["llama"], "model_type": "qwen2"}}
    values = {"config": TOWERS[tower], "feature_layer": -1, "image_processor": PROCESSOR, **encoder}
    whole = {"model": {}, **(sections or {})}
    return make_config(
        **{
            "encoders": {"vision": values},
            "backbone": {"config": languages[language]},
            **whole,
            "model": {"family": "internvl", **whole["model"]},
        }
    )


@pytest.fixture
def several(sample_of: Any) -> Callable[[InternVLFamily], list[Any]]:
    """Samples with one tile, with several images of several tiles, and without images; weights differ."""

    def build(family: InternVLFamily) -> list[Any]:
        return [
            sample_of(family, [(50, 20)], 9),
            sample_of(family, [], 14, weight=0.25),
            sample_of(family, [(13, 61), (28, 28), (100, 90)], 12, weight=2.0),
            sample_of(family, [(20, 20)], 4),
        ]

    return build


# --- sizes, pixels, prompts ------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"min_patches": 1, "max_patches": 12},
    {"min_patches": 1, "max_patches": 6},
    {"min_patches": 3, "max_patches": 8},
    {"min_patches": 1, "max_patches": 1},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_tokens_of_random_sizes_are_the_processors(make: Any, number: int) -> None:
    """2,500 sizes for each of four settings; HF counts the two tokens of the frame as the image's."""
    family = make(image_processor=SETTINGS[number])
    rng = np.random.default_rng(number)
    sizes = np.exp(rng.uniform(0, np.log(5000), (2500, 2))).astype(int).tolist()  # height, width; small ones too
    expected = stock_processor(family, **SETTINGS[number])._get_num_multimodal_tokens(image_sizes=sizes)
    layouts = [family.image_layout("vision", width, height) for height, width in sizes]
    assert [layout.num_tokens + 2 for layout in layouts] == expected.num_image_tokens
    assert [layout.num_tiles for layout in layouts] == expected.num_image_patches
    assert all((each.num_patches, each.num_rows) == (16 * each.num_tiles, each.num_tokens) for each in layouts)
    tiles = {layout.num_tiles for layout in layouts}
    assert len(tiles) > 3 or tiles == {1}, "the sizes must differ"


def test_real_pixels_are_the_processors(make: Any, noise: Any) -> None:
    """200 images: as many tiles and tokens as their headers say, with HF's own pixels and token ids."""
    family = make()
    processor, rng = stock_processor(family, **PROCESSOR), np.random.default_rng(5)
    seen = set()
    for width, height in np.exp(rng.uniform(0, np.log(160), (200, 2))).astype(int).tolist():
        image, layout = noise(width, height), family.image_layout("vision", width, height)
        pixels = family.preprocess("vision", image)
        assert pixels.dtype == np.float32 and pixels.shape == (layout.num_tiles, 3, TILE, TILE)
        inputs = processor(images=[image], text=f"w1 {family.tokenizer.context_image_token} w2", return_tensors="pt")
        assert torch.equal(inputs["pixel_values"], torch.from_numpy(pixels)), (width, height)
        assert int((inputs["input_ids"] == family.image_token_id).sum()) == layout.num_tokens
        seen.add(layout.num_tiles)
    assert {1, 3, 7} <= seen


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_any_image_mode_is_taken(make: Any, noise: Any, mode: str) -> None:
    pixels = make().preprocess("vision", noise(90, 20).convert("RGB").convert(mode))
    assert pixels.shape[1:] == (3, TILE, TILE)


def test_token_ids_are_those_of_the_processor(make: Any, noise: Any) -> None:
    """The whole way of a sample with two images, frames included; what frames an image is no target."""
    family = make()
    images = [noise(100, 30), noise(20, 20, 1)]
    turns = (
        Turn("user", "w1 <image> w2 <image>"),
        Turn("assistant", "w3 w4"),
        Turn("user", "w5 <img> w6"),  # a data set's text is no frame
        Turn("assistant", "w7"),
    )
    result = size_of(family, images, turns)
    context = family.tokenizer.context_image_token
    chat = [{"role": turn.role, "content": turn.text.replace("<image>", context)} for turn in turns[:2]]
    text = family.tokenizer.apply_chat_template(chat, tokenize=False)
    expected = stock_processor(family, **PROCESSOR)(images=images, text=text, return_tensors="np")["input_ids"][0]
    assert np.array_equal(result.text[0, : len(expected)], expected)
    frame = [family.tokenizer.convert_tokens_to_ids(token) for token in ("<img>", "</img>")]
    assert [int((result.text[0] == each).sum()) for each in frame] == [2, 2]
    targets = set(result.text[1][result.text[1] != -100].tolist())
    assert targets and not targets & {*frame, family.image_token_id}
    layouts = [family.image_layout("vision", *image.size) for image in images]
    (part,) = result.sample.parts[1:]
    assert part.num_items == sum(layout.num_tiles for layout in layouts) > len(images)
    assert result.sample.num_vision_tokens == part.num_rows == sum(layout.num_tokens for layout in layouts)
    assert part.nbytes == part.num_rows * family.feature_dim("vision") * 4


def size_of(family: InternVLFamily, images: list[Image.Image], turns: tuple[Turn, ...]) -> SizedResult:
    sizer = Sizer(family, family.tokenizer, family.config.data)
    loaded = sizer.load(REF, RawSample(tuple(map(raw_image, images)), turns))
    assert not isinstance(loaded, Rejection), loaded
    result = sizer.size(REF, loaded.measured)
    assert isinstance(result, SizedResult), result
    return result


def raw_image(image: Image.Image) -> RawImage:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return RawImage(data=buffer.getvalue())


def test_frames_in_an_answer_are_no_target(make: Any, noise: Any) -> None:
    family = make()
    result = size_of(family, [noise(9, 9)], (Turn("user", "w1"), Turn("assistant", "w2 <image> w3")))
    ids, labels = result.text
    start = family.tokenizer.convert_tokens_to_ids("<img>")
    place = ids.tolist().index(start)
    assert (labels[place : place + 6] == -100).all() and labels[place - 1] == ids[place - 1]


def test_tiles_are_shown_side_by_side(make: Any, noise: Any, tmp_path: Path) -> None:
    family = make()
    (shown,) = ImageViewer(family, family.config.data, tmp_path).look(REF, [raw_image(noise(100, 30))], "sample")
    assert (shown.rejection, shown.num_tokens) == (None, 16)
    assert shown.tower_shape == (4, 3, TILE, TILE), "three tiles in a line, and the thumbnail"
    with Image.open(shown.files[1]) as picture:
        assert picture.size == (4 * TILE, TILE)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_the_tokenizer_gets_what_the_processor_asks_for_once(make: Any, tokenizer_path: Path, tmp_path: Path) -> None:
    family = make()
    plain = AutoTokenizer.from_pretrained(tokenizer_path)
    assert len(family.tokenizer) == len(plain) + 4 and "<image>" not in family.tokenizer.get_vocab()
    family.tokenizer.save_pretrained(tmp_path)
    again = make(sections={"model": {"tokenizer": str(tmp_path)}})
    assert len(again.tokenizer) == len(family.tokenizer) and again.image_token_id == family.image_token_id
    assert again.image_text == "<img><IMG_CONTEXT></img>"


def test_a_tokenizers_own_names_count(make: Any, tokenizer_path: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(tokenizer_path, context_image_token="<PATCH>").save_pretrained(tmp_path)
    family = make(sections={"model": {"tokenizer": str(tmp_path)}})
    assert family.image_text == "<img><PATCH></img>"
    assert family.tokenizer.convert_ids_to_tokens(family.image_token_id) == "<PATCH>"


# --- the encoder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("layer", [-1, -2, 2])
def test_rows_are_what_huggingface_projects(make: Any, noise: Any, tower: str, layer: int) -> None:
    family = make(tower, feature_layer=layer)
    images = [noise(100, 30), noise(20, 20, 1), noise(9, 80, 2)]
    tiles = [tile for image in images for tile in tiles_of(family.preprocess("vision", image))]
    assert torch.equal(torch.stack([torch.from_numpy(tile) for tile in tiles]), stock_pixels(family, images))
    rows = torch.stack(family.load_encoder("vision").encode(tiles))
    assert rows.shape == (len(tiles), 4, family.feature_dim("vision"))
    model = family.load_joined().eval()
    with torch.no_grad():
        expected = model.get_image_features(stock_pixels(family, images), return_dict=True).pooler_output
        found = family.load_backbone().connector(rows.clone())
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("side", "factor"), [(2, 2), (6, 2), (4, 4), (8, 4), (3, 1)])
def test_pixel_shuffle_is_huggingfaces(make: Any, side: int, factor: int) -> None:
    states = torch.randn(2, side * side, 8 * factor, generator=torch.Generator().manual_seed(side))
    model = make().load_joined().model
    theirs = model.pixel_shuffle(states.view(2, side, side, -1), scale_factor=1 / factor).flatten(1, 2)
    assert torch.equal(pixel_shuffle(states, factor), theirs)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["qwen3", "llama", "qwen2"])
def test_packed_equals_unpacked_huggingface(make: Any, several: Any, pack: Any, language: str) -> None:
    family = make("normed" if language == "llama" else "plain", language)
    chosen = several(family)
    assert len({family.image_layout("vision", *image.size).num_tiles for s in chosen for image in s.images}) > 2
    backbone = family.load_backbone()
    loss = backbone(**pack(chosen, family))
    loss.backward()
    expected_loss, expected_gradients = reference_run(family, chosen)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_equal(backbone, expected_gradients)
    assert backbone.connector.layer_norm.weight.grad.norm() > 0


def test_a_text_only_microbatch_gives_the_connector_zero_gradients(make: Any, sample_of: Any, pack: Any) -> None:
    family = make()
    backbone = family.load_backbone()
    backbone(**pack([sample_of(family, [], 10)], family)).backward()
    for name, parameter in backbone.connector.named_parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() == 0, name


@pytest.fixture
def group() -> Iterator[BackboneGroup]:
    group = init_backbone_group(0, Degrees(), CPU)
    yield group
    group.close()


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("layer", [-1, -2])
def test_a_trained_tower_has_huggingfaces_gradients(
    make: Any, several: Any, group: BackboneGroup, tower: str, layer: int
) -> None:
    sections = {"mode": "monolithic", "training": {"max_steps": 10}}
    family = make(tower, feature_layer=layer, trainable=True, sections=sections)
    chosen = [replace(sample, weight=1.0) for sample in several(family)]
    batches = [packed(family, chosen[:3]), packed(family, chosen[3:])]
    found: dict[str, Tensor] = {}

    def take(model: Any) -> None:
        found.update({name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()})

    trainer = Trainer(family.config, family, group, num_steps=10, before_optimizer=take)
    execute(trainer.begin_unit(plan_of(batches)), trainer.stages, lambda index: batches[index])
    result = trainer.finish_unit()
    total, expected = reference_run(family, chosen)
    num_targets = sum(batch.num_target_tokens for batch in batches)
    assert result.loss * num_targets == pytest.approx(total, rel=1e-6)
    assert {hf_name(name) for name in found} == expected.keys()
    for name, gradient in found.items():
        reference = expected[hf_name(name)] / num_targets
        if name.endswith("k_proj.bias") and "tower" in name and tower == "plain":
            continue  # it changes no attention: what there is is rounding
        difference = (gradient - reference).norm()
        assert difference <= TOLERANCE * max(reference.norm().item(), 1e-3), (name, difference, reference.norm())


def test_a_trained_tower_without_images_may_have_any_size_of_its_own(make: Any) -> None:
    """Pixel shuffle could not join its 5 x 5 patches."""
    sections = {"mode": "monolithic", "training": {"max_steps": 10}}
    config, processor = {**VISION, "image_size": [35, 35]}, {**PROCESSOR, "size": {"height": TILE, "width": TILE}}
    family = make(config=config, image_processor=processor, trainable=True, sections=sections)
    stage = family.encoder_skeleton("vision")
    materialize(stage, CPU, family.encoder_weights("vision"), from_checkpoint=False)
    rows = stage([], [])
    assert rows.shape == (0, family.feature_dim("vision"))
    rows.backward(torch.empty_like(rows))
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in stage.parameters())


def test_the_specs_parameters_are_those_of_the_modules(make: Any) -> None:
    for tower in TOWERS:
        family = make(tower)
        spec, backbone = family.model_spec, family.backbone_skeleton()
        assert spec.connector.num_parameters == sum(p.numel() for p in backbone.connector.parameters())
        tower_parameters = sum(p.numel() for p in family.encoder_skeleton("vision").parameters())
        assert spec.encoders["vision"].num_computed_parameters == tower_parameters
        assert spec.encoders["vision"].patches_per_row == 4


# --- exports ---------------------------------------------------------------------------------------------------------


def trained_state(family: InternVLFamily) -> Any:
    backbone = family.load_backbone()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.01)
    return backbone


@pytest.mark.parametrize("language", ["qwen3", "llama", "qwen2"])
def test_an_export_loads_in_stock_transformers(
    make: Any, several: Any, noise: Any, pack: Any, tmp_path: Path, without_videos: None, language: str
) -> None:
    family = make(language=language)
    backbone = trained_state(family)
    family.export(backbone.state_dict(), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert isinstance(model, InternVLForConditionalGeneration) and model.dtype == torch.float32
    is_tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert is_tied == (language == "qwen3")

    processor = AutoProcessor.from_pretrained(tmp_path)
    images = [noise(100, 30), noise(20, 20, 1)]
    context = processor.image_token
    chat = [{"role": "user", "content": f"{context} w1 {context} w2"}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=images, text=text, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], stock_pixels(family, images))
    num_tokens = sum(family.image_layout("vision", *image.size).num_tokens for image in images)
    assert int((inputs["input_ids"] == family.image_token_id).sum()) == num_tokens
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    with torch.no_grad():
        joined = family.load_joined(backbone.state_dict()).eval()
        assert torch.equal(model(**inputs).logits, joined(**inputs).logits)
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]

    chosen = [sample for sample in several(family) if sample.images]
    with torch.no_grad():
        ours = backbone(**pack(chosen, family))
        theirs = sum(
            model(
                input_ids=torch.tensor([sample.input_ids]),
                labels=torch.tensor([sample.labels]),
                pixel_values=stock_pixels(family, sample.images),
            ).loss
            * sum(label != -100 for label in sample.labels[1:])
            * sample.weight
            for sample in chosen
        )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_an_export_names_the_processor_with_both_halves(make: Any, tmp_path: Path) -> None:
    family = make()
    family.export(family.load_backbone().state_dict(), tmp_path)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["processor_class"] == "InternVLProcessor" and settings["image_seq_length"] == 4
    assert settings["image_processor"]["image_processor_type"] == "GotOcr2ImageProcessor"
    assert settings["image_processor"]["max_patches"] == PROCESSOR["max_patches"]
    video = settings["video_processor"]
    assert video["video_processor_type"] == "InternVLVideoProcessor" and "max_patches" not in video
    assert video["size"] == settings["image_processor"]["size"] == {"height": TILE, "width": TILE}
    assert json.loads((tmp_path / "config.json").read_text())["image_seq_length"] == 4

    settings["video_processor"]["initial_shift"] = False
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    again = family_from_config(whole(family.config, tmp_path))
    again.export(again.load_backbone().state_dict(), tmp_path / "again")
    passed_on = json.loads((tmp_path / "again" / "processor_config.json").read_text())
    assert passed_on["video_processor"] == settings["video_processor"], "a start's settings stay"


def whole(config: RunConfig, path: Path) -> RunConfig:
    """The same run from a whole checkpoint."""
    values = config.model_dump()
    values["model"] |= {"path": str(path), "tokenizer": None}
    for section in (values["encoders"]["vision"], values["backbone"]):
        section["config"] = None
    values["encoders"]["vision"]["image_processor"] = {}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("language", ["qwen3", "llama"])
@pytest.mark.parametrize("names", ["hub", "memory"])
def test_a_huggingface_checkpoint_comes_out_as_it_went_in(
    make: Any, noise: Any, tmp_path: Path, tower: str, language: str, names: str
) -> None:
    """Zero steps. A checkpoint has the names of published ones, or those of the class in memory."""
    family = make(tower, language)
    start, export = tmp_path / "start", tmp_path / "export"
    family.export(trained_state(family).state_dict(), start)
    model = AutoModelForImageTextToText.from_pretrained(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    model.save_pretrained(start, save_original_format=False)
    if names == "hub":
        weights = {published_name(name): tensor for name, tensor in load_file(start / "model.safetensors").items()}
        save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    again = family_from_config(whole(family.config, start))
    again.export(again.load_backbone().state_dict(), export)
    found = AutoModelForImageTextToText.from_pretrained(export).state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    for size in ((100, 30), (20, 20)):
        assert again.image_layout("vision", *size) == family.image_layout("vision", *size)
        assert np.array_equal(again.preprocess("vision", noise(*size)), family.preprocess("vision", noise(*size)))


def published_name(name: str) -> str:
    """Of a weight in the checkpoints on the hub."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    own = name.removeprefix("model.")
    if own.startswith("language_model."):
        return "language_model.model." + own.removeprefix("language_model.")
    return own


def test_an_export_is_what_huggingface_writes_of_the_whole_model(make: Any, tmp_path: Path) -> None:
    family = make()
    state = trained_state(family).state_dict()
    family.export(state, tmp_path / "ours")
    family.load_joined(state).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


# --- refusals --------------------------------------------------------------------------------------------------------

SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("sections", "encoder", "said"),
    [
        ({}, {"config": SIGLIP}, r"the tower is a 'siglip_vision_model'; family internvl needs .*'internvl_vision'"),
        ({}, {"feature_select": "full"}, r"vision_feature_select_strategy \('full'\) keeps the class token"),
        ({}, {"config": {**VISION, "use_mean_pooling": False}}, r"use_mean_pooling \(false\) .*\(-1\)"),
        ({}, {"image_processor": {"crop_to_patches": False}}, r"crop_to_patches \(false\).*max_patches to 1"),
        ({}, {"image_processor": {"do_resize": False}}, r"do_resize \(false\)"),
        ({}, {"image_processor": {"size": {"height": 28, "width": 14}}}, r"tiles of 4 x 2 patches"),
        ({}, {"image_processor": {"size": {"height": 21, "width": 21}}}, r"3 x 3 patches; .*multiples of 2"),
        ({"connector": {"bias": False}}, {}, r"connector\.bias \(false\)"),
        ({"connector": {"hidden_act": "gellu"}}, {}, r"no activation 'gellu'"),
        ({"model": {"image_token": "<picture>"}}, {}, r"'<picture>'.*context_image_token \('<IMG_CONTEXT>'\)"),
    ],
)
def test_what_cannot_be_an_internvl(make: Any, sections: Any, encoder: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(sections=sections, **encoder)


def test_another_size_of_tiles_is_taken(make: Any, noise: Any, several: Any, pack: Any) -> None:
    """HF interpolates the positions then; 6 x 6 patches are 9 rows."""
    family = make(image_processor={**PROCESSOR, "size": {"height": 42, "width": 42}})
    assert family.image_layout("vision", 10, 10).num_tokens == 9
    chosen = several(family)
    backbone = family.load_backbone()
    loss = backbone(**pack(chosen, family))
    expected, _ = reference_run(family, chosen)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_whole_checkpoint_of_another_family_is_named(make_config: Any, make: Any, tmp_path: Path) -> None:
    llava = family_from_config(make_config())
    llava.export(llava.load_backbone().state_dict(), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .* is a 'llava' model, not 'internvl'"):
        family_from_config(whole(make().config, tmp_path))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"feature_layer": 1},
            r"encoders\.vision\.feature_layer \(1\) .* model\.path \('.*'\), .* trained with -1; leave",
        ),
        ({"feature_select": "full"}, r"encoders\.vision\.feature_select \(\"full\"\) .* were trained with \"default\""),
        ({"hidden_act": "relu"}, r"connector\.hidden_act \(\"relu\"\) .* were trained with \"gelu\""),
        ({"bias": False}, r"connector\.bias \(false\) .* were trained with true"),
    ],
)
def test_keys_that_contradict_a_whole_checkpoint_are_refused(
    make: Any, tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    family = make()
    family.export(family.load_backbone().state_dict(), tmp_path)
    values = whole(family.config, tmp_path).model_dump()
    assert values["encoders"]["vision"]["feature_layer"] == -1, "as the checkpoint has it"
    family_from_config(RunConfig.model_validate(values))
    (values["connector"] if keys.keys() <= values["connector"].keys() else values["encoders"]["vision"]).update(keys)
    with pytest.raises(ConfigError, match=said):
        family_from_config(RunConfig.model_validate(values))
