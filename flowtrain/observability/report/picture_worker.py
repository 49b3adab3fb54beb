"""Makes small JPEGs of images that nobody trusts: a program of its own, under limits, that ``pictures.py`` starts.

It imports nothing of FlowTrain. Standard input has frames (8 bytes of length, then the bytes); for each one, standard
output gets a frame with the small picture, of length 0 if there is none.
"""

from __future__ import annotations

import contextlib
import io
import resource
import struct
import sys
import warnings

from PIL import Image

SIDE, QUALITY = 176, 80
MAX_PIXELS = 64_000_000
MEMORY_NBYTES, CPU_S = 1 << 30, 10
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
LENGTH = struct.Struct(">Q")


def limit_process() -> None:
    """Give up what a picture does not need: memory, time, files, children."""
    limits = {
        resource.RLIMIT_AS: MEMORY_NBYTES,
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_NPROC: 0,
    }
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(name, (value, value))


def small_picture(data: bytes) -> bytes:
    """Return a JPEG of an image, at most ``SIDE`` pixels wide and high; empty if it cannot be read."""
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with Image.open(io.BytesIO(data), formats=known) as image:
            if image.width * image.height > MAX_PIXELS:
                return b""
            image.draft("RGB", (SIDE, SIDE))
            image.thumbnail((SIDE, SIDE))
            picture = _on_white(image)
        found = io.BytesIO()
        picture.save(found, "JPEG", quality=QUALITY, optimize=True)
        return found.getvalue()
    except Exception:  # decoders raise anything; there is no picture then
        return b""


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image without transparency, and without anything but its pixels."""
    shown = image.convert("RGBA")
    picture = Image.new("RGB", shown.size, "white")
    picture.paste(shown, mask=shown.getchannel("A"))
    return picture


def import_all() -> None:
    """Read a picture of each format, since decoders import modules late, and no file can be opened under limits."""
    Image.init()
    for name in FORMATS:
        with contextlib.suppress(Exception):  # this Pillow cannot write the format
            example = io.BytesIO()
            Image.new("P" if name == "GIF" else "RGB", (8, 8)).save(example, name)
            small_picture(example.getvalue())


def main() -> None:
    """Answer every frame of standard input."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    import_all()
    limit_process()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        data = source.read(LENGTH.unpack(head)[0])
        found = small_picture(data)
        answers.write(LENGTH.pack(len(found)) + found)
        answers.flush()


if __name__ == "__main__":
    main()
