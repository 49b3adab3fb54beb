"""Small pictures for a page, made anew by a process of their own that has limits (``picture_worker.py``).

The page holds only bytes that our own encoder wrote; a file that makes a decoder crash, loop or fill memory costs that
process alone.
"""

from __future__ import annotations

import base64
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from flowtrain.observability.report.markup import element

logger = logging.getLogger(__name__)

MAX_PICTURES = 120
"""In one page."""
MAX_NBYTES = 32 << 20
"""Of one image; larger ones get no picture."""
MAX_ALL_NBYTES = 128 << 20
TIMEOUT_S = 15.0
MAX_PROCESSES = 3
"""A process that dies is started again for the images after the one that killed it, so often."""
LENGTH = struct.Struct(">Q")  # of a frame, as the process reads it
_WORKER = Path(__file__).with_name("picture_worker.py")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG")


class Pictures:
    """Pictures by key, made together at the end: first ``ask`` for all, then ``shown``."""

    def __init__(self, is_on: bool = True) -> None:
        self._is_on = is_on
        self._asked: dict[str, bytes] = {}
        self._made: dict[str, bytes] | None = None
        self._nbytes = 0

    def ask(self, key: str, data: bytes) -> bool:
        """Ask for a picture of an encoded image; False if there are too many, or if it is too large."""
        if not self._is_on or len(data) > MAX_NBYTES or len(self._asked) >= MAX_PICTURES:
            return False
        if not data or self._nbytes + len(data) > MAX_ALL_NBYTES:
            return False
        assert self._made is None, "ask before the first picture is shown"
        self._asked[key] = data
        self._nbytes += len(data)
        return True

    def ask_file(self, key: str, path: Path) -> bool:
        """Ask for a picture of a file; False as ``ask``, and if it cannot be read."""
        if not self._is_on:
            return False
        try:
            if not path.is_file() or path.stat().st_size > MAX_NBYTES:
                return False
            return self.ask(key, path.read_bytes())
        except OSError:
            return False

    def shown(self, key: str, text: str) -> Markup | None:
        """Return a picture as an element, with a text for those who do not see it; None if there is none."""
        if self._made is None:
            made = small_pictures(list(self._asked.values()))
            self._made = dict(zip(self._asked, made, strict=True))
            self._asked.clear()
        data = self._made.get(key)
        if not data:
            return None
        source = f"data:image/jpeg;base64,{base64.b64encode(data).decode('ascii')}"
        return element("img", src=source, alt=text)


def small_pictures(images: Sequence[bytes], timeout_s: float = TIMEOUT_S) -> list[bytes]:
    """Return a small JPEG of each encoded image; empty where there is none."""
    made: list[bytes] = []
    for _ in range(MAX_PROCESSES):
        if len(made) >= len(images):
            break
        rest = images[len(made) :]
        found = _ask_process(rest, timeout_s)
        made += found
        if len(found) < len(rest):
            logger.info("no picture of an image: the process that makes them ended at it")
            made.append(b"")
    return made + [b""] * (len(images) - len(made))


def _ask_process(images: Sequence[bytes], timeout_s: float) -> list[bytes]:
    """Return the pictures of the first images, as far as one process gets."""
    frames = b"".join(LENGTH.pack(len(image)) + image for image in images)
    # Isolated: neither the environment nor a user's directories change what it imports.
    command = [sys.executable, "-I", str(_WORKER)]
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:
        done = subprocess.run(
            command,
            input=frames,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
        answer = done.stdout
    except subprocess.TimeoutExpired as late:
        answer = late.stdout or b""
    except OSError as error:
        logger.warning("pictures cannot be made: %s", error)
        return [b""] * len(images)
    return list(_frames(answer))[: len(images)]


def _frames(answer: bytes) -> Iterator[bytes]:
    """Yield the complete frames of an answer."""
    start = 0
    while start + LENGTH.size <= len(answer):
        (length,) = LENGTH.unpack_from(answer, start)
        start += LENGTH.size
        if start + length > len(answer):
            return
        yield answer[start : start + length]
        start += length
