"""Pictures are made anew, in a process that may do little."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from flowtrain.observability.report import picture_worker, pictures
from flowtrain.observability.report.pictures import LENGTH, Pictures, small_pictures

pytestmark = pytest.mark.processes

MARK = b"made by another encoder"


def encoded(size: tuple[int, int] = (400, 300), form: str = "PNG", mode: str = "RGB") -> bytes:
    found = io.BytesIO()
    Image.new(mode, size, None if mode == "P" else "teal").save(found, form)
    return found.getvalue()


def bomb() -> bytes:
    """A PNG of 30,000 x 30,000 pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_images_become_small_jpegs_and_others_nothing() -> None:
    images = [
        encoded(),
        b"not an image",
        encoded((20, 500), "GIF", "P"),
        bomb(),
        encoded(form="WEBP", mode="RGBA"),
        b"",
    ]
    made = small_pictures([*images, encoded(form="JPEG") + MARK])
    sizes = []
    for data in made:
        if not data:
            sizes.append(None)
            continue
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.format == "JPEG" and picture.mode == "RGB" and not picture.getexif()
            sizes.append(picture.size)
    assert sizes == [(176, 132), None, (7, 176), None, (176, 132), None, (176, 132)]
    assert MARK not in made[-1]


@pytest.mark.parametrize("form", picture_worker.FORMATS)
def test_every_format_is_read_under_limits(form: str) -> None:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this Pillow cannot write {form}")
    (made,) = small_pictures([encoded(form=form)])
    with Image.open(io.BytesIO(made)) as picture:
        assert picture.size == (176, 132)


def test_what_kills_the_process_costs_one_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killer = tmp_path / "worker.py"
    source = Path(picture_worker.__file__).read_text()
    assert source.count("    known = [") == 1
    killer.write_text(source.replace("    known = [", '    if data == b"die": os._exit(9)\n    known = [', 1).replace(
        "import io\n", "import io\nimport os\n", 1))  # fmt: skip
    monkeypatch.setattr(pictures, "_WORKER", killer)
    made = small_pictures([encoded(), b"die", encoded()])
    assert [bool(data) for data in made] == [True, False, True]
    made = small_pictures([b"die"] * 10 + [encoded()])
    assert made == [b""] * 11, "it is not started for ever"


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "worker.py"
    sleeper.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(pictures, "_WORKER", sleeper)
    assert small_pictures([encoded()], timeout_s=0.2) == [b""]


def test_the_process_can_neither_open_a_file_nor_write_one_nor_start_another() -> None:
    source = f"""
import runpy, subprocess, sys
worker = runpy.run_path({picture_worker.__file__!r})
worker["limit_process"]()
def fails(call):
    try:
        call()
    except (OSError, MemoryError):
        return 1
    return 0
print(fails(lambda: open("/etc/hostname")), fails(lambda: bytearray(4 << 30)), fails(lambda: subprocess.run(["true"])))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["1", "1", "1"], done.stderr


def test_a_page_shows_pictures_as_its_own_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    file.write_bytes(encoded())
    found = Pictures()
    assert found.ask_file("a", file) and found.ask("b", b"no image")
    assert not found.ask_file("c", tmp_path / "absent") and not found.ask("d", b"")
    assert not found.ask("e", bytes(pictures.MAX_NBYTES + 1))
    shown = found.shown("a", 'a "b" <c>')
    assert shown is not None and 'alt="a &#34;b&#34; &lt;c&gt;"' in shown
    data = base64.b64decode(shown.partition("base64,")[2].partition('"')[0], validate=True)
    assert Image.open(io.BytesIO(data)).size == (176, 132)
    assert found.shown("b", "") is None and found.shown("c", "") is None


def test_pictures_that_are_off_start_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pictures, "small_pictures", lambda images: pytest.fail("it was asked") if images else [])
    found = Pictures(is_on=False)
    assert not found.ask("a", encoded()) and not found.ask_file("b", tmp_path)
    assert found.shown("a", "") is None


def test_the_worker_ends_with_its_input() -> None:
    command = [sys.executable, "-I", picture_worker.__file__]
    done = subprocess.run(command, input=LENGTH.pack(5)[:3], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")
