"""Qwen3-VL against Hugging Face's own classes: sizes, pixels, prompts, positions, losses, gradients, refusals."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen3VLMoeConfig

from flowtrain.config.model import GRID_FAMILIES
from flowtrain.config.run import RunConfig
from flowtrain.controller.prepare import check_parameter_names
from flowtrain.data.positions import grid_positions
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import RawImage, RawSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.models import cpu_products
from flowtrain.models.backbone import Backbone
from flowtrain.models.export import joined_name
from flowtrain.models.families.qwen3_vl import Qwen3VLFamily
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import materialize
from flowtrain.models.qwen3_vl_config import QWEN3_VL_NAMES
from flowtrain.models.qwen3_vl_vision import Qwen3VisionStage, _patches
from flowtrain.models.stage import take_stage
from flowtrain.pipeline.actions import MemoryKind, MemoryStrategy
from flowtrain.training.batch import SampleArrays, build_batch
from flowtrain.types.samples import Rejection, SampleRef
from tests.e2e.oracle import is_of_tower
from tests.qwen3_vl import PROCESSOR, TEXT, UNIT, VISION, stock_images, stock_inputs, stock_processor

TOLERANCE = 1e-5
CPU = torch.device("cpu")
REF = SampleRef(0, 0, 0, 0)
IMAGES = [(50, 20), (13, 61), (28, 28), (100, 90), (8, 8), (16, 40)]


def config_of(make_config: Any, sections: dict[str, Any] | None = None, **encoder: Any) -> RunConfig:
    """A tiny run; keyword arguments change the encoder's section."""
    whole = {"model": {}, "backbone": {"config": TEXT}, **(sections or {})}
    values = {"config": VISION, "image_processor": PROCESSOR, **encoder}
    model = {"family": "qwen3_vl", **whole.pop("model")}
    return make_config(**{"encoders": {"vision": values}, **whole, "model": model})


@pytest.fixture
def make(make_config: Any) -> Callable[..., Qwen3VLFamily]:
    """Build a tiny family; arguments as of ``config_of``."""

    def build(sections: dict[str, Any] | None = None, **encoder: Any) -> Qwen3VLFamily:
        family = family_from_config(config_of(make_config, sections, **encoder))
        assert isinstance(family, Qwen3VLFamily)
        return family

    return build


@pytest.fixture
def several(sample_of: Any) -> Callable[[Qwen3VLFamily], list[Any]]:
    """Samples with one image, with several of several sizes, and without images; weights differ."""

    def build(family: Qwen3VLFamily) -> list[Any]:
        return [
            sample_of(family, [(50, 20)], 9),
            sample_of(family, [], 14, weight=0.25),
            sample_of(family, [(13, 61), (28, 28), (100, 90)], 12, weight=2.0),
            sample_of(family, [(20, 20)], 4),
        ]

    return build


def pack(family: Qwen3VLFamily, samples: Sequence[Any]) -> dict[str, Any]:
    """Arguments of ``Backbone.forward``, with the samples' weights."""
    encoder, arrays = family.load_encoder("vision"), []
    for position, sample in enumerate(samples):
        rows = [np.array(sample.input_ids), np.array(sample.labels)]
        features = None
        if sample.images:
            pixels = [family.preprocess("vision", image) for image in sample.images]
            features = torch.cat(encoder.encode(pixels)).clone()
            grids = [family.image_layout("vision", *image.size).grid for image in sample.images]
            rows += list(grid_positions(rows[0] == family.image_token_id, grids))
        arrays.append(SampleArrays(position, np.stack(rows).astype(np.int32), features))
    batch = build_batch(
        arrays,
        image_token_id=family.image_token_id,
        feature_dim=family.feature_dim("vision"),
        dtype=getattr(torch, family.config.model.dtype),
        loss_normalization="token",
        device=CPU,
    )
    weights = torch.cat([torch.full((len(s.input_ids),), s.weight) for s in samples])
    return {**batch.forward_kwargs(), "weights": batch.weights * weights}


def reference_run(family: Qwen3VLFamily, samples: Sequence[Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss (weighted sum of token losses) and gradients of HF's class over the samples one by one."""
    model, total = family.load_joined().train(), 0.0
    for sample in samples:
        ids = torch.tensor([sample.input_ids])
        inputs = stock_inputs(sample.images, ids, family.image_token_id)
        mean = model(input_ids=ids, labels=torch.tensor([sample.labels]), **inputs).loss
        loss = mean * sum(label != -100 for label in sample.labels[1:]) * sample.weight
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(backbone: Backbone, expected: dict[str, Tensor]) -> None:
    """Every parameter's gradient, by the norm of the difference; a missing one counts as zero."""
    seen = set()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        theirs = joined_name(name, "model", QWEN3_VL_NAMES)
        seen.add(theirs)
        reference = expected.get(theirs, torch.zeros_like(parameter))
        difference = (parameter.grad - reference).norm()
        assert difference <= TOLERANCE * max(reference.norm().item(), 1e-3), (name, difference, reference.norm())
    assert {name for name in expected if not is_of_tower(name)} <= seen


# --- sizes, pixels, prompts, positions -------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    {"shortest_edge": 4 * UNIT * UNIT, "longest_edge": 300 * UNIT * UNIT},
    {"shortest_edge": 1, "longest_edge": UNIT * UNIT},
    {"shortest_edge": 640 * 480, "longest_edge": 1280 * 720},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_tokens_of_random_sizes_are_the_processors(make: Any, number: int) -> None:
    """2,500 sizes for each of four settings."""
    settings = {"size": SETTINGS[number]}
    family, rng = make(image_processor=settings), np.random.default_rng(number)
    drawn = np.exp(rng.uniform(0, np.log(5000), (4000, 2))).astype(int)  # height, width; small ones too
    sizes = drawn[drawn.max(axis=1) <= 200 * drawn.min(axis=1)][:2500].tolist()
    assert len(sizes) == 2500
    expected = stock_processor(family, **settings)._get_num_multimodal_tokens(image_sizes=sizes)
    layouts = [family.image_layout("vision", width, height) for height, width in sizes]
    assert [layout.num_tokens for layout in layouts] == expected.num_image_tokens
    assert [layout.num_patches for layout in layouts] == expected.num_image_patches
    assert all(each.num_rows == each.num_tokens == each.grid[0] * each.grid[1] for each in layouts)
    for (height, width), layout in list(zip(sizes, layouts, strict=True))[:100]:
        entering = family.entering_size("vision", width, height)
        assert entering == (layout.grid[0] * UNIT, layout.grid[1] * UNIT)
        assert family.tile_layout("vision", *entering[::-1]) == layout


def test_a_too_narrow_image_is_refused_as_the_processor_does(make: Any) -> None:
    with pytest.raises(ValueError, match="absolute aspect ratio must be smaller than 200"):
        make().image_layout("vision", 201, 1)


def test_real_pixels_are_the_processors(make: Any, noise: Any) -> None:
    """200 images: as many tokens as their headers say, with HF's own pixels, bit for bit, and token ids."""
    family = make()
    processor, rng, seen = stock_processor(family), np.random.default_rng(5), set()
    for width, height in rng.integers(1, 160, (200, 2)).tolist():
        image, layout = noise(width, height), family.image_layout("vision", width, height)
        pixels = family.preprocess("vision", image)
        assert pixels.dtype == np.float32 and pixels.shape == (3, layout.grid[0] * UNIT, layout.grid[1] * UNIT)
        inputs = processor(images=[image], text=f"w1 {processor.image_token} w2", return_tensors="pt")
        patches = _patches(torch.from_numpy(pixels), 4, 2).view(-1, 3, 1, 16).expand(-1, -1, 2, -1).flatten(1)
        assert torch.equal(inputs["pixel_values"], patches), (width, height)
        assert int((inputs["input_ids"] == family.image_token_id).sum()) == layout.num_tokens
        seen.add(layout.grid)
    assert len(seen) > 10
    assert family._images._table is not None, "pixel values come from the table"


def test_a_processor_that_does_more_is_called_whole(make: Any, noise: Any) -> None:
    plain, other = make(), make()
    other._images.__dict__["_table"] = None
    for size in IMAGES:
        assert np.array_equal(plain.preprocess("vision", noise(*size)), other.preprocess("vision", noise(*size)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "LA", "1"])
def test_any_image_mode_is_taken(make: Any, noise: Any, mode: str) -> None:
    assert make().preprocess("vision", noise(30, 20).convert("RGB").convert(mode)).shape[0] == 3


def size_of(family: Qwen3VLFamily, images: list[Image.Image], turns: tuple[Turn, ...]) -> SizedResult:
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        encoded.append(RawImage(data=buffer.getvalue()))
    sizer = Sizer(family, family.tokenizer, family.config.data)
    loaded = sizer.load(REF, RawSample(tuple(encoded), turns))
    assert not isinstance(loaded, Rejection), loaded
    result = sizer.size(REF, loaded.measured)
    assert isinstance(result, SizedResult), result
    return result


def test_token_ids_and_positions_are_those_of_the_processor_and_the_class(make: Any, noise: Any) -> None:
    """The whole way of a sample with two images, frames included; what frames an image is no target."""
    family = make()
    images = [noise(100, 30), noise(20, 40, 1)]
    turns = (Turn("user", "w1 <image> w2 <image>"), Turn("assistant", "w3 w4"))
    result, processor = size_of(family, images, turns), stock_processor(family)
    framed = f"<|vision_start|>{processor.image_token}<|vision_end|>"
    chat = [{"role": turn.role, "content": turn.text.replace("<image>", framed)} for turn in turns]
    text = family.tokenizer.apply_chat_template(chat, tokenize=False)
    inputs = processor(images=images, text=text, return_tensors="pt")
    assert result.text.shape[0] == 5 and np.array_equal(result.text[0], inputs["input_ids"][0])
    positions, _ = family.load_joined().model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    assert np.array_equal(result.text[2:], positions[:, 0])
    frame = {family.tokenizer.convert_tokens_to_ids(token) for token in ("<|vision_start|>", "<|vision_end|>")}
    targets = set(result.text[1][result.text[1] != -100].tolist())
    assert targets and not targets & {*frame, family.image_token_id}
    (part,) = result.sample.parts[1:]
    assert part.num_items == 2 and result.sample.num_vision_tokens == part.num_rows
    assert part.nbytes == part.num_rows * family.feature_dim("vision") * 4


def test_a_sample_without_images_has_no_positions_of_its_own(make: Any) -> None:
    assert size_of(make(), [], (Turn("user", "w1"), Turn("assistant", "w2"))).text.shape[0] == 2


def test_families_with_grids_are_named_in_the_configuration(make: Any, make_config: Any) -> None:
    families = [make(), family_from_config(make_config())]
    has_grid = {each.name for each in families if each.image_layout("vision", 30, 30).grid is not None}
    assert has_grid == GRID_FAMILIES


def test_positions_of_random_samples_are_hfs(make: Any, sample_of: Any) -> None:
    family, rng = make(), np.random.default_rng(3)
    model = family.load_joined().model
    for count in (0, 1, 2, 5, 3):
        sizes = rng.integers(5, 120, (count, 2)).tolist()
        sample = sample_of(family, sizes, 8 + count)
        ids = torch.tensor([sample.input_ids])
        inputs = stock_inputs(sample.images, ids, family.image_token_id)
        expected, _ = model.get_rope_index(
            ids, (ids == family.image_token_id).int(), image_grid_thw=inputs.get("image_grid_thw")
        )
        grids = [family.image_layout("vision", *size).grid for size in sizes]
        found = grid_positions(ids[0].numpy() == family.image_token_id, grids)
        assert np.array_equal(found, expected[:, 0]), sizes


# --- the encoder -----------------------------------------------------------------------------------------------------


def test_rows_are_what_hugging_face_merges(make: Any, noise: Any) -> None:
    family = make()
    images = [noise(*size, seed) for seed, size in enumerate(IMAGES)]
    rows = family.load_encoder("vision").encode([family.preprocess("vision", image) for image in images])
    assert [len(each) for each in rows] == [family.image_layout("vision", *size).num_rows for size in IMAGES]
    assert all(each.shape[1] == family.feature_dim("vision") == 3 * 4 * 32 for each in rows)
    inputs = stock_images()(images, return_tensors="pt")
    with torch.no_grad():
        expected = family.load_joined().eval().get_image_features(**inputs, return_dict=True)
        found = family.load_backbone().connector(torch.cat(rows).clone())
    for ours, theirs in zip(found, (expected.pooler_output, *expected.deepstack_features), strict=True):
        assert torch.allclose(ours, torch.cat(theirs), atol=1e-5)


def test_a_frozen_connector_merges_with_the_encoder(make: Any, noise: Any) -> None:
    family, whole = make({"model": {"freeze": ["connector"]}}), make()
    assert family.feature_dim("vision") == 3 * 32
    pixels = [family.preprocess("vision", noise(*size)) for size in IMAGES]
    rows = torch.cat(family.load_encoder("vision").encode(pixels))
    with torch.no_grad():
        expected = whole.load_backbone().connector(torch.cat(whole.load_encoder("vision").encode(pixels)).clone())
    found = family.load_backbone().connector(rows)
    assert not list(family.load_backbone().connector.parameters())
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["decoupled", "llm_only", "monolithic"])
def test_names_of_a_frozen_connector_are_known_wherever_it_runs(make_config: Any, mode: str) -> None:
    def check(freeze: list[str], **rates: float) -> None:
        training = {"max_steps": 3, "learning_rates": rates}
        config = config_of(make_config, {"mode": mode, "model": {"freeze": freeze}, "training": training})
        check_parameter_names(config, family_from_config(config))

    check(["connector", "connector.merger.*", "connector.deepstack_merger_list.[01].*"])
    check(["connector"], **{"*norm*": 0.1})
    with pytest.raises(
        ConfigError, match=r"'connector\.merger\.\*' \(0\.1\) has no effect: model\.freeze \(connector\)"
    ):
        check(["connector"], **{"connector.merger.*": 0.1})
    with pytest.raises(ConfigError, match=r"'connector\.mergers\.\*' matches no .* nearest are connector\.merger"):
        check(["connector", "connector.mergers.*"])


def whole_stage(family: Qwen3VLFamily, **changes: Any) -> Qwen3VisionStage:
    stage = family.encoder_skeleton("vision").to(getattr(torch, family.config.model.dtype))
    materialize(stage, CPU, family.encoder_weights("vision"), from_checkpoint=False)
    return stage


def cuts_of(num_layers: int) -> list[list[range]]:
    cuts = ([num_layers], [0, num_layers], [1, num_layers - 1], [2, 2], [1] * num_layers)
    return [[range(*pair) for pair in pairwise([0, *accumulate(cut)])] for cut in cuts]


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cut_gives_the_encoders_features_to_the_bit(make: Any, noise: Any, dtype: str) -> None:
    family = make({"model": {"dtype": dtype}})
    pixels = [family.preprocess("vision", noise(*size, seed)) for seed, size in enumerate(IMAGES)]
    expected, images = torch.cat(family.load_encoder("vision").encode(pixels)), [torch.from_numpy(p) for p in pixels]
    whole, sizes = whole_stage(family), [(image.shape[1], image.shape[2]) for image in images]
    for cut in cuts_of(4):
        payload: Any = images
        for number, layers in enumerate(cut):
            stage = whole.take(layers, is_first=number == 0, is_last=number == len(cut) - 1)
            payload = stage(payload, sizes)
            count, width = whole.shape.num_tokens, whole.shape.width_after(layers.stop)
            if stage.is_last:
                count, width = whole.shape.num_rows, whole.shape.feature_width
            assert payload.shape == (sum(map(count, sizes)), width), cut
        assert payload.dtype == expected.dtype and torch.equal(payload, expected), cut


def test_images_do_not_see_each_other(make: Any, noise: Any) -> None:
    family = make()
    encoder, pixels = family.load_encoder("vision"), [family.preprocess("vision", noise(*size)) for size in IMAGES]
    together = encoder.encode(pixels)
    for image, rows in zip(pixels, together, strict=True):
        assert torch.allclose(encoder.encode([image])[0], rows, atol=1e-6)


def test_products_of_what_is_frozen_are_the_fast_ones(make: Any, noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained tower keeps torch's, in an evaluation too."""
    plain, calls = torch.nn.functional.linear, []
    monkeypatch.setattr(cpu_products, "_FEWEST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(cpu_products, "_one_dnn", lambda: lambda *given: calls.append(given) or plain(*given[:3]))
    family = make({"model": {"freeze": ["connector"]}})
    pixels = family.preprocess("vision", noise(50, 20))
    family.load_encoder("vision").encode([pixels])
    assert len(calls) == 4 * 4 + 3 * 2, "four in each layer, two in each merger"
    calls.clear()
    with torch.no_grad():
        whole_stage(make({"mode": "monolithic"}, trainable=True))([torch.from_numpy(pixels)], [pixels.shape[1:]])
    assert not calls


@pytest.mark.parametrize("memory", [None, MemoryKind.RECOMPUTE, MemoryKind.SELECTIVE, MemoryKind.OFFLOAD])
def test_what_a_trained_tower_needs_has_gradients(make: Any, noise: Any, memory: MemoryKind | None) -> None:
    family = make({"mode": "monolithic"}, trainable=True)
    pixels = [torch.from_numpy(family.preprocess("vision", noise(*size))) for size in IMAGES]
    sizes = [(image.shape[1], image.shape[2]) for image in pixels]
    gradients = []
    for strategy in (None, None if memory is None else MemoryStrategy(memory)):
        whole = whole_stage(family)
        (whole(pixels, sizes, memory=strategy) ** 2).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in whole.named_parameters()})
    assert all(grad is not None and grad.any() for grad in gradients[0].values())
    assert all(torch.allclose(grad, gradients[1][name], rtol=1e-4) for name, grad in gradients[0].items())


def test_without_images_a_trained_stage_gives_zero_gradients(make: Any) -> None:
    whole = whole_stage(make({"mode": "monolithic"}, trainable=True))
    first, last = (whole.take(layers, is_first=not k, is_last=bool(k)) for k, layers in enumerate(cuts_of(4)[3]))
    hidden = first([], [])
    given_on = hidden.detach().requires_grad_()
    rows = last(given_on, [])
    assert hidden.shape == (0, whole.shape.width_after(2)) and rows.shape == (0, whole.shape.feature_width)
    rows.backward(torch.empty_like(rows))
    hidden.backward(given_on.grad)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in whole.parameters())


# --- the backbone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_unpacked_hugging_face(make: Any, several: Any, tied: bool) -> None:
    family = make({"backbone": {"config": {**TEXT, "tie_word_embeddings": tied}}})
    chosen = several(family)
    backbone = family.load_backbone()
    loss = backbone(**pack(family, chosen))
    loss.backward()
    expected_loss, expected_gradients = reference_run(family, chosen)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_equal(backbone, expected_gradients)
    assert all(parameter.grad.any() for parameter in backbone.connector.parameters()), "deepstack mergers too"


def test_a_frozen_connector_changes_no_other_gradient(make: Any, several: Any) -> None:
    family = make({"model": {"freeze": ["connector"]}})
    chosen, backbone = several(family), family.load_backbone()
    loss = backbone(**pack(family, chosen))
    loss.backward()
    expected_loss, expected_gradients = reference_run(family, chosen)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    own = {name: grad for name, grad in expected_gradients.items() if not name.startswith("model.visual.")}
    assert_gradients_equal(backbone, own)


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_memory_strategies_change_nothing(make: Any, several: Any, kind: MemoryKind) -> None:
    family = make()
    backbone, batch = family.load_backbone(), pack(family, several(family))
    results = []
    for memory in (MemoryStrategy.KEEP, MemoryStrategy(kind)):
        backbone.zero_grad()
        loss = backbone(**batch, memory=memory)
        loss.backward()
        results.append((loss.item(), {name: p.grad.clone() for name, p in backbone.named_parameters()}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[0][1].items():
        assert torch.allclose(gradient, results[1][1][name], rtol=1e-4, atol=1e-6), name


def test_stages_compute_what_the_whole_does(make: Any, several: Any) -> None:
    family = make()
    whole, batch = family.load_backbone(), pack(family, several(family))
    hidden = None
    for number, layers in enumerate((range(2), range(2, 3), range(3, 4))):
        stage = take_stage(whole, layers, is_first=number == 0, is_last=number == 2)
        hidden = stage(**batch, hidden=hidden)
    assert torch.equal(hidden, whole(**batch))


def test_fewer_layers_than_levels_take_all_rows_for_a_profile(make: Any, several: Any) -> None:
    shallow = make().shallow(1)
    backbone = shallow.load_backbone()
    backbone(**pack(shallow, several(shallow))).backward()
    assert len(backbone.decoder_layers) == 1
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in backbone.connector.parameters())
    assert shallow.model_spec.backbone.deepstack_layers == 1


def test_a_text_only_microbatch_gives_the_connector_zero_gradients(make: Any, sample_of: Any) -> None:
    family = make()
    backbone = family.load_backbone()
    backbone(**pack(family, [sample_of(family, [], 10)])).backward()
    for name, parameter in backbone.connector.named_parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() == 0, name


def test_deepstack_rows_matter(make: Any, several: Any) -> None:
    """Else equal losses would say nothing about them."""
    family = make()
    backbone, batch = family.load_backbone(), pack(family, several(family))
    loss = backbone(**batch).item()
    for merger in backbone.connector.deepstack_merger_list:
        with torch.no_grad():
            merger.linear_fc2.weight.zero_()
    assert backbone(**batch).item() != pytest.approx(loss, rel=1e-4)


def test_the_specs_parameters_are_those_of_the_modules(make: Any) -> None:
    for freeze in ([], ["connector"]):
        family = make({"model": {"freeze": freeze}})
        spec, backbone, encoder = family.model_spec, family.backbone_skeleton(), family.load_encoder("vision")
        assert spec.connector.num_parameters == sum(p.numel() for p in backbone.connector.parameters())
        assert spec.backbone.num_parameters == sum(p.numel() for p in backbone.language_model.parameters())
        assert spec.encoders["vision"].num_computed_parameters == sum(p.numel() for p in encoder.parameters())
        assert spec.connector.feature_dim == family.feature_dim("vision")
        assert (spec.backbone.first_layers, spec.backbone.most_stages) == (2, 3)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "encoder", "said"),
    [
        ({}, {"config": {**VISION, "deepstack_visual_indexes": [2, 0]}}, r"deepstack_visual_indexes \(\[2, 0\]\)"),
        ({}, {"config": {**VISION, "deepstack_visual_indexes": [0, 4]}}, r"it has 4 \(depth\)"),
        ({}, {"config": {**VISION, "out_hidden_size": 16}}, r"out_hidden_size \(16\).*hidden_size \(32\)"),
        ({}, {"config": {**VISION, "num_heads": 16}}, r"hidden_size \(32\) over num_heads \(16\).*multiple of 4"),
        ({}, {"config": {**VISION, "num_heads": 5}}, r"does not divide hidden_size \(32\)"),
        ({}, {"config": {"model_type": "siglip_vision_model"}}, r"siglip_vision_model.*needs qwen3_vl_vision"),
        ({"backbone": {"config": {**TEXT, "model_type": "qwen3"}}}, {}, r"\(qwen3\).*needs qwen3_vl_text"),
        ({"backbone": {"config": {**TEXT, "num_hidden_layers": 1}}}, {}, r"more layers than the language model.*\(1\)"),
        ({"backbone": {"path": "some/model", "config": None}}, {}, r"backbone\.path \(some/model\).*model\.path"),
        ({}, {"image_processor": {"patch_size": 8}}, r"image_processor\.patch_size \(8\) is not 4"),
        ({}, {"image_processor": {"do_resize": False}}, r"do_resize \(False\) is not True"),
        ({}, {"image_processor": {"sise": {}}}, r"sise is no setting of Qwen2VLImageProcessorPil"),
        ({"data": {"sources": [{"path": "x"}], "max_image_pixels": 100}}, {}, r"\(128\).*max_image_pixels \(100\)"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, sections: Any, encoder: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(sections, **encoder)


def test_a_mixture_of_experts_is_refused_by_name(make_config: Any, tmp_path: Path) -> None:
    Qwen3VLMoeConfig().save_pretrained(tmp_path)
    config = make_config(model={"family": "qwen3_vl", "path": str(tmp_path)}, encoders={"vision": {}}, backbone={})
    with pytest.raises(ConfigError, match=r"'qwen3_vl_moe' model, not 'qwen3_vl'; a mixture of experts is not"):
        family_from_config(config)


def test_ranks_split_the_language_model_by_qwen3s_plan(make: Any) -> None:
    make().check_tensor_parallel(2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(4\) does not divide num_key_value_heads \(2\)"):
        make().check_tensor_parallel(4)
