"""First weights: the same for every layout and reader, out of files or drawn, and never more than is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from flowtrain.errors import ConfigError
from flowtrain.models.attention import implementation_name
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.families.registry import family_from_config
from flowtrain.models.initial_weights import (
    BuiltWeights,
    DrawnWeights,
    Index,
    InitialWeights,
    JoinedWeights,
    local_index,
    materialize,
)
from flowtrain.models.parallel_layers import local_shard
from flowtrain.models.stage import take_stage
from flowtrain.models.stored_weights import StoredWeights
from flowtrain.models.tensor_parallel import parallelize
from flowtrain.models.weight_files import WeightFiles
from flowtrain.models.weights import checkpoint_state
from tests.models.ranks import FEATURE_DIM, QWEN3, full, run_ranks

CPU = torch.device("cpu")
UNTIED = {**QWEN3, "tie_word_embeddings": False}
YARN = {**UNTIED, "model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
GEMMA3 = {**QWEN3, "model_type": "gemma3_text", "num_hidden_layers": 2, "pad_token_id": 0}


def language_model(values: dict[str, Any]) -> PreTrainedModel:
    settings = dict(values)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    attention = implementation_name("sdpa")
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def skeleton_of(values: dict[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        return language_model(values)


def everything(shape: torch.Size) -> Index:
    return tuple(slice(0, size) for size in shape)


# --- drawn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [QWEN3, YARN, GEMMA3], ids=["qwen3", "yarn", "gemma3"])
def test_drawn_weights_follow_transformers_rules(values: dict[str, Any]) -> None:
    plain, drawn = language_model(values), DrawnWeights(skeleton_of(values), 3, "language")
    assert list(plain.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(drawn.read(name, everything(buffer.shape)), buffer), name
    for name, parameter in plain.named_parameters():
        found = drawn.read(name, everything(parameter.shape))
        if parameter.ndim < 2:
            assert torch.equal(found, parameter), name
        else:
            assert found.std().item() == pytest.approx(parameter.std().item(), rel=0.25), name


def test_what_is_drawn_depends_on_seed_and_name_alone() -> None:
    first, again, other = (DrawnWeights(skeleton_of(UNTIED), seed, "language") for seed in (3, 3, 4))
    name, shape = "model.layers.1.mlp.up_proj.weight", torch.Size((24, 16))
    torch.manual_seed(0)
    whole = first.read(name, everything(shape))
    again.read("model.layers.0.mlp.up_proj.weight", everything(shape))
    assert torch.equal(again.read(name, (slice(5, 9), slice(0, 16))), whole[5:9])
    assert not torch.equal(other.read(name, everything(shape)), whole)
    assert not torch.equal(first.read("model.layers.0.mlp.up_proj.weight", everything(shape)), whole)
    assert torch.random.initial_seed() == 0, "the global generator is left as it was"
    tied = DrawnWeights(skeleton_of(QWEN3), 3, "language")
    embedding = everything(torch.Size((36, 16)))
    assert torch.equal(tied.read("lm_head.weight", embedding), tied.read("model.embed_tokens.weight", embedding))


def test_a_tensor_without_a_rule_is_refused() -> None:
    skeleton = skeleton_of(QWEN3)
    skeleton.model.layers[0].register_parameter("gate", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ConfigError, match=r"no rule to initialise model\.layers\.0\.gate of Qwen3ForCausalLM"):
        DrawnWeights(skeleton, 3, "language").read("model.layers.0.gate", (slice(0, 3),))


# --- out of files ----------------------------------------------------------------------------------------------------


def stored(values: dict[str, Any], path: Path, vocab_size: int = 36) -> StoredWeights:
    skeleton = skeleton_of(values)
    drawn = DrawnWeights(skeleton, 3, "language")
    return StoredWeights(lambda: WeightFiles(str(path), "backbone.path"), skeleton, drawn, file_vocab_size=vocab_size)


def assert_reads(weights: InitialWeights, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = parameter.shape
        assert torch.equal(weights.read(name, everything(shape)), parameter.detach().float()), name
        part = (slice(1, 3), *everything(shape[1:]))
        assert torch.equal(weights.read(name, part), parameter.detach()[1:3].float()), name


def test_several_files_in_another_type(tmp_path: Path) -> None:
    model = language_model(UNTIED).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=4096)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    save_file({"consolidated": torch.zeros(3)}, tmp_path / "consolidated.safetensors")  # not in the index: not read
    assert_reads(stored(UNTIED, tmp_path), model)


def test_tied_weights_are_stored_under_either_name_and_a_model_without_head(tmp_path: Path) -> None:
    model = language_model(QWEN3)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    assert_reads(stored(QWEN3, tmp_path), model)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    assert_reads(stored(QWEN3, tmp_path), model)
    save_file({name.replace("model.embed_tokens", "lm_head"): weight for name, weight in weights.items()}, file)
    assert_reads(stored(QWEN3, tmp_path), model)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(file)
    assert_reads(stored(QWEN3, tmp_path), model)


def test_rows_of_new_tokens_are_drawn(tmp_path: Path) -> None:
    model = language_model(UNTIED)
    model.save_pretrained(tmp_path)
    grown = {**UNTIED, "vocab_size": 64}
    weights, drawn = stored(grown, tmp_path), DrawnWeights(skeleton_of(grown), 3, "language")
    for name, old in (("model.embed_tokens.weight", model.model.embed_tokens), ("lm_head.weight", model.lm_head)):
        expected = torch.cat([old.weight.detach(), drawn.read(name, (slice(36, 64), slice(0, 16)))])
        for rows in (slice(0, 64), slice(0, 30), slice(30, 40), slice(40, 64)):
            assert torch.equal(weights.read(name, (rows, slice(0, 16))), expected[rows]), (name, rows)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(4096.0).view(64, 64).to(torch.bfloat16)}, tmp_path / "model.safetensors")
    files = WeightFiles(str(tmp_path), "backbone.path")
    for index in ((slice(3, 5), slice(0, 64)), (slice(0, 64), slice(8, 10))):
        part = files._readers["weight"].get_slice("weight")[index]
        assert part.untyped_storage().nbytes() == 2 * 64 * 2
        assert torch.equal(files.read("weight", index), part.float())


def spoil(path: Path, **changed: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors") | {name.replace("__", "."): to for name, to in changed.items()}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__norm__weight": None}, r"1 weights of Qwen3ForCausalLM are missing in .*'model\.norm\.weight' first"),
        ({"model__norm__weight": torch.ones(17)}, r"model\.norm\.weight of .* has shape \[17\], the model \[16\]"),
        ({"model__norm__weight": torch.ones(16, dtype=torch.int8)}, r"stored as I8; .* dequantize"),
        ({"lm_head__weight": torch.ones(36, 16)}, r"tie_word_embeddings of .* differ; set it to false"),
    ],
    ids=["missing", "shape", "quantized", "tied"],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    language_model(QWEN3).save_pretrained(tmp_path)
    spoil(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"backbone.path: .*{message}"):
        stored(QWEN3, tmp_path).read("model.embed_tokens.weight", (slice(0, 36), slice(0, 16)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__norm__weight": None}, r"1 weights of Qwen3ForCausalLM are missing in .*'model\.norm\.weight' first"),
        (
            {"model__norm__weight": torch.ones(17)},
            r"model\.norm\.weight of .* has shape \[17\], the model \[16\]; correct",
        ),
        ({"lm_head__weight": torch.ones(36, 17)}, r"lm_head\.weight of .* has shape \[36, 17\], the model \[36, 16\]"),
    ],
    ids=["missing", "shape", "shape of a copy"],
)
def test_headers_alone_tell_that_files_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    language_model(QWEN3).save_pretrained(tmp_path)
    monkeypatch.setattr(WeightFiles, "read", None)
    stored(QWEN3, tmp_path).check()
    spoil(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"backbone.path: .*{message}"):
        stored(QWEN3, tmp_path).check()


def test_a_vocabulary_that_fits_neither_way_is_refused_with_the_files_number(tmp_path: Path) -> None:
    language_model(QWEN3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        stored({**QWEN3, "vocab_size": 64}, tmp_path, vocab_size=30).check()
    assert (
        "has shape [36, 16], the model [30, 16] by its vocab_size (30), which would grow to 64, the tokenizer's length "
        "rounded up; correct its config.json"
    ) in str(caught.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"model.path: .*index\.json is no index of safetensors files"):
        WeightFiles(str(tmp_path), "model.path")
    index.write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match="backbone.path: no weights can be read from"):
        WeightFiles(str(tmp_path), "backbone.path")
    with pytest.raises(ConfigError, match="model.path: no weights can be read from"):
        list(checkpoint_state(str(tmp_path), "vision"))
    (tmp_path / "gone.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match="backbone.path: no weights can be read from"):
        WeightFiles(str(tmp_path), "backbone.path")


def test_weights_like_transformers_own_loading(make_config: Any, language_configs: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**language_configs["llama"])
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    sections = {"backbone": {"path": str(tmp_path)}}
    backbone = family_from_config(make_config(**sections)).load_backbone()
    for name, tensor in model.state_dict().items():
        assert torch.equal(backbone.language_model.state_dict()[name], tensor), name
    for name, buffer in model.named_buffers():
        assert torch.equal(backbone.language_model.get_buffer(name), buffer), name


# --- into a module ---------------------------------------------------------------------------------------------------


class Recorded:
    """Counts what is read; the parameters named in ``refused`` must not be."""

    def __init__(self, weights: InitialWeights, refused: frozenset[str] = frozenset()) -> None:
        self._weights, self._refused = weights, refused
        self.num_values: dict[str, int] = {}

    def read(self, name: str, index: Index) -> torch.Tensor:
        assert name not in self._refused, name
        part = self._weights.read(name, index)
        self.num_values[name] = self.num_values.get(name, 0) + part.numel()
        return part


def backbone_skeleton(values: dict[str, Any]) -> Backbone:
    with torch.device("meta"):
        return Backbone(Connector(FEATURE_DIM, 16), language_model(values)).train()


def backbone_weights(values: dict[str, Any]) -> JoinedWeights:
    def connector() -> Connector:
        torch.manual_seed(1)
        return Connector(FEATURE_DIM, 16)

    language = DrawnWeights(backbone_skeleton(values).language_model, 3, "language")
    return JoinedWeights({"connector": BuiltWeights(connector), "language_model": language})


def whole_backbone(values: dict[str, Any]) -> Backbone:
    backbone = backbone_skeleton(values)
    materialize(backbone, CPU, backbone_weights(values), from_checkpoint=False)
    return backbone


def test_shared_parameters_stay_shared() -> None:
    model = whole_backbone(QWEN3).language_model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_what_a_checkpoint_brings_is_not_read() -> None:
    backbone, expected = backbone_skeleton(QWEN3), whole_backbone(QWEN3)
    weights = Recorded(backbone_weights(QWEN3), frozenset(backbone.state_dict()))
    materialize(backbone, CPU, weights, from_checkpoint=True)
    assert weights.num_values.keys() == {name for name, _ in expected.named_buffers()} != set()
    for name, buffer in expected.named_buffers():
        assert torch.equal(backbone.get_buffer(name), buffer), name


UNEVEN = {**UNTIED, "intermediate_size": 26, "hidden_size": 16}
"""A tensor rank has 13 rows of gate and up, which two replicas share as 7 and 6."""


def sharded_rank(values: dict[str, Any], dp: int, tp: int) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
    """Whole weights of two stages as gathered, values that were read, and values that the rank holds."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    whole, weights, gathered, held = backbone_skeleton(values), Recorded(backbone_weights(values)), {}, {}
    for layers in (range(0, 2), range(2, 3)):
        stage = take_stage(whole, layers, is_first=layers.start == 0, is_last=layers.stop == 3)
        if tp > 1:
            parallelize(stage, mesh["tp"])
        for layer in stage.decoder_layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
        materialize(stage, CPU, weights, from_checkpoint=False)
        for name, parameter in stage.named_parameters():
            gathered[name], held[name] = full(parameter), local_shard(parameter).numel()
            assert (
                local_shard(parameter).numel()
                == torch.empty(parameter.shape, device="meta")[local_index(parameter)].numel()
            )
    return gathered, weights.num_values, held


@pytest.mark.processes
@pytest.mark.parametrize(("values", "dp", "tp"), [(QWEN3, 1, 2), (UNEVEN, 2, 2)], ids=["tied-1x2", "uneven-2x2"])
def test_every_layout_has_the_same_weights_and_reads_its_shards_alone(values: dict[str, Any], dp: int, tp: int) -> None:
    expected = {name: full(parameter) for name, parameter in whole_backbone(values).named_parameters()}
    head = "language_model.lm_head.weight"
    expected.setdefault(head, expected["language_model.model.embed_tokens.weight"])  # in a stage of its own
    for gathered, read, held in run_ranks(dp * tp, sharded_rank, values, dp, tp):
        assert gathered.keys() == expected.keys()
        assert all((gathered[name] == weight).all() for name, weight in expected.items())
        assert {name: read.get(name, 0) for name in held} == held
    assert not dist.is_initialized()
