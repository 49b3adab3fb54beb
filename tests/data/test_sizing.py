from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageFile
from transformers import PreTrainedTokenizerFast

from flowtrain.config.data import DataConfig, SourceConfig
from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sizing import SizedResult, Sizer
from flowtrain.data.sources.base import RawImage, RawSample, Turn
from flowtrain.errors import SourceReadError
from flowtrain.types.samples import ImageLayout, PartSize, Rejection, RejectReason, SampleRef
from tests.data.kept import size

REF = SampleRef(5, 0, 3, 1)
Encode = Callable[..., bytes]


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Callable[..., PreTrainedTokenizerFast], chatml_marked: str) -> PreTrainedTokenizerFast:
    return byte_tokenizer(chatml_marked)


@pytest.fixture(scope="module")
def sizer(tokenizer: PreTrainedTokenizerFast, family: Callable[..., Any]) -> Callable[..., Sizer]:
    def make(**options: Any) -> Sizer:
        return Sizer(family(tokenizer), tokenizer, DataConfig(sources=(SourceConfig(path="x"),), **options))

    return make


def conversation(user: str, answer: str = "four") -> tuple[Turn, ...]:
    return (Turn("user", user), Turn("assistant", answer))


def test_without_vision_token_counts_stay_and_images_have_neither_part_nor_bytes(
    tokenizer: PreTrainedTokenizerFast, family: Callable[..., Any], encoded_image: Encode
) -> None:
    config = DataConfig(sources=(SourceConfig(path="x"),))
    plain, blind = (Sizer(family(tokenizer), tokenizer, config, keeps_images=keeps) for keeps in (True, False))
    raw = RawSample((RawImage(data=encoded_image(40, 12)),), conversation("a<image>b"))
    loaded = blind.load(REF, raw)
    assert not isinstance(loaded, Rejection) and not loaded.images
    seeing, text_only = size(plain, REF, raw), size(blind, REF, raw)
    assert isinstance(seeing, SizedResult) and isinstance(text_only, SizedResult)
    assert np.array_equal(text_only.text, seeing.text)
    assert text_only.sample == replace(seeing.sample, parts=seeing.sample.parts[:1], image_nbytes=())
    assert text_only.sample.num_vision_tokens > 0
    bad = size(blind, REF, RawSample((RawImage(data=b"broken"),), conversation("a<image>b")))
    assert isinstance(bad, Rejection) and bad.reason is RejectReason.CORRUPT_IMAGE


def test_images_are_expanded_and_counted(
    sizer: Callable[..., Sizer], tokenizer: PreTrainedTokenizerFast, encoded_image: Encode, monkeypatch: Any
) -> None:
    def never(self: ImageFile.ImageFile) -> None:
        raise AssertionError("sizing decoded an image")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    images = (RawImage(data=encoded_image(40, 12)), RawImage(data=encoded_image(8, 20, "JPEG")))
    result = size(sizer(), REF, RawSample(images, conversation("a<image>b<image>c")))
    assert isinstance(result, SizedResult)

    image_id = tokenizer.convert_tokens_to_ids("<image>")
    ids = [*tokenizer.encode("<|im_start|>user\na"), *[image_id] * 3, *tokenizer.encode("b"), *[image_id] * 5]
    ids += tokenizer.encode("c<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenizer.encode("four<|im_end|>")
    labels = [-100] * len(ids) + answer + [-100]
    ids += [*answer, *tokenizer.encode("\n")]
    assert result.text.tolist() == [ids, labels]
    assert result.text.dtype == np.int32 and result.text.flags.c_contiguous

    sample = result.sample
    assert sample.ref == REF
    assert (sample.num_tokens, sample.num_vision_tokens, sample.num_target_tokens) == (len(ids), 8, 5)
    assert sample.parts == (
        PartSize("text", 1, 0, len(ids), 8 * len(ids)),
        PartSize("vision", 2, 30 + 10, 10 + 2, 12 * 24),
    )
    assert result.text.nbytes == sample.parts[0].nbytes


def test_a_text_only_sample_has_one_part(sizer: Callable[..., Sizer]) -> None:
    result = size(sizer(), REF, RawSample((), conversation("What is two and two?")))
    assert isinstance(result, SizedResult)
    assert [part.name for part in result.sample.parts] == ["text"]
    assert result.sample.num_vision_tokens == 0


def test_the_longest_sample_and_one_more_token(sizer: Callable[..., Sizer], encoded_image: Encode) -> None:
    raw = RawSample((RawImage(data=encoded_image(8, 400)),), conversation("<image>"))
    accepted = size(sizer(), REF, raw)
    assert isinstance(accepted, SizedResult)
    length = accepted.sample.num_tokens
    assert isinstance(size(sizer(max_seq_len=length), REF, raw), SizedResult)
    rejected = size(sizer(max_seq_len=length - 1), REF, raw)
    assert isinstance(rejected, Rejection) and rejected.reason is RejectReason.OVERSIZED_SAMPLE
    assert f"{length} tokens (100 of them" in rejected.detail and f"({length - 1})" in rejected.detail


def test_what_cannot_be_sized_is_rejected(sizer: Callable[..., Sizer], encoded_image: Encode, tmp_path: Any) -> None:
    good, bad = RawImage(data=encoded_image(8, 8)), RawImage(data=b"GIF8")
    missing = RawImage(path=tmp_path / "absent.png")
    two = conversation("<image><image>")
    small = sizer(max_image_pixels=63)
    cases = [
        (sizer(), RawSample((good, bad), two), RejectReason.CORRUPT_IMAGE, "image 2 of 2: 4 bytes"),
        (sizer(), RawSample((missing, good), two), RejectReason.MISSING_IMAGE, "absent.png"),
        (small, RawSample((good,), conversation("<image>")), RejectReason.DECOMPRESSION_BOMB, "8 x 8 = 64"),
        (sizer(), RawSample((), conversation("q", " ")), RejectReason.EMPTY_ANSWER, "blank"),
    ]
    for used, raw, reason, detail in cases:
        rejection = size(used, REF, raw)
        assert isinstance(rejection, Rejection)
        assert (rejection.ref, rejection.reason) == (REF, reason)
        assert detail in rejection.detail


def test_a_rejection_names_row_image_and_file(
    sizer: Callable[..., Sizer], encoded_image: Encode, tmp_path: Any
) -> None:
    path = tmp_path / "b.jpg"
    path.write_bytes(b"no image")
    images = (RawImage(data=memoryview(encoded_image(8, 8))), RawImage(path=path))
    rejection = size(sizer(), REF, RawSample(images, conversation("<image><image>"), id="cat-17"))
    assert isinstance(rejection, Rejection)
    assert (rejection.id, rejection.image, rejection.path) == ("cat-17", 2, str(path))
    assert rejection.detail.startswith("image 2 of 2 (path ") and "b.jpg" in rejection.detail


@pytest.mark.parametrize("oversized", ["reject", "truncate_text"])
def test_text_is_bounded_before_it_is_tokenised(
    sizer: Callable[..., Sizer], oversized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = sizer(max_seq_len=512, max_text_nbytes=2000, oversized=oversized)

    def never(*args: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(ConversationEncoder, "encode", never)
    long = [conversation("a" * 1000, "b" * 1001), conversation("猫" * 600, "é" * 101), conversation("a" * 10_000_000)]
    for turns, found in zip(long, (2001, 2002, 10_000_004), strict=True):
        rejection = size(used, REF, RawSample((), turns))
        assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.OVERSIZED_SAMPLE
        assert rejection.detail == f"{found} bytes of text or more are more than data.max_text_nbytes (2000)"
    many = size(used, REF, RawSample((), conversation("", "y") * 300))
    assert isinstance(many, Rejection) and many.reason is RejectReason.OVERSIZED_SAMPLE
    assert many.detail == "600 turns need more tokens than data.max_seq_len (512)"
    monkeypatch.undo()
    assert "tokenised" not in str(size(used, REF, RawSample((), conversation("猫" * 600, "é" * 100))))


def test_a_lone_surrogate_is_malformed(sizer: Callable[..., Sizer]) -> None:
    rejection = size(sizer(), REF, RawSample((), conversation("fine", "ab\ud800c")))
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.MALFORMED_SAMPLE
    assert rejection.detail == "turn 2 of 2 has the lone surrogate '\\ud800' at character 2"


def test_the_images_of_a_sample_are_bounded_together(sizer: Callable[..., Sizer], encoded_image: Encode) -> None:
    data = encoded_image(40, 40)
    raw = RawSample((RawImage(data=data),) * 12, conversation("<image>" * 12))
    limit = 11 * len(data)
    assert limit >= 1 << 10
    rejection = size(sizer(max_image_nbytes=limit), REF, raw)
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.OVERSIZED_SAMPLE
    assert rejection.image == 12
    assert f"{12 * len(data)} bytes" in rejection.detail and f"data.max_image_nbytes ({limit})" in rejection.detail
    sized = size(sizer(max_image_nbytes=12 * len(data)), REF, raw)
    assert isinstance(sized, SizedResult) and sized.sample.image_nbytes == (len(data),) * 12


def test_a_source_that_counts_wrongly(sizer: Callable[..., Sizer], encoded_image: Encode) -> None:
    rejection = size(sizer(), REF, RawSample((RawImage(data=encoded_image()),) * 2, conversation("<image>")))
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.PLACEHOLDER_MISMATCH
    assert rejection.detail == "2 images for 1 places in the text"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("its sides differ by more than 200 times"), "9 x 8 pixels: its sides differ by more than 200"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero (line"),
    ],
)
def test_a_size_that_the_model_refuses(
    tokenizer: PreTrainedTokenizerFast, family: Any, encoded_image: Encode, error: Exception, said: str
) -> None:
    refusing = family(tokenizer)

    def image_layout(*args: Any) -> ImageLayout:
        raise error

    refusing.image_layout = image_layout
    used = Sizer(refusing, tokenizer, DataConfig(sources=(SourceConfig(path="x"),)))
    rejection = size(used, REF, RawSample((RawImage(data=encoded_image(9, 8)),), conversation("<image>")))
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.CORRUPT_IMAGE
    assert f"image 1 of 1: {said}" in rejection.detail


def test_an_image_without_a_patch(sizer: Callable[..., Sizer], encoded_image: Encode) -> None:
    rejection = size(sizer(), REF, RawSample((RawImage(data=encoded_image(3, 8)),), conversation("<image>")))
    assert isinstance(rejection, Rejection) and rejection.reason is RejectReason.CORRUPT_IMAGE
    assert "3 x 8 pixels are too small for a patch" in rejection.detail


def test_storage_and_memory_end_the_run(sizer: Callable[..., Sizer], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawSample((RawImage(data=b"x"),), conversation("<image>"))
    for error in (SourceReadError("no answer"), MemoryError(), KeyboardInterrupt()):

        def fail(*args: Any, error: BaseException = error) -> bytes:
            raise error

        monkeypatch.setattr(RawImage, "read", fail)
        with pytest.raises(type(error)):
            size(sizer(), REF, raw)


def test_the_system_prompt_counts(sizer: Callable[..., Sizer]) -> None:
    raw = RawSample((), conversation("q"))
    plain, prompted = size(sizer(), REF, raw), size(sizer(system_prompt="Be brief."), REF, raw)
    assert isinstance(plain, SizedResult) and isinstance(prompted, SizedResult)
    assert prompted.sample.num_tokens == plain.sample.num_tokens + len("system\nBe brief.\n") + 2
    assert prompted.sample.num_target_tokens == plain.sample.num_target_tokens


# --- data.oversized: truncate_text ------------------------------------------------------------------------------------

MIXED = st.lists(
    st.tuples(
        st.lists(st.integers(1, 6), max_size=3), st.text("ab ", min_size=1, max_size=9), st.text("xyz", min_size=1)
    ),
    min_size=1,
    max_size=3,
)
"""Rounds of a conversation: heights of the images before the question, in tokens; the question; the answer."""


@given(rounds=MIXED, limit=st.integers(8, 120))
def test_text_is_cut_at_its_end_and_images_never(
    sizer: Callable[..., Sizer], tokenizer: PreTrainedTokenizerFast, encoded_image: Encode, rounds: Any, limit: int
) -> None:
    heights = [height for images, _, _ in rounds for height in images]
    turns = []
    for images, question, answer in rounds:
        turns += conversation("<image>" * len(images) + question, answer)
    raw = RawSample(tuple(RawImage(data=encoded_image(4, 4 * height)) for height in heights), tuple(turns))
    whole = size(sizer(max_seq_len=1 << 20), REF, raw)
    cut = size(sizer(max_seq_len=limit, oversized="truncate_text"), REF, raw)
    assert isinstance(whole, SizedResult)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    kept, lost = whole.text[:, :limit], whole.text[0, limit:]
    can_be_cut = image_id not in lost and (kept[1, 1:] != -100).any()
    if not can_be_cut:
        assert isinstance(cut, Rejection) and cut.reason is RejectReason.OVERSIZED_SAMPLE
        assert f"{whole.sample.num_tokens} tokens" in cut.detail and f"({limit})" in cut.detail
        return
    assert isinstance(cut, SizedResult)
    assert cut.text.tolist() == kept.tolist() and cut.text.dtype == np.int32 and cut.text.flags.c_contiguous
    sample, before = cut.sample, whole.sample
    assert sample.num_tokens == min(limit, before.num_tokens) == cut.text.shape[1]
    assert sample.num_vision_tokens == before.num_vision_tokens == int((cut.text[0] == image_id).sum())
    assert sample.num_target_tokens == int((kept[1, 1:] != -100).sum()) > 0
    assert sample.parts[1:] == before.parts[1:], "the images are encoded as a whole"
    assert sample.parts[0] == PartSize("text", 1, 0, sample.num_tokens, cut.text.nbytes)


@pytest.mark.parametrize(
    ("user", "limit", "detail"),
    [
        ("<image>", 60, ", and cutting its end would cut"),  # in the middle of the image
        ("x" * 200, 100, ", and cutting its end would leave no token that bears loss"),
    ],
)
def test_what_cannot_be_cut_is_rejected_with_the_reason(
    sizer: Callable[..., Sizer], encoded_image: Encode, user: str, limit: int, detail: str
) -> None:
    images = (RawImage(data=encoded_image(8, 400)),) if "<image>" in user else ()
    rejected = size(sizer(max_seq_len=limit, oversized="truncate_text"), REF, RawSample(images, conversation(user)))
    assert isinstance(rejected, Rejection) and rejected.reason is RejectReason.OVERSIZED_SAMPLE
    assert detail in rejected.detail and f"({limit})" in rejected.detail
