"""Memory of many configurations at once is that of each one alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.allocator.candidates import CandidateColumns
from flowtrain.allocator.memory import backbone_memory, backbone_peaks
from flowtrain.allocator.slices import Slices
from flowtrain.costs.model_spec import TrainedBackbone
from flowtrain.costs.training_setup import TrainingSetup
from flowtrain.pipeline.partition import build_partition
from flowtrain.pipeline.schedules.one_f_one_b import in_flight_by_chunk, in_flight_of_chunks
from flowtrain.types.plan import Degrees
from tests.allocator.worlds import MODEL, workload

LAYERS = 12
WORDS = st.sampled_from(["none", "full", "selective", "offload", "every_n"])
LISTS = st.lists(st.sampled_from(["none", "full", "selective", "offload"]), min_size=LAYERS, max_size=LAYERS)
WHOLE, TABLE = MODEL.backbone.layer_parameters, MODEL.backbone.head_parameters
PARTS = st.builds(
    TrainedBackbone,
    layers=st.lists(st.sampled_from([0, 0, WHOLE // 3, WHOLE]), min_size=LAYERS, max_size=LAYERS).map(tuple),
    matrices=st.just((0,) * LAYERS),
    embedding=st.sampled_from([0, TABLE]),
    norm=st.just(0),
    head=st.just(0),
    reaches_layers=st.booleans(),
)


@given(pp=st.integers(1, 9), chunks=st.integers(1, 4), num_microbatches=st.integers(1, 90))
def test_microbatches_in_flight_are_the_schedules(pp: int, chunks: int, num_microbatches: int) -> None:
    partition = build_partition(pp * chunks, pp, chunks)
    each = [in_flight_by_chunk(partition, rank, num_microbatches) for rank in range(pp)]
    pps, counts = np.full(pp, pp), np.full(pp, num_microbatches)
    assert in_flight_of_chunks(pps, np.arange(pp), counts, chunks).tolist() == each


@settings(max_examples=150)
@given(data=st.data())
def test_peaks_of_columns_are_those_of_each_configuration(data: st.DataObject) -> None:
    chunks = data.draw(st.sampled_from([1, 2, 3]))
    setup = TrainingSetup(
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        activation_checkpointing=data.draw(WORDS | LISTS.map(tuple)),
        checkpoint_every=data.draw(st.integers(2, 4)),
        sequence_parallel=data.draw(st.booleans()),
    )
    tied = data.draw(st.booleans())
    trained = data.draw(st.none() | PARTS)
    model = replace(MODEL, backbone=replace(MODEL.backbone, num_layers=LAYERS, tied_embeddings=tied, trained=trained))
    batch = data.draw(st.integers(1, 300))
    tokens, shardings = st.integers(2048, 20000), st.sampled_from(["full", "gradients", "hybrid"])
    variants = [
        (workload(global_batch_size=batch, microbatch_tokens=size), replace(setup, sharding=sharding))
        for size, sharding in data.draw(st.lists(st.tuples(tokens, shardings), min_size=1, max_size=4))
    ]
    degrees = data.draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, LAYERS // chunks), st.sampled_from([1, 2, 4])),
            min_size=1,
            max_size=8,
        )
    )
    dp, pp, tp = (np.array(each) for each in zip(*degrees, strict=True))
    each = np.array([data.draw(st.booleans()) for _ in degrees])
    variant = np.array([data.draw(st.integers(0, len(variants) - 1)) for _ in degrees])
    is_hybrid = [variants[index][1].sharding == "hybrid" for index in variant]
    shards = np.array(
        [data.draw(st.integers(1, size)) if some else size for size, some in zip(dp.tolist(), is_hybrid, strict=True)]
    )
    counts = np.array(
        [variants[at][0].num_microbatches(dp[index : index + 1])[0] for index, at in enumerate(variant.tolist())]
    )
    columns = CandidateColumns("backbone", "h200", dp, pp, tp, each)
    slices = Slices(chunks)
    found = backbone_peaks(model, variants, slices, columns, variant, shards, counts)
    for index, (one_dp, one_pp, one_tp) in enumerate(degrees):
        sizes, own = variants[variant[index]]
        reduction = "microbatch" if each[index] else "step"
        alone = replace(own, shard_size=int(shards[index]), gradient_reduction=reduction)
        memory = backbone_memory(model, sizes, alone, Degrees(one_dp, one_pp, one_tp), slices)
        assert found[index] == memory.peak
