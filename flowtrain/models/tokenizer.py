"""The tokenizer: image token and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from flowtrain.config.model import ModelConfig
from flowtrain.errors import ConfigError


def load_tokenizer(path: str, config: ModelConfig, image_token: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer and make sure that the image token is one token of it; set ``model.chat_template``.

    path: directory or hub id. ``model.chat_template`` is a template or the path of a file that holds one. Raises
    ConfigError if the tokenizer or the template cannot be read.
    """
    tokenizer = _read(path)
    ensure_image_token(tokenizer, image_token)
    if config.chat_template is not None:
        tokenizer.chat_template = _template_text(config.chat_template)
    return tokenizer


def load_named_tokenizer(path: str, config: ModelConfig, named: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has special tokens of these names, whatever ``model.image_token`` is.

    named: by name (an attribute of the tokenizer), the token that gets the name if none has it; one that the vocabulary
    lacks is added. Otherwise as ``load_tokenizer``.
    """
    tokenizer = _read(path)
    lacking = {name: token for name, token in named.items() if getattr(tokenizer, name, None) is None}
    if lacking:
        tokenizer = _read(path, **lacking)
    if config.chat_template is not None:
        tokenizer.chat_template = _template_text(config.chat_template)
    return tokenizer


def _read(path: str, **named: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **named)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be read from {path!r}: {error}; set model.tokenizer") from error
    return tokenizer


def ensure_image_token(tokenizer: PreTrainedTokenizerBase, image_token: str) -> int:
    """Add the image token as a special token where it is missing, and return its id."""
    if image_token not in tokenizer.get_added_vocab():
        tokenizer.add_tokens([AddedToken(image_token, special=True, normalized=False)], special_tokens=True)
    token_ids = tokenizer.encode(image_token, add_special_tokens=False)
    assert len(token_ids) == 1, (image_token, token_ids)
    return token_ids[0]


def _template_text(value: str) -> str:
    """The template itself: the value if it has Jinja in it, else the text of the file that it names."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.chat_template: {value!r} is neither a template nor a readable file") from error
