"""Vision towers split over ranks against the plain ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from flowtrain.errors import ConfigError
from flowtrain.models.encoder import VisionEncoder
from flowtrain.models.parallel_layers import ColwiseLinear, RowwiseLinear
from flowtrain.models.qwen3_vl_vision import Qwen3VisionStage
from flowtrain.models.tower_plans import TOWER_PLANS, distribute_tower, parallelize_tower
from flowtrain.models.towers import TOWERS
from flowtrain.models.vision_stage import VisionStage
from flowtrain.models.weights import tower_class
from flowtrain.pipeline.actions import MemoryStrategy
from tests.models.ranks import run_ranks
from tests.qwen3_vl import UNIT
from tests.qwen3_vl import VISION as QWEN3_VL

pytestmark = pytest.mark.processes

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
DINOV2 = {name: value for name, value in CLIP.items() if name != "intermediate_size"} | {"mlp_ratio": 2}
CONFIGS = {
    "clip": CLIP,
    "siglip": {**CLIP, "model_type": "siglip_vision_model"},
    "dinov2": {**DINOV2, "model_type": "dinov2"},
    "swiglu": {**DINOV2, "model_type": "dinov2", "use_swiglu_ffn": True},
    "registers": {**DINOV2, "model_type": "dinov2_with_registers"},
    "vit": {**CLIP, "model_type": "vit"},
    "uneven": {**CLIP, "intermediate_size": 47},
    "internvl": {**CLIP, "model_type": "internvl_vision"},
    "normed": {**CLIP, "model_type": "internvl_vision", "use_qk_norm": True, "norm_type": "rms_norm"},
}


def make_tower(values):
    """A tower with random weights everywhere, norms and biases too."""
    torch.manual_seed(3)
    settings = dict(values)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    tower = tower_class(config)._from_config(config)
    for parameter in tower.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return tower


def features(tower):
    """Of two images, from the last layer but one."""
    images = np.random.default_rng(0).standard_normal((2, 3, 28, 28), dtype=np.float32)
    rows = VisionEncoder(VisionStage(tower, feature_layer=-2, drop_first=False)).encode(list(images))
    return torch.stack(rows).numpy()


def split_features(configs):
    """Features of towers that are split over the ranks, and the parameters that a rank has of each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for values in configs:
        tower = make_tower(values)
        num_split = 0
        parallelize_tower(tower, mesh, "encoders.vision")
        for module in tower.modules():
            num_split += isinstance(module, ColwiseLinear | RowwiseLinear)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in tower.parameters()}
        results.append((features(tower), num_split, sum(storages.values())))
    return results


def test_every_known_tower_has_a_plan():
    own = {"qwen3_vl_vision"}  # of a family with a stage of its own
    assert TOWER_PLANS.keys() - own == TOWERS.keys() == {values["model_type"] for values in CONFIGS.values()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_features_equal_the_plain_ones(num_ranks):
    configs = list(CONFIGS.values())
    plain = [make_tower(values) for values in configs]
    expected = [features(tower) for tower in plain]
    for results in run_ranks(num_ranks, split_features, configs):
        for name, (found, num_split, nbytes), reference in zip(CONFIGS, results, expected, strict=True):
            difference = np.linalg.norm(found - reference) / np.linalg.norm(reference)
            assert difference < 1e-5, (name, difference)
            assert num_split == 3 * (7 if name == "swiglu" else 6), name
            assert nbytes < 0.85 * sum(p.numel() * 4 for p in make_tower(CONFIGS[name]).parameters()), name


def split_embedding(values):
    """Features of a tower of which only the embedding is computed."""
    encoder = VisionEncoder(VisionStage(make_tower(values), feature_layer=0, drop_first=False))
    parallelize_tower(encoder.tower, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "encoders.vision")
    return encoder.encode(list(np.ones((1, 3, 28, 28), np.float32)))[0].numpy()


def test_a_tower_without_computed_layers_is_whole_on_every_rank():
    expected = VisionEncoder(VisionStage(make_tower(CLIP), feature_layer=0, drop_first=False)).encode(
        [np.ones((3, 28, 28), np.float32)]
    )
    for found in run_ranks(2, split_embedding, CLIP):
        assert np.array_equal(found, expected[0].numpy())


def refusal(values):
    """What is said about a tower that cannot be split."""
    try:
        parallelize_tower(make_tower(values), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "encoders.vision")
    except ConfigError as error:
        return str(error)
    return None


def test_heads_that_do_not_divide_are_refused():
    values = {**CLIP, "hidden_size": 30, "num_attention_heads": 3}
    for said in run_ranks(2, refusal, values):
        assert said == "encoders.vision.tensor_parallel_size (2) does not divide the tower's num_attention_heads (3)"


def unit_features(tower, mesh=None):
    """Of images of two sizes, of Qwen3-VL's tower; split over the ranks of a mesh."""
    encoder = VisionEncoder(Qwen3VisionStage(tower))
    if mesh is not None:
        parallelize_tower(encoder.tower, mesh, "encoders.vision")
    rng = np.random.default_rng(0)
    shapes = [(3, rows * UNIT, columns * UNIT) for rows, columns in ((2, 3), (1, 4))]
    images = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    return torch.cat(encoder.encode(images)).numpy(), sum(each.numel() for each in encoder.tower.blocks.parameters())


def split_unit_features():
    """As ``unit_features``, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return unit_features(make_tower(QWEN3_VL), mesh)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fused_queries_keys_and_values_are_split_by_heads(num_ranks):
    expected, whole = unit_features(make_tower(QWEN3_VL))
    for found, held in run_ranks(num_ranks, split_unit_features):
        assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
        assert held < 1.2 * whole / num_ranks, "biases and norms are whole"


MEMORY = (MemoryStrategy.KEEP, MemoryStrategy.RECOMPUTE, MemoryStrategy.SELECTIVE)


def trained_stage(values):
    """A stage whose tower is trained, and whose norms and biases are random."""
    tower = make_tower(values)
    if values["model_type"] == QWEN3_VL["model_type"]:
        return Qwen3VisionStage(tower, trainable=True)
    return VisionStage(tower, feature_layer=-2, drop_first=False, trainable=True)


def trained_gradients(stage, memory):
    """Features of two microbatches, and the gradients of their sum; both forwards come before both backwards."""
    rng, side = np.random.default_rng(1), 28 if isinstance(stage, VisionStage) else 2 * UNIT
    outputs = []
    for count in (3, 2):
        images = [torch.from_numpy(rng.standard_normal((3, side, side), dtype=np.float32)) for _ in range(count)]
        outputs.append(stage(images, [(side, side)] * count, memory))
    for output in outputs:
        (output * torch.linspace(-1.0, 1.0, output.numel()).view_as(output)).sum().backward()
    found = {}
    for name, parameter in stage.named_parameters():
        gradient = parameter.grad
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).numpy()
    return [output.detach().numpy() for output in outputs], found


def split_gradients(cases):
    """Of towers that are split over the ranks, by tokens too or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = []
    for values, memory, sequence_parallel in cases:
        stage = trained_stage(values)
        distribute_tower(stage, mesh, sequence_parallel=sequence_parallel)
        found.append(trained_gradients(stage, memory))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_a_split_tower_equal_the_plain_ones(num_ranks):
    """Of towers with a class token, 4 ranks do not divide a microbatch's tokens."""
    towers = CONFIGS | {"qwen3_vl": QWEN3_VL}
    cases = [
        (name, memory, split)
        for name, memory, split in product(towers, MEMORY, (True, False))
        if memory is MemoryStrategy.KEEP or (split and name in ("siglip", "internvl", "qwen3_vl"))
    ]
    expected = {name: trained_gradients(trained_stage(values), MemoryStrategy.KEEP) for name, values in towers.items()}
    jobs = [(towers[name], memory, split) for name, memory, split in cases]
    for results in run_ranks(num_ranks, split_gradients, jobs):
        for case, (outputs, gradients) in zip(cases, results, strict=True):
            plain_outputs, plain = expected[case[0]]
            for output, reference in zip(outputs, plain_outputs, strict=True):
                assert np.linalg.norm(output - reference) < 1e-5 * np.linalg.norm(reference), case
            assert gradients.keys() == plain.keys(), case
            largest = max(np.abs(each).max() for each in plain.values())
            for name, gradient in gradients.items():
                assert np.abs(gradient - plain[name]).max() < 1e-5 * largest, (case, name)
