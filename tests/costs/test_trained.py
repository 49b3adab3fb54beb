"""What name patterns leave to train, in parameters, FLOPs and memory, against real models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from flowtrain.allocator.candidates import Candidate
from flowtrain.allocator.memory import backbone_memory
from flowtrain.costs.activations import chunk_activation_nbytes
from flowtrain.costs.communication import TensorCommunication
from flowtrain.costs.flops import backbone_passes, backbone_training_flops
from flowtrain.costs.hf_config import from_hf_text_config
from flowtrain.costs.memory import predict_step_memory
from flowtrain.costs.model_spec import ModelSpec
from flowtrain.costs.profiled_times import ProfileTimes
from flowtrain.costs.trained import with_frozen, with_frozen_modules
from flowtrain.costs.training_setup import Chunk, TrainingSetup
from flowtrain.models.backbone import Backbone
from flowtrain.models.connector import Connector
from flowtrain.models.freezing import freeze_parameters
from flowtrain.models.stage import tied_names
from flowtrain.pipeline.actions import MemoryStrategy
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, SETUP, cluster, request, roofline_surrogate, workload
from tests.costs.test_flops import LENGTH, TEXT
from tests.costs.test_memory import CONNECTOR, MICROBATCH, NUM_LAYERS, SPEC, kept_nbytes, make_backbone, setup_of
from tests.costs.test_profile import DEVICE, PROFILE

LAYERS = "language_model.model.layers"
CHOICES = [
    ("connector",),
    ("backbone",),
    ("*embed_tokens*",),
    ("*lm_head*", f"{LAYERS}.[01].*"),
    ("*.mlp.*", "*norm*"),
    ("connector.linear_1.*", "language_model.model.norm.weight"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trained_of(backbone: Backbone, freeze: tuple[str, ...], *, trains_encoders: bool = False) -> ModelSpec:
    """The spec of a backbone of these tests with what is frozen of it."""
    spec = ModelSpec({}, CONNECTOR, from_hf_text_config(backbone.language_model.config.to_dict()))
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    return with_frozen(spec, shapes, tied_names(backbone), freeze, trains_encoders=trains_encoders)


@pytest.mark.parametrize("freeze", CHOICES, ids="-".join)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_require_gradients(freeze: tuple[str, ...], tied: bool) -> None:
    config = transformers.Qwen3Config(**TEXT | {"tie_word_embeddings": tied})
    backbone = Backbone(Connector(48, 32), transformers.Qwen3ForCausalLM(config))
    spec = replace(CONNECTOR, hidden_size=32, out_dim=32)
    model = ModelSpec({}, spec, from_hf_text_config(config.to_dict()))
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    found = with_frozen(model, shapes, tied_names(backbone), freeze, trains_encoders=False)
    freeze_parameters(backbone, freeze)
    counts = [
        sum(each.numel() for each in part.parameters() if each.requires_grad)
        for part in (backbone.connector, backbone.language_model)
        if part is not None
    ]
    assert [found.connector.num_trained_parameters, found.backbone.num_trained_parameters] == counts
    assert found.num_trainable_parameters(("encoders",)) == sum(counts)
    assert found.shapes() == model.shapes(), "a profile's facts do not depend on it"
    if not any(set("*.") & set(key) for key in freeze):
        assert with_frozen_modules(model, freeze, trains_encoders=False) == found


@pytest.mark.parametrize(
    ("freeze", "input_has_gradient", "attention_passes"),
    [
        ((f"{LAYERS}.0.*", "connector", "*embed_tokens*"), False, 1 + 3),
        ((f"{LAYERS}.0.*",), True, 3 + 3),
        (("*.mlp.*", "*norm*"), True, 3 + 3),
        (("*lm_head*", f"{LAYERS}.1.*"), True, 3 + 3),
        (("connector", "*embed_tokens*", f"{LAYERS}.*", "language_model.model.norm.*"), False, 1 + 1),
        (("connector", "*embed_tokens*", f"{LAYERS}.*", "*lm_head*"), False, 1 + 1),
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(
    freeze: tuple[str, ...], input_has_gradient: bool, attention_passes: int
) -> None:
    backbone = Backbone(Connector(48, 32), transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT)))
    spec = trained_of(backbone, freeze).backbone
    freeze_parameters(backbone, freeze)
    with FlopCounterMode(display=False) as counter:
        embeddings = torch.zeros(1, LENGTH, 32, requires_grad=input_has_gradient)
        backbone.language_model(inputs_embeds=embeddings).logits.sum().backward()
    both_triangles = attention_passes * 2 * spec.num_heads * spec.head_dim * LENGTH**2
    assert counter.get_total_flops() == backbone_training_flops(spec, [LENGTH], ("encoders",)) + both_triangles


def test_a_frozen_module_is_the_same_by_its_name_and_by_a_pattern() -> None:
    backbone = make_backbone("Qwen3", torch.float32)
    by_name, by_pattern = (trained_of(backbone, freeze) for freeze in (("backbone",), ("language_model.*",)))
    assert by_name == by_pattern
    plain, freeze = replace(by_name.backbone, trained=None), ("backbone", "encoders")
    for targets in (0, 5):
        counted = backbone_training_flops(by_name.backbone, [7, 9], ("encoders",), targets)
        assert counted == backbone_training_flops(plain, [7, 9], freeze, targets)
    assert backbone_passes(by_name.backbone, ()).matrices == backbone_passes(plain, freeze).matrices == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_frozen", [1, 3])
def test_leading_layers_that_are_frozen_keep_nothing(num_frozen: int, dtype: torch.dtype) -> None:
    backbone = make_backbone("Qwen3", dtype)
    freeze = ("connector", "*embed_tokens*", f"{LAYERS}.[0-{num_frozen - 1}].*")
    spec = trained_of(backbone, freeze)
    freeze_parameters(backbone, freeze)
    of_loss = dtype.itemsize * MICROBATCH.num_target_tokens * SPEC.hidden_size  # the head is frozen with the embedding
    kept = kept_nbytes(backbone, MemoryStrategy.KEEP, dtype) - of_loss
    chunk = Chunk(NUM_LAYERS)
    predicted = chunk_activation_nbytes(spec.backbone, spec.connector, chunk, setup_of(dtype), MICROBATCH)
    assert predicted == pytest.approx(kept, rel=0.05)
    assert predicted < chunk_activation_nbytes(SPEC, CONNECTOR, chunk, setup_of(dtype), MICROBATCH)


@pytest.mark.parametrize("freeze", CHOICES, ids="-".join)
@pytest.mark.parametrize("reduction", ["step", "microbatch"])
def test_gradients_and_states_are_those_of_what_is_trained(freeze: tuple[str, ...], reduction: str) -> None:
    backbone = make_backbone("Qwen3", torch.float32)
    spec, plain = trained_of(backbone, freeze), trained_of(backbone, ())
    freeze_parameters(backbone, freeze)
    trained = sum(each.numel() for each in backbone.parameters() if each.requires_grad)
    setup = TrainingSetup(gradient_reduction=reduction)  # type: ignore[arg-type]
    found, whole = (
        predict_step_memory(each.backbone, each.connector, (Chunk(NUM_LAYERS),), setup, MICROBATCH)
        for each in (spec, plain)
    )
    assert found.gradients == found.accumulated == pytest.approx(4 * trained, abs=4 * NUM_LAYERS)
    assert found.optimizer_state == 2 * found.gradients
    assert (found.parameters, found.gathered) == (whole.parameters, whole.gathered)
    assert found.reduced <= whole.reduced and found.loss <= whole.loss and found.peak < whole.peak


def test_stages_have_their_own_share() -> None:
    backbone = make_backbone("Qwen3", torch.float32)
    spec = trained_of(backbone, ("connector", "*embed_tokens*", f"{LAYERS}.[01].*"))
    first, last = (
        predict_step_memory(spec.backbone, spec.connector, (chunk,), TrainingSetup(), MICROBATCH)
        for chunk in (Chunk(2, is_last=False), Chunk(3, is_first=False, first_layer=2))
    )
    assert (first.gradients, first.optimizer_state, first.accumulated, first.reduced) == (0, 0, 0, 0)
    assert last.gradients == 4 * (3 * SPEC.layer_parameters + SPEC.hidden_size)


def test_a_frozen_backbone_is_not_planned_as_trained() -> None:
    frozen = with_frozen_modules(MODEL, ("backbone", "encoders"), trains_encoders=False)
    setup, degrees = TrainingSetup(sharding="gradients"), Degrees(dp=2, pp=2)
    trained, less = (backbone_memory(model, workload(), setup, degrees) for model in (MODEL, frozen))
    assert less.optimizer_state < 0.01 * trained.optimizer_state
    spared = trained.optimizer_state + trained.accumulated - less.optimizer_state - less.accumulated
    assert trained.peak - less.peak >= spared
    candidate = Candidate("backbone", "h200", Degrees(dp=8))
    asked = [request(cluster(h200=8), model, workload()) for model in (MODEL, frozen)]
    whole, part = (roofline_surrogate(each).step_time(candidate) for each in asked)
    assert part.optimizer < 0.05 * whole.optimizer and np.all(part.reducing <= whole.reducing)
    assert part.computing < whole.computing and part.gathering == whole.gathering


def test_a_profiles_layers_take_as_long_as_the_mean_layer() -> None:
    half, first = with_frozen_modules(MODEL, ("connector",), trains_encoders=False), MODEL.backbone.num_layers // 2
    whole = half.backbone.trained
    assert whole is not None
    layers, matrices = ((*(0,) * first, *each[first:]) for each in (whole.layers, whole.matrices))
    trained = replace(whole, layers=layers, matrices=matrices, embedding=0, reaches_layers=False)
    half = replace(half, backbone=replace(half.backbone, trained=trained))
    whole_s, half_s = (
        ProfileTimes(
            PROFILE,
            workload(),
            TensorCommunication(DEVICE, model, workload(), SETUP, 1.0),
            {"vision": 16384},
            {"vision": 1},
        ).layer_s(np.array([4096.0]), 1)
        for model in (MODEL, half)
    )
    assert half_s == pytest.approx(whole_s * (1 + 3) / 2 / 3), "half of the layers run forward alone"
