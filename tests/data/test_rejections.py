from __future__ import annotations

import pickle

import pytest

from flowtrain.data.rejections import BadImage, errors_of_image, rejected
from flowtrain.data.sources.bad_sample import errors_of_row
from flowtrain.data.sources.base import BadSample
from flowtrain.errors import DataError, OutOfPoolMemory, SourceReadError
from flowtrain.types.samples import Rejection, RejectReason, SampleRef

REF = SampleRef(5, 0, 3, 1)


class PanicException(BaseException):
    """Named like what the tokenizer's Rust code raises."""


def raised(error: BaseException) -> BaseException:
    """The error with a traceback, as it is caught."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_bad_sample_keeps_its_reason_and_the_rows_id() -> None:
    rejection = rejected(REF, BadSample(RejectReason.EMPTY_ANSWER, "turn 2 is blank"), "cat-17")
    assert rejection == Rejection(REF, RejectReason.EMPTY_ANSWER, "turn 2 is blank", id="cat-17")


@pytest.mark.parametrize("error", [TypeError("no text"), RecursionError("too deep"), PanicException("not a boundary")])
def test_an_unforeseen_error_says_what_and_where(error: BaseException) -> None:
    rejection = rejected(REF, raised(error))
    assert rejection.reason is RejectReason.MALFORMED_SAMPLE
    assert rejection.detail.startswith(f"{type(error).__name__}: {error} (line ")
    assert rejection.detail.endswith("of test_rejections.py)")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        SourceReadError("no answer"),
        DataError("damaged"),
        OutOfPoolMemory("full"),
        KeyboardInterrupt(),
        SystemExit(1),
    ],
)
def test_what_is_no_fault_of_the_sample_ends_the_run(error: BaseException) -> None:
    with pytest.raises(type(error)):
        rejected(REF, error)
    with pytest.raises(type(error)) as caught, errors_of_image(1, 2):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadSample(RejectReason.MISSING_IMAGE, "no file"), RejectReason.MISSING_IMAGE),
        (ZeroDivisionError("no file"), RejectReason.CORRUPT_IMAGE),
    ],
)
def test_an_image_is_named_by_its_number_and_path(error: Exception, reason: RejectReason) -> None:
    with pytest.raises(BadImage) as caught, errors_of_image(2, 3, "a/b.jpg"):
        raise error
    rejection = rejected(REF, caught.value, "cat-17")
    assert (rejection.reason, rejection.image, rejection.path, rejection.id) == (reason, 2, "a/b.jpg", "cat-17")
    assert rejection.detail.startswith("image 2 of 3 (path 'a/b.jpg'): ") and "no file" in rejection.detail
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, again.detail, again.number, again.path) == (reason, caught.value.detail, 2, "a/b.jpg")


def test_what_comes_from_data_is_bounded_and_can_be_written() -> None:
    with pytest.raises(BadImage) as caught, errors_of_image(1, 1, "\udcff" + "p" * 5000):
        raise BadSample(RejectReason.CORRUPT_IMAGE, "no header \ud800" + "v" * 5000)
    rejection = rejected(REF, caught.value, "\udfff" + "i" * 5000)
    assert rejection.id is not None and rejection.path is not None
    assert "no header" in rejection.detail, "the longest path leaves room for the reason"
    for text, longest in ((rejection.detail, 1000), (rejection.id, 200), (rejection.path, 1000)):
        assert len(text.encode("utf-8")) == longest and text.endswith("...")


def test_an_error_brings_the_rows_id_and_the_path_at_fault() -> None:
    with pytest.raises(BadSample) as caught, errors_of_row("outer"), errors_of_row("cat-17"):
        raise BadSample(RejectReason.MALFORMED_SAMPLE, "it is absolute", "/x.png")
    error = pickle.loads(pickle.dumps(caught.value))
    assert rejected(REF, error) == Rejection(REF, error.reason, "it is absolute", id="cat-17", path="/x.png")
    assert rejected(REF, error, "given").id == "given"


def test_no_signature_of_a_url_is_kept() -> None:
    url = "https://host/x.png?Signature=abc"
    assert rejected(REF, ValueError(f"cannot read {url}")).detail == "ValueError: cannot read https://host/x.png?..."
    with pytest.raises(BadImage) as caught, errors_of_image(1, 1, "https://host/a cat.png?Signature=abc"):
        raise BadSample(RejectReason.MISSING_IMAGE, f"no {url}")
    rejection = rejected(REF, caught.value)
    assert rejection.path == "https://host/a cat.png?..." and "Signature" not in rejection.detail
