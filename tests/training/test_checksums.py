"""Checksums find every flipped bit, and the digest of frozen weights adds up, however they are split."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import CheckpointError
from flowtrain.training import checkpoint_store as store
from flowtrain.training.checksums import FileSum, sum_of, sums_of, write_sums
from flowtrain.training.frozen import add_digests, check_frozen, digest_of_part, digests_of
from tests.training.test_checkpoint_store import META, write, write_and_commit


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_changes_the_sum(tmp_path_factory, content, data):
    path = tmp_path_factory.mktemp("sum") / "file"
    path.write_bytes(content)
    expected = sum_of(path)
    assert expected.difference(path) is None and expected.nbytes == len(content)
    flip(path, data.draw(st.integers(0, 8 * len(content) - 1)))
    assert f"where {expected.crc32} was written" in expected.difference(path)


def test_every_bit_of_a_meta_file_counts(tmp_path):
    directory = write_and_commit(tmp_path, 3)
    path = directory / store.META_FILE
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flip(path, bit)
        assert store.problem_of(directory) is not None, (bit, chr(content[bit // 8]))
        path.write_bytes(content)
    assert store.problem_of(directory) is None


def test_a_corrupt_file_is_named_with_both_sums_and_the_one_before_is_used(tmp_path, caplog):
    first, second = write_and_commit(tmp_path, 1), write_and_commit(tmp_path, 2)
    flip(second / "shard", 5)
    assert store.latest_complete(tmp_path) == second, "its sizes are right"
    assert next(store.intact_newest_first(tmp_path)) == first
    assert "step-00000002 is corrupt and is not used: shard has CRC-32 c70c9ff2 where ff41d912" in caplog.text
    assert second.exists()
    assert next(store.intact_newest_first(tmp_path, set_aside=True)) == first
    assert [path.name[:21] for path in tmp_path.iterdir() if path != first] == ["corrupt-step-00000002"]
    again = write_and_commit(tmp_path, 2)
    assert next(store.intact_newest_first(tmp_path)) == again, "the run reaches the step again"
    assert first.exists()


def test_a_file_that_the_disk_refuses_to_read_is_corrupt(tmp_path, monkeypatch, caplog):
    first, second = write_and_commit(tmp_path, 1), write_and_commit(tmp_path, 2)

    def read(path):
        if path.parent == second:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return sum_of(path)

    monkeypatch.setattr("flowtrain.training.checksums.sum_of", read)
    assert next(store.intact_newest_first(tmp_path)) == first
    assert "step-00000002 is corrupt and is not used: it cannot be read: [Errno 5] Input/output error" in caplog.text


def test_what_a_rank_wrote_and_is_gone_is_not_committed(tmp_path):
    temporary = write(tmp_path, 2)
    write_sums(temporary, sums_of([temporary / "shard"]) | {"other": FileSum(7, "00000000")})
    with pytest.raises(CheckpointError, match="other has no file where 7 bytes were written"):
        store.commit(temporary, replace(META, step=2), keep=2)
    (temporary / "other").write_bytes(bytes(7))
    final = store.commit(temporary, replace(META, step=2), keep=2)
    assert store.read_meta(final).files["other"] == FileSum(7, "00000000"), "the ranks' own sums are kept"
    assert "other has CRC-32" in store.corruption_of(final)


@pytest.mark.parametrize("fails", ["sync_directory", "_prune"])
def test_a_commit_that_failed_is_repeated_with_the_sums_of_the_ranks(tmp_path, monkeypatch, fails):
    temporary = write(tmp_path, 2)
    write_sums(temporary, sums_of([temporary / "shard"]))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(store, fails, full)
        store.commit(temporary, replace(META, step=2), keep=2)
    if temporary.exists():
        flip(temporary / "shard", 5)
    final = store.commit(temporary, replace(META, step=2), keep=2)
    assert store.latest_complete(tmp_path) == final
    assert (store.corruption_of(final) is not None) == (fails == "sync_directory"), "damaged between the calls"


def test_a_checkpoint_of_schema_1_is_read_with_its_sizes_alone(tmp_path):
    directory = write_and_commit(tmp_path, 2)
    values = json.loads((directory / store.META_FILE).read_text())
    values |= {"schema": 1, "files": {"shard": 3}}
    del values["crc32"]
    (directory / store.META_FILE).write_text(json.dumps(values))
    assert next(store.intact_newest_first(tmp_path)) == directory
    assert store.read_meta(directory).state == META.state
    (directory / "shard").write_bytes(b"")
    assert store.problem_of(directory) == "shard has 0 bytes where 3 bytes were written"


# --- frozen weights ------------------------------------------------------------------------------------------------


def whole(tensor):
    return tuple(slice(0, size) for size in tensor.shape)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 2**31), st.data())
def test_digests_of_parts_add_up(shape, seed, data):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    expected = digest_of_part("a.b", tensor, whole(tensor))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    parts = []
    for rows in (slice(0, cut), slice(cut, shape[dim])):
        index = tuple(rows if each == dim else slice(0, size) for each, size in enumerate(shape))
        parts.append(digests_of([("a.b", tensor[index], index)]))
    assert add_digests(parts).get("backbone", 0) == expected


@given(st.integers(0, 2**31), st.integers(0, 34), st.integers(0, 31))
def test_a_flipped_bit_of_a_weight_changes_the_digest(seed, element, bit):
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[element] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest_of_part("a", tensor, whole(tensor)) != digest_of_part("a", changed, whole(changed))


def test_the_digest_knows_places_and_names():
    tensor = torch.arange(12.0).view(3, 4)
    digests = {digest_of_part(name, each, whole(each)) for name, each in (("a", tensor), ("b", tensor))}
    digests |= {digest_of_part("a", each, whole(each)) for each in (tensor.flip(0), tensor.flip(1))}
    digests |= {
        digest_of_part("a", tensor.T.contiguous(), whole(tensor.T)),
        digest_of_part("a", tensor.bfloat16(), whole(tensor)),
    }
    assert len(digests) == 6


def test_a_large_tensor_is_summed_in_pieces(monkeypatch):
    tensor = torch.randn(40, 3, 2)
    expected = digest_of_part("a", tensor, whole(tensor))
    monkeypatch.setattr("flowtrain.training.frozen._CHUNK_ELEMENTS", 16)
    assert digest_of_part("a", tensor, whole(tensor)) == expected


def test_another_frozen_module_is_refused_with_both_digests():
    then, now = ({"backbone": {"origin": f"backbone.path {name}", "digest": name * 16}} for name in "ab")
    check_frozen(then, then, "x")
    with pytest.raises(
        CheckpointError, match=r"backbone of digest a{16} \(from backbone.path a\), which now has dig.* b{16}"
    ):
        check_frozen(then, now, "x")
    with pytest.raises(CheckpointError, match="which now is not frozen"):
        check_frozen(then, {}, "x")
