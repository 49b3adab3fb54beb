"""Small data files, a tokenizer of single bytes, and a stand-in for a model family."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowtrain.config.data import SourceConfig
from flowtrain.data.sources.base import RawSample
from flowtrain.data.sources.registry import index_source, open_source
from flowtrain.data.sources.source_set import SourceSet
from flowtrain.types.samples import ImageLayout, SampleRef

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXT_TYPE = pa.struct([("user", pa.string()), ("assistant", pa.string())])
SCHEMA = pa.schema([("images", pa.list_(IMAGE_TYPE)), ("texts", pa.list_(TEXT_TYPE))])


class StubFamily:
    """Images of w x h pixels have w*h // 16 patches, w // 4 rows and h // 4 tokens, so that all numbers differ."""

    encoder_names = ("vision",)
    image_text = "<image>"

    def __init__(self, image_token_id: int) -> None:
        self.image_token_id = image_token_id

    def image_layout(self, encoder: str, width: int, height: int) -> ImageLayout:
        assert encoder == "vision"
        return ImageLayout(width * height // 16, width // 4, height // 4)

    def row_nbytes(self, encoder: str) -> int:
        assert encoder == "vision"
        return 24


class Rows:
    """The rows of one source, in any order."""

    def __init__(self, path: str | Path, **options: Any) -> None:
        config = SourceConfig(path=str(path), **options)
        self.index = index_source(config)
        self.source = open_source(config, self.index)
        self._set = SourceSet([self.source])

    def __len__(self) -> int:
        return len(self.source)

    def read(self, row: int) -> RawSample:
        return self._set.read(SampleRef(0, 0, row, 0))


def _encoded_image(width: int = 8, height: int = 8, fmt: str = "PNG", mode: str = "RGB") -> bytes:
    image = Image.new(mode, (width, height))
    image.putdata([(i % 256,) * len(image.getbands()) if len(image.getbands()) > 1 else i % 256
                   for i in range(width * height)])  # fmt: skip
    buffer = io.BytesIO()
    image.save(buffer, fmt)
    return buffer.getvalue()


def _byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>"]})
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[str | None], PreTrainedTokenizerFast]:
    """Build a tokenizer with one token per byte and this chat template."""
    return _byte_tokenizer


@pytest.fixture(scope="session")
def open_rows() -> type[Rows]:
    """Open one source by its path and the other keys of its configuration."""
    return Rows


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture(scope="session")
def chatml_marked() -> str:
    return CHATML_MARKED


@pytest.fixture(scope="session")
def family() -> Callable[[PreTrainedTokenizerFast], StubFamily]:
    return lambda tokenizer: StubFamily(tokenizer.convert_tokens_to_ids("<image>"))


@pytest.fixture(scope="session")
def encoded_image() -> Callable[..., bytes]:
    return _encoded_image


@pytest.fixture(scope="session")
def write_parquet() -> Callable[..., Path]:
    """Write rows of {images, texts} with ``rows_per_group`` rows per row group."""

    def write(
        path: Path, rows: Sequence[dict[str, Any]], rows_per_group: int = 3, schema: pa.Schema | None = None
    ) -> Path:
        pq.write_table(pa.Table.from_pylist(list(rows), schema or SCHEMA), path, row_group_size=rows_per_group)
        return path

    return write


@pytest.fixture(scope="session")
def write_json() -> Callable[[Path, list[Any]], Path]:
    """Write records as an array, or as lines if the name ends in ``l``."""

    def write(path: Path, records: list[Any]) -> Path:
        lines = "\n".join(json.dumps(record) for record in records)
        path.write_text(lines + "\n" if path.suffix == ".jsonl" else json.dumps(records, indent=1))
        return path

    return write
