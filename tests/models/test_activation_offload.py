"""Activations that wait in host memory: the same bits, each stored once, and all memory given back."""

from __future__ import annotations

import gc
from random import Random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flowtrain.models import host_memory
from flowtrain.models.activation_memory import applied
from flowtrain.models.activation_offload import SMALL_NBYTES, store_for
from flowtrain.models.host_memory import HostMemory
from flowtrain.pipeline.actions import MemoryStrategy
from tests.models.ranks import QWEN3, full_gradients, make_backbone, make_batch

KEEP, OFFLOAD = MemoryStrategy.KEEP, MemoryStrategy.OFFLOAD
LENGTHS = (40, 60)
HOST = store_for(torch.device("cpu")).host


@pytest.fixture(autouse=True)
def nothing_stays():
    gc.collect()
    assert HOST.nbytes == 0
    HOST.peak_nbytes = 0  # others of this process may have held more
    yield
    gc.collect()
    assert HOST.nbytes == 0


def gradients(backbone, *batches, memory):
    """Of batches whose graphs are all alive when the first backward begins."""
    backbone.zero_grad()
    for loss in [backbone(**batch, memory=memory) for batch in batches]:
        loss.backward()
    return full_gradients(backbone)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("settings", [{}, {"model_type": "llama", "attention_bias": True}, {"model_type": "qwen2"}])
def test_gradients_are_the_same_to_the_bit(settings):
    backbone, batches = make_backbone(QWEN3 | settings), [make_batch(seed, (40, 20 + seed)) for seed in range(3)]
    expected = gradients(backbone, *batches, memory=KEEP)
    assert_same_bits(gradients(backbone, *batches, memory=OFFLOAD), expected)


def kept_by_layers(backbone):
    """Storages that decoder layers' operators keep, by address, without small ones and parameters; all stay alive."""
    storages, alive = {}, []

    def pack(tensor):
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALL_NBYTES:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    layers = backbone.decoder_layers
    for layer in layers:
        own = layer.forward

        def forward(*args, own=own, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return own(*args, **kwargs)

        layer.forward = forward
    backbone(**make_batch(lengths=LENGTHS)).backward()
    for layer in layers:
        del layer.forward
    parameters = {parameter.untyped_storage().data_ptr() for parameter in backbone.parameters()}
    assert parameters & storages.keys(), "layers save weights, so this test looks at their exemption"
    return {address: nbytes for address, nbytes in storages.items() if address not in parameters}


def test_each_storage_is_stored_once_and_parameters_never():
    backbone = make_backbone(QWEN3)
    expected = sum(kept_by_layers(backbone).values())
    loss = backbone(**make_batch(lengths=LENGTHS), memory=OFFLOAD)
    assert HOST.nbytes == expected > 0
    other = backbone(**make_batch(lengths=LENGTHS), memory=OFFLOAD)
    assert HOST.nbytes == 2 * expected == HOST.peak_nbytes
    loss.backward()
    assert HOST.nbytes == expected
    other.backward()


def test_memory_is_used_again():
    backbone = make_backbone(QWEN3)
    gradients(backbone, make_batch(lengths=LENGTHS), memory=OFFLOAD)
    bound = HOST.bound_nbytes
    for seed in range(3):
        gradients(backbone, make_batch(seed, (30, 70 - seed)), memory=OFFLOAD)
    assert HOST.bound_nbytes == bound


class Squares(nn.Module):
    """Saves its input, and a view of it, and two results."""

    def __init__(self, seen):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = seen

    def forward(self, x):
        y = x * x
        self.seen.append(y.untyped_storage()._weak_ref())
        return (y[1:] * y[1:].t().contiguous().t()).exp().sum() * self.scale + (y * 0).sum() + x.sum()


def test_the_device_keeps_what_two_layers_saved():
    seen = []
    layers = [Squares(seen) for _ in range(4)]
    x = torch.linspace(-1, 1, 32 * 16).view(32, 16).requires_grad_()
    with applied(OFFLOAD, layers):
        total = x
        for layer in layers:
            total = x * layer(total * 1.0) * 1e-3
    is_gone = [torch.UntypedStorage._expired(each) for each in seen]
    assert is_gone == [True, True, True, False]
    total.sum().backward()
    offloaded, x.grad = x.grad, None
    total = x
    for layer in layers:
        total = x * layer(total * 1.0) * 1e-3
    total.sum().backward()
    assert torch.equal(offloaded, x.grad)
    assert all(torch.UntypedStorage._expired(each) for each in seen)
    for each in seen:
        torch.UntypedStorage._free_weak_ref(each)


class ChangesInPlace(nn.Module):
    """Changes a tensor after saving it, which autograd refuses without offload too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000))

    def forward(self, x):
        y = x * 2
        z = y.exp() + y * y
        y.add_(1)
        return (z * self.scale).sum()


def test_a_saved_tensor_must_not_change():
    layers = [ChangesInPlace()]
    with pytest.raises(AssertionError, match="changed in place"), applied(OFFLOAD, layers):
        layers[0](torch.ones(1000, requires_grad=True))


def test_a_graph_without_backward_gives_its_memory_back():
    layers = [Squares([])]
    with applied(OFFLOAD, layers):
        result = layers[0](torch.ones(32, 16, requires_grad=True))
    assert HOST.nbytes > 0
    del result
    assert HOST.nbytes == 0


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_fsdp_frees_between_uses(dtype):
    results = []
    for memory in (KEEP, OFFLOAD):
        backbone = make_backbone(QWEN3)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in backbone.decoder_layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
        fully_shard(backbone, mp_policy=policy, reshard_after_forward=False)
        results.append(gradients(backbone, make_batch(0, LENGTHS), make_batch(1, LENGTHS), memory=memory))
    assert_same_bits(results[1], results[0])


def test_host_memory_keeps_contents_apart(monkeypatch):
    monkeypatch.setattr(host_memory, "SLAB_NBYTES", 4096)
    random, host, held = Random(3), HostMemory(pinned=False), {}
    for number in range(300):
        if held and random.random() < 0.5:
            runs, value, nbytes = held.pop(random.choice(list(held)))
            pieces = host.pieces(runs)
            assert sum(map(len, pieces)) == nbytes and all((piece == value).all() for piece in pieces)
            host.free(runs)
        else:
            nbytes = random.randrange(1, 20_000)
            runs = host.allocate(nbytes)
            for piece in host.pieces(runs):
                piece.fill_(number % 251)
            held[number] = runs, number % 251, nbytes
        assert host.nbytes == sum(nbytes for _, _, nbytes in held.values()) <= host.peak_nbytes
    assert host.bound_nbytes % 4096 == 0
