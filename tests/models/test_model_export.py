"""What is exported loads with HF's own classes, computes the same, and is a valid start again."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sources.base import Turn
from flowtrain.errors import CheckpointError, ConfigError
from flowtrain.models.families.registry import family_from_config


def whole(path, family="llava"):
    """Sections of a configuration that starts from a whole checkpoint."""
    return {
        "model": {"path": str(path), "tokenizer": None, "family": family},
        "encoders": {"vision": {}},
        "backbone": {},
    }


def trained_state(family):
    """The state of a backbone that is not the initial one, with ties kept."""
    backbone = family.load_backbone()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.full_like(parameter, 0.01))
    return backbone


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "uneven"])
@pytest.mark.parametrize("language", ["qwen3", "llama"])
def test_export_loads_processes_and_generates(
    make_config, tower_configs, language_configs, noise, pack, sample_of, tmp_path, tower, language
):
    config = make_config(
        encoders={"vision": {"config": tower_configs[tower]}}, backbone={"config": language_configs[language]}
    )
    family = family_from_config(config)
    backbone = trained_state(family)
    family.export(backbone.state_dict(), tmp_path)

    model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.dtype == torch.float32
    is_tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert is_tied == (language == "qwen3")

    processor = AutoProcessor.from_pretrained(tmp_path)
    images = [noise(50, 20), noise(13, 61, 1)]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": "<image> w1 <image> w2"}], add_generation_prompt=True
    )
    inputs = processor(images=images, text=chat, return_tensors="pt")
    num_tokens = sum(family.image_layout("vision", *image.size).num_tokens for image in images)
    assert (inputs["input_ids"] == family.image_token_id).sum() == num_tokens
    assert torch.equal(
        inputs["pixel_values"], torch.stack([torch.from_numpy(family.preprocess("vision", i)) for i in images])
    )
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > inputs["input_ids"].shape[1]

    sample = sample_of(family, [(50, 20), (13, 61)], 9)
    with torch.no_grad():
        ours = backbone(**pack([sample], family)) / sum(label != -100 for label in sample.labels[1:])
        pixels = torch.stack([torch.from_numpy(family.preprocess("vision", image)) for image in sample.images])
        theirs = model(
            input_ids=torch.tensor([sample.input_ids]), labels=torch.tensor([sample.labels]), pixel_values=pixels
        ).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


LISTS_ONLY = (
    "{% for message in messages %}<s>{{ message['role'] }} {% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.mark.parametrize("template", [None, LISTS_ONLY])
@pytest.mark.parametrize("name", ["llava", "variable_llava"])
def test_an_export_takes_texts_and_lists_of_parts(make_config, tmp_path, template, name):
    """The tokenizer's own template takes texts alone; the other takes lists alone."""
    family = family_from_config(make_config(model={"family": name, "chat_template": template}))
    family.export(family.load_backbone().state_dict(), tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    parts = [{"type": "text", "text": "w1 "}, {"type": "image"}, {"type": "text", "text": " w2"}]
    texts = [
        processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        for content in (parts, "w1 <image> w2")
    ]
    assert texts == ["<s>user w1 <image> w2</s><s>assistant "] * 2
    encoder = ConversationEncoder(family.tokenizer)
    trained = encoder.encode([Turn("user", "w1 <image> w2"), Turn("assistant", "w3")]).ids.tolist()
    prompt = processor.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert trained[: len(prompt)] == prompt
    again = family_from_config(make_config(**whole(tmp_path, name)))
    again.export(again.load_backbone().state_dict(), tmp_path / "again")
    assert AutoProcessor.from_pretrained(tmp_path / "again").chat_template == processor.chat_template


@pytest.mark.parametrize("name", ["llava", "variable_llava"])
@pytest.mark.parametrize("language", ["qwen3", "llama"])
def test_export_is_a_valid_start(make_config, language_configs, noise, tmp_path, name, language):
    encoder = {"config": {**make_config().encoders["vision"].config}, "feature_layer": -1}
    if name == "variable_llava":
        encoder["image_processor"] = {"size": {"longest_edge": 56}}
    family = family_from_config(
        make_config(
            model={"family": name},
            encoders={"vision": encoder},
            backbone={"config": language_configs[language]},
            connector={"hidden_act": "relu", "bias": False},
        )
    )
    state = trained_state(family).state_dict()
    family.export(state, tmp_path)
    again = family_from_config(make_config(**whole(tmp_path, name)))
    reloaded = again.load_backbone()
    assert reloaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in reloaded.state_dict().items())
    assert type(reloaded.connector.act) is torch.nn.ReLU
    for size in ((50, 20), (13, 61)):
        assert again.image_layout("vision", *size) == family.image_layout("vision", *size)
        pixels = [family.preprocess("vision", noise(*size))]
        assert (again.preprocess("vision", noise(*size)) == pixels[0]).all()
        old, new = (each.load_encoder("vision").encode(pixels)[0] for each in (family, again))
        assert torch.equal(old, new)


def test_checkpoint_in_the_layout_of_the_class_in_memory(make_config, tmp_path):
    family = family_from_config(make_config())
    state = trained_state(family).state_dict()
    family.export(state, tmp_path)
    family.load_joined(state).save_pretrained(tmp_path, save_original_format=False)
    again = family_from_config(make_config(**whole(tmp_path)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.load_backbone().state_dict().items())
    assert again.load_encoder("vision").state_dict().keys() == family.load_encoder("vision").state_dict().keys()


@pytest.mark.parametrize("tower", ["siglip", "clip"])
def test_checkpoint_with_the_names_of_older_releases(make_config, tower_configs, noise, tmp_path, tower):
    family = family_from_config(make_config(encoders={"vision": {"config": tower_configs[tower]}}))
    family.export(trained_state(family).state_dict(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = family_from_config(make_config(**whole(tmp_path)))
    pixels = [family.preprocess("vision", noise(30, 20))]
    old, new = (each.load_encoder("vision").encode(pixels)[0] for each in (family, again))
    assert torch.equal(old, new)


def test_pickled_weights_are_not_read(make_config, tmp_path):
    family = family_from_config(make_config())
    family.export(family.load_backbone().state_dict(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        family_from_config(make_config(**whole(tmp_path))).load_backbone()


def test_another_image_token_than_the_checkpoints_is_refused(make_config, tmp_path):
    family = family_from_config(make_config())
    family.export(family.load_backbone().state_dict(), tmp_path)
    sections = whole(tmp_path)
    sections["model"]["image_token"] = "<picture>"
    with pytest.raises(ConfigError, match=r"'<picture>' has id 41, .* is 40 \('<image>'\)"):
        family_from_config(make_config(**sections))


@pytest.mark.parametrize("tower", ["siglip", "dinov2"])
def test_variable_export_is_used_as_its_docstring_says(
    make_config, tower_configs, noise, pack, sample_of, tmp_path, tower
):
    encoder = {"config": tower_configs[tower], "image_processor": {"size": {"longest_edge": 56}}}
    family = family_from_config(make_config(model={"family": "variable_llava"}, encoders={"vision": encoder}))
    backbone = trained_state(family)
    family.export(backbone.state_dict(), tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    image = noise(100, 40)
    inputs = processor(images=family.resize(image), text="w1 <image> w2 w3", return_tensors="pt")
    layout = family.image_layout("vision", *image.size)
    assert (inputs["input_ids"] == family.image_token_id).sum() == layout.num_tokens == 8
    (rows,) = family.load_encoder("vision").encode([family.preprocess("vision", image)])
    with torch.no_grad():
        projected = backbone.connector(rows)
        if tower == "siglip":
            features = model.get_image_features(
                inputs.pop("pixel_values"), interpolate_pos_encoding=True, return_dict=True
            )
            inputs["mm_encoder_outputs"] = {"image": features}
        output = model(**inputs)
    assert torch.allclose(output.image_hidden_states.flatten(0, -2), projected, atol=1e-5)
    assert output.logits.isfinite().all()


@pytest.mark.parametrize("tower", ["siglip", "clip", "dinov2", "registers", "uneven"])
@pytest.mark.parametrize("stored", [False, True])
def test_an_export_is_what_hugging_face_writes_of_the_whole_model(make_config, tower_configs, tmp_path, tower, stored):
    family = family_from_config(make_config(encoders={"vision": {"config": tower_configs[tower]}}))
    if stored:  # the tower's weights then come from files, tensor by tensor
        start = tmp_path / "start"
        family.export(trained_state(family).state_dict(), start)
        family = family_from_config(make_config(**whole(start)))
    state = trained_state(family).state_dict()
    family.export(state, tmp_path / "ours")
    family.load_joined(state).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) and tensor.dtype == torch.float32 for name, tensor in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


class Counted(Mapping):
    """Gives copies of tensors, and counts the bytes of those that are alive."""

    def __init__(self, state):
        self.state, self.alive, self.peak, self.lookups = state, 0, 0, 0

    def __getitem__(self, name):
        tensor = self.state[name].clone()
        self.lookups += 1
        self.alive += tensor.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)
        return tensor

    def _freed(self, nbytes):
        self.alive -= nbytes

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_holds_one_shard_and_one_tensor_at_most(make_config, tmp_path, dtype):
    family = family_from_config(make_config())
    state = trained_state(family).state_dict()
    largest = max(tensor.nbytes for tensor in state.values())
    limit = 2 * largest
    assert sum(tensor.nbytes for tensor in state.values()) > 4 * limit, "too small a model to tell"
    counted = Counted(state)
    family.export(counted, tmp_path, dtype, max_shard_nbytes=limit)
    assert counted.peak <= limit + largest
    assert counted.lookups == len(state) - 1, "each weight is read once; a tied head is not stored"
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((tmp_path / name).stat().st_size <= limit + (1 << 15) for name in shards)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert model.dtype == dtype
    expected = {name: tensor.to(dtype) for name, tensor in family.load_joined(state).state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    again = family_from_config(make_config(**whole(tmp_path))).load_backbone().state_dict()
    assert all(torch.equal(again[name], tensor.to(dtype).float()) for name, tensor in state.items())


def test_an_export_without_all_weights_is_refused(make_config, tmp_path):
    family = family_from_config(make_config())
    state = family.load_backbone().state_dict()
    del state["connector.linear_1.weight"]
    with pytest.raises(CheckpointError, match=r"1 weights of .* are missing, 'model\.multi_modal_projector\.linear_1"):
        family.export(state, tmp_path)


def test_wrong_weights_of_the_connector_are_named(make_config, tmp_path):
    family = family_from_config(make_config())
    family.export(family.load_backbone().state_dict(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("linear_2.weight"))
    weights[name] = weights[name][1:].contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = family_from_config(make_config(**whole(tmp_path)))
    said = rf"^model\.path: {name} of .* has shape \[63, 64\], the model \[64, 64\]; correct its config.json"
    with pytest.raises(ConfigError, match=said):
        again.load_backbone()
