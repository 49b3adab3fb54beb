"""How a chat template takes the content of messages, and a template for exports that takes every content alike.

A message's content is a text with image tokens in it, or a list of parts: ``{"type": "image"}`` and ``{"type": "text",
"text": ...}``. Some templates take texts only (SmolLM2, Llama-3), some lists only (LLaVA), some both (Qwen-VL, which
encloses an image in tokens of its own if it is a part), some a text for one role and a list for another. Training
gives each role one form that is rendered whole; an export must render both to the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
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
{%- if message['content'] is stringOF_SOME_ROLES -%}
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
_ROLES = ("system", "user", "assistant")
"""Roles of training data."""


@dataclass(frozen=True)
class ChatFormat:
    """One tokenizer's chat template, and the forms of content that training gives it."""

    template: str
    """As the tokenizer has it, without what an export put before it."""
    variables: Mapping[str, Any]
    """What the template may name besides messages: the tokenizer's special tokens."""
    image_token: str
    """What the template writes for an image in a list of parts, perhaps between tokens that frame it."""
    image_text: str
    """Stands for an image in a text, and in what is rendered: the image token, perhaps between tokens that frame it."""
    list_roles: frozenset[str] = frozenset()
    """Roles whose contents training gives as lists of parts. Those of other roles are texts."""
    own_line: bool = False
    """The template itself writes a newline between an image and the text after it (InternVL's, LLaVA's), so that the
    first one of the text is left out: it is the end of the line ``<image>`` in texts."""
    lost: frozenset[str] = frozenset()
    """Roles whose contents the template leaves out, whatever form they have."""

    def exported(self, placeholder: str) -> str:
        """The template of an export; placeholder: what the export's processor takes for an image."""
        takes_both = _takes_both(replace(self, image_text=placeholder))
        return self.template if takes_both else _prologue(self.list_roles, placeholder, self.own_line) + self.template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render messages whose contents are texts, in the forms that the template takes.

        Raises what the template raises: jinja2.TemplateError if it refuses the messages, or any other exception.
        """
        given = [
            {**message, "content": self._parts(message["content"])} if message["role"] in self.list_roles else message
            for message in messages
        ]
        text = _rendered(self.template, given, self.variables, add_generation_prompt)
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
    chat = _for_system(_for_dialogues(plain))
    return replace(chat, lost=_lost(chat))


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


def _prologue(list_roles: frozenset[str], placeholder: str, own_line: bool) -> str:
    """What makes a template take both forms, and render both as the one that training gives."""
    text_roles = [role for role in _ROLES if role not in list_roles]
    some = f" and message['role'] not in {json.dumps(text_roles)}" if text_roles else ""
    text = _JOIN + (_SPLIT.replace("OF_SOME_ROLES", some) if list_roles else "")
    return text.replace("PLACEHOLDER", json.dumps(placeholder)).replace("OWN_LINE", str(own_line).lower())


def _without_prologue(template: str, placeholders: Sequence[str]) -> str:
    """A template without what an export put before it."""
    forms = chain.from_iterable(combinations(_ROLES, count) for count in range(len(_ROLES) + 1))
    kinds = product(map(frozenset, forms), placeholders, (False, True))
    found = (prologue for kind in kinds if template.startswith(prologue := _prologue(*kind)))
    return template.removeprefix(max(found, key=len, default=""))  # some begin as others


# --- trials ---------------------------------------------------------------------------------------------------------

_Trial = Sequence[tuple[str, tuple[str | None, ...]]]
"""Role and pieces of each message; None is an image."""
_AFTER_AN_IMAGE = "part-six"
# White space at every edge, and texts side by side: where a template does more than write one after the other, the
# forms differ.
_DIALOGUE: _Trial = (
    ("user", (" part-one\n", None, "\n part-two ", "part-three ")),
    ("assistant", (" part-four\n", "\tpart-five")),
    ("user", (None, f"{_AFTER_AN_IMAGE}\t", " part-seven")),
    ("assistant", ("part-eight",)),
)
_WITH_SYSTEM: _Trial = (("system", (" part-nine\n", "\tpart-ten ")), *_DIALOGUE)
_LISTS_IN_DIALOGUES = (frozenset({"user", "assistant"}), frozenset({"user"}), frozenset({"assistant"}))
_PRINTED_LIST = re.compile("""['"]text['"]""")


def _for_dialogues(plain: ChatFormat) -> ChatFormat:
    """Choose the forms of what users and assistants say: texts, unless lists tell the template more."""
    of_texts = _whole(plain, _DIALOGUE)
    for roles in _LISTS_IN_DIALOGUES:
        chat = replace(plain, list_roles=roles)
        of_lists = _whole(chat, _DIALOGUE)
        # Images are the users'.
        if of_lists is not None and of_lists != of_texts and (of_texts is None or "user" in roles):
            return replace(chat, own_line=f"{plain.image_token}\n{_AFTER_AN_IMAGE}" in of_lists)
    return plain


def _for_system(chat: ChatFormat) -> ChatFormat:
    """Choose the form of the system's turn: as users' contents, if it is rendered whole, else the other one."""
    text, parts = chat, replace(chat, list_roles=chat.list_roles | {"system"})
    forms = (parts, text) if "user" in chat.list_roles else (text, parts)
    return next((form for form in forms if _whole(form, _WITH_SYSTEM) is not None), text)


def _lost(chat: ChatFormat) -> frozenset[str]:
    """Roles of which a template leaves words out; a role that it refuses is not among them."""
    for trial in (_WITH_SYSTEM, _DIALOGUE):
        text = _try(chat, trial)
        if text is not None:
            return frozenset(role for role, pieces in trial if any(word not in text for word in _words(pieces)))
    return frozenset()


def _takes_both(chat: ChatFormat) -> bool:
    """Whether the template alone renders texts and lists alike, as training does."""
    trial = _DIALOGUE if _try(chat, _WITH_SYSTEM) is None else _WITH_SYSTEM
    # Where training gives lists, a template need not know images in texts.
    image = None if chat.list_roles else chat.image_text
    texts, lists = (_try_raw(chat, _messages(trial, image, as_lists=as_lists)) for as_lists in (False, True))
    return texts is not None and texts == lists and not chat.own_line


def _whole(chat: ChatFormat, trial: _Trial) -> str | None:
    """The trial as training renders it; None if the template fails, loses words or images, or prints a list as such."""
    text = _try(chat, trial)
    num_images = sum(pieces.count(None) for _, pieces in trial)
    if text is None or text.count(chat.image_token) != num_images or _PRINTED_LIST.search(text):
        return None
    return text if all(word in text for _, pieces in trial for word in _words(pieces)) else None


def _try(chat: ChatFormat, trial: _Trial) -> str | None:
    """The trial as training renders it, with unframed images, or None if the template fails on it."""
    try:
        return chat.unframed(chat.render(_messages(trial, chat.image_text, as_lists=False)))
    except Exception:  # a template is a program of somebody else
        return None


def _try_raw(chat: ChatFormat, messages: Sequence[Message]) -> str | None:
    """Messages rendered as they are, or None if the template fails on them."""
    try:
        return _rendered(chat.template, messages, chat.variables)
    except Exception:  # a template is a program of somebody else
        return None


def _messages(trial: _Trial, image: str | None, *, as_lists: bool) -> list[Message]:
    """The trial in one of the two forms. image: what stands for one in texts; None leaves images out."""
    messages: list[Message] = []
    for role, pieces in trial:
        said = [piece for piece in pieces if piece is not None or image is not None]
        parts = [{"type": "image"} if piece is None else {"type": "text", "text": piece} for piece in said]
        text = "".join(image or "" if piece is None else piece for piece in said)
        messages.append({"role": role, "content": parts if as_lists else text})
    return messages


def _words(pieces: Sequence[str | None]) -> list[str]:
    return [piece.strip() for piece in pieces if piece is not None]


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
