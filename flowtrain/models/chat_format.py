"""How a chat template takes the content of messages, and a template for exports that takes every content alike.

A message's content is a text with image tokens in it, or a list of parts: ``{"type": "image"}`` and ``{"type": "text",
"text": ...}``. Some templates take texts only (SmolLM2, Llama-3), some lists only (LLaVA), some both (Qwen-VL, which
encloses an image in tokens of its own if it is a part). Training renders one of the two forms; an export must render
both to the same text.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from flowtrain.errors import ConfigError

Message = Mapping[str, Any]
"""``role`` and ``content``."""

# An environment of Hugging Face drops the newline after the last block, so nothing is written before the template.
_JOIN = """\
{#- FlowTrain: a content that is a list of parts becomes a text. -#}
{%- set joined = namespace(messages=[], text='') -%}
{%- for message in messages -%}
{%- if message['content'] is defined and message['content'] is sequence and message['content'] is not string -%}
{%- set joined.text = '' -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{%- set joined.text = joined.text + part['text'] -%}
{%- elif part['type'] in ('image', 'image_url') -%}
{%- set joined.text = joined.text + PLACEHOLDER -%}
{%- else -%}
{{- raise_exception('the model takes parts of type text and image, not ' ~ part['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- set joined.messages = joined.messages + [dict(message, content=joined.text)] -%}
{%- else -%}
{%- set joined.messages = joined.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = joined.messages %}
"""
_SPLIT = """\
{#- FlowTrain: a content that is a text becomes a list of parts. -#}
{%- set split = namespace(messages=[], parts=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set split.parts = [] -%}
{%- for text in message['content'].split(PLACEHOLDER) -%}
{%- if not loop.first -%}
{%- set split.parts = split.parts + [{'type': 'image'}] -%}
{%- endif -%}
{%- set text = text[1:] if OWN_LINE and not loop.first and text.startswith('\\n') else text -%}
{%- if text -%}
{%- set split.parts = split.parts + [{'type': 'text', 'text': text}] -%}
{%- endif -%}
{%- endfor -%}
{%- set split.messages = split.messages + [dict(message, content=split.parts)] -%}
{%- else -%}
{%- set split.messages = split.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = split.messages %}
"""


class Lacking(enum.Enum):
    """What a template cannot do alone: render texts and lists of parts to the same text."""

    NOTHING = enum.auto()
    LISTS = enum.auto()
    """It takes texts only."""
    TEXTS = enum.auto()
    """It takes lists only, or renders parts otherwise than their text."""


@dataclass(frozen=True)
class ChatFormat:
    """One tokenizer's chat template, and the form of content that training gives it."""

    template: str
    """As the tokenizer has it, without what an export put before it."""
    variables: Mapping[str, Any]
    """What the template may name besides messages: the tokenizer's special tokens."""
    image_token: str
    """What the template writes for an image in a list of parts, perhaps between tokens that frame it."""
    image_text: str
    """Stands for an image in a text, and in what is rendered: the image token, perhaps between tokens that frame it."""
    takes_parts: bool = False
    """Training gives it lists of parts. Otherwise it gets texts."""
    own_line: bool = False
    """The template itself writes a newline between an image and the text after it (InternVL's, LLaVA's), so that the
    first one of the text is left out: it is the end of the line ``<image>`` in texts."""
    lacking: Lacking = Lacking.NOTHING

    def exported(self, placeholder: str) -> str:
        """The template of an export; placeholder: what the export's processor takes for an image."""
        return _prologue(self.lacking, placeholder, self.own_line) + self.template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages whose contents are texts, in the form that the template takes.

        Raises what the template raises: jinja2.TemplateError if it refuses the messages, or any other exception.
        """
        if self.takes_parts:
            messages = [{**message, "content": self._parts(message["content"])} for message in messages]
        text = _rendered(self.template, messages, self.variables, add_generation_prompt)
        # A template may frame images itself; where it does not, Hugging Face's processor may.
        return self.unframed(text).replace(self.image_token, self.image_text)

    def unframed(self, text: str) -> str:
        """A text with the image token alone for each image."""
        return text.replace(self.image_text, self.image_token)

    def _parts(self, text: str) -> list[dict[str, str]]:
        """Cut a content at its images: ``{"type": "image"}`` for each, and the texts between them, if not empty."""
        parts = []
        for index, piece in enumerate(text.split(self.image_text)):
            parts += [{"type": "image"}] if index else []
            said = piece.removeprefix("\n") if index and self.own_line else piece
            parts += [{"type": "text", "text": said}] if said else []
        return parts


def chat_format(tokenizer: PreTrainedTokenizerBase, image_token: str, image_text: str | None = None) -> ChatFormat:
    """Find out how a tokenizer's chat template takes contents; raises ConfigError if there is no template.

    image_text: as in ``ChatFormat``; None: the image token. Lists of parts are preferred where they are rendered
    otherwise than texts: the template knows more of images then.
    """
    image_text = image_text or image_token
    template = _without_prologue(_template_of(tokenizer), (image_text, image_token))
    plain = ChatFormat(template, dict(tokenizer.special_tokens_map), image_token, image_text)
    of_parts = _try_parts(plain)
    if of_parts is None:
        return replace(plain, lacking=Lacking.LISTS)
    if of_parts == _try(plain, _trial(image_token, as_parts=False)):
        return plain
    of_words, of_word_parts = (_try(plain, _trial(None, as_parts)) for as_parts in (False, True))
    own_line = f"{image_token}\n{_AFTER_AN_IMAGE}" in of_parts
    takes_both = of_words == of_word_parts and not own_line
    lacking = Lacking.NOTHING if takes_both else Lacking.TEXTS
    return replace(plain, takes_parts=True, own_line=own_line, lacking=lacking)


def exported_template(
    tokenizer: PreTrainedTokenizerBase, image_token: str, placeholder: str | None = None
) -> str | None:
    """The chat template of an export: it renders texts and lists of parts as training does; None if there is none.

    placeholder: what the export's processor takes for an image in a prompt, with the tokens that frame it unless the
    processor adds them; None: the image token.
    """
    if not tokenizer.chat_template:
        return None
    placeholder = placeholder or image_token
    return chat_format(tokenizer, image_token, placeholder).exported(placeholder)


def _prologue(lacking: Lacking, placeholder: str, own_line: bool) -> str:
    """What makes a template take both forms, and render both as the one that training gives."""
    text = {Lacking.NOTHING: "", Lacking.LISTS: _JOIN, Lacking.TEXTS: _JOIN + _SPLIT}[lacking]
    return text.replace("PLACEHOLDER", json.dumps(placeholder)).replace("OWN_LINE", str(own_line).lower())


def _without_prologue(template: str, placeholders: Sequence[str]) -> str:
    """A template without what an export put before it."""
    kinds = product((Lacking.TEXTS, Lacking.LISTS), placeholders, (False, True))  # the second is how the first begins
    found = (prologue for kind in kinds if template.startswith(prologue := _prologue(*kind)))
    return template.removeprefix(next(found, ""))


_AFTER_AN_IMAGE = "part-six"
# None is an image. White space at every edge, and texts side by side: where a template does more than write one after
# the other, the forms differ.
_TRIAL: tuple[tuple[str | None, ...], ...] = (
    (" part-one\n", None, "\n part-two ", "part-three "),
    (" part-four\n", "\tpart-five"),
    (None, f"{_AFTER_AN_IMAGE}\t", " part-seven"),
    ("part-eight",),
)


def _trial(image_token: str | None, as_parts: bool) -> list[Message]:
    """A conversation of user and assistant in one of the two forms; without an image token it has no images."""
    messages: list[Message] = []
    for index, pieces in enumerate(_TRIAL):
        said = [piece for piece in pieces if piece is not None or image_token is not None]
        parts = [{"type": "image"} if piece is None else {"type": "text", "text": piece} for piece in said]
        text = "".join(image_token or "" if piece is None else piece for piece in said)
        messages.append({"role": "assistant" if index % 2 else "user", "content": parts if as_parts else text})
    return messages


def _try_parts(chat: ChatFormat) -> str | None:
    """The trial's parts as the template renders them; None if it loses some, or prints a list as such."""
    text = _try(chat, _trial(chat.image_token, as_parts=True))
    words = [piece.strip() for pieces in _TRIAL for piece in pieces if piece is not None]
    num_images = sum(pieces.count(None) for pieces in _TRIAL)
    if text is None or text.count(chat.image_token) != num_images or "'text'" in text:
        return None
    return text if all(text.count(word) == 1 for word in words) else None


def _try(chat: ChatFormat, messages: Sequence[Message]) -> str | None:
    """Render messages as they are, with unframed images, or return None if the template fails on them."""
    try:
        return chat.unframed(_rendered(chat.template, messages, chat.variables))
    except Exception:  # a template is a program of somebody else
        return None


def _rendered(
    template: str, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool = False
) -> str:
    conversation: list[Any] = list(messages)
    # Transformers annotates this function as returning a string, but it returns texts and their spans.
    rendered: Any = render_jinja_template(
        conversations=[conversation],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    text: str = rendered[0][0]
    return text


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.chat_template: tokenizer {tokenizer.name_or_path!r} has no chat template; set model.chat_template"
        )
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"model.chat_template: the tokenizer has no default among its templates: {error}") from error
