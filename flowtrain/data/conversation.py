"""Turns conversations into token ids and labels by the tokenizer's chat template; only assistant tokens carry loss.

The template's ``{% generation %}`` markers enclose the assistant's text. Without markers, the assistant's text is what
its turn adds to the rendered conversation before it (a *prefix rendering*). This is exact if the template never
rewrites earlier turns; templates that do so are refused.

Control tokens that a data set's text spells out (``<|im_end|>``) stay text: the rendered conversation is cut inside
each of them before it is tokenised. Only ``<image>`` becomes a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers.utils.chat_template_utils import render_jinja_template

from flowtrain.data.sources.base import IMAGE_PLACEHOLDER, BadSample, Turn
from flowtrain.errors import ConfigError
from flowtrain.types.samples import RejectReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_LABEL = -100
"""Label of a token that carries no loss."""

# A code point that Unicode never assigns: it marks where the text is cut, and no token contains it.
_CUT = "\ufdd0"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = (
    Turn("user", "first question"),
    Turn("assistant", "first answer"),
    Turn("user", "second question"),
    Turn("assistant", "second answer"),
)

Span = tuple[int, int]
"""Characters [start, end) of the rendered conversation."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A tokenised conversation before images are expanded: ids and unshifted labels, int32 ``[num_tokens]`` each."""

    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]


class ConversationEncoder:
    """Encodes conversations with one tokenizer, system prompt and image token.

    image_token: the tokenizer's spelling of the token that ``<image>`` becomes. Raises ConfigError, before any data is
    read, if tokenizer or chat template cannot give exact labels.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None = None, image_token: str = IMAGE_PLACEHOLDER
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._image_token = image_token
        self._image_token_id = _image_token_id(tokenizer, image_token)
        self._template = _chat_template(tokenizer)
        self._has_markers = _MARKERS.search(self._template) is not None
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | {image_token}
        # Only tokens of two characters or more can be cut; the lookahead also finds overlapping ones.
        self._specials = tuple(sorted(token for token in special if len(token) > 1))
        self._control_tokens = re.compile("(?=(?:" + "|".join(map(re.escape, self._specials)) + "))(.)", re.DOTALL)
        self._probe()

    def encode(self, turns: Sequence[Turn]) -> EncodedText:
        """Tokenise a conversation.

        Raises BadSample:

        - EMPTY_ANSWER if an assistant turn is blank or no token carries loss;
        - MALFORMED_SAMPLE if the template refuses the order of roles;
        - PLACEHOLDER_MISMATCH if the template loses an ``<image>``.

        Raises ConfigError if the template rewrites earlier turns.
        """
        _require_answers(turns)
        messages = self._messages(turns)
        try:
            text, spans = self._render_with_spans(messages)
        except jinja2.TemplateError as error:
            raise BadSample(RejectReason.MALFORMED_SAMPLE, f"the chat template refuses the turns: {error}") from error
        ids, offsets = self._tokenise(text)
        is_image = ids == self._image_token_id
        num_placeholders = sum(turn.text.count(IMAGE_PLACEHOLDER) for turn in turns)
        if is_image.sum() != num_placeholders:
            raise BadSample(
                RejectReason.PLACEHOLDER_MISMATCH,
                f"{num_placeholders} {IMAGE_PLACEHOLDER} in the turns became {is_image.sum()} image tokens",
            )
        labels = np.where(_inside(offsets, spans) & ~is_image, ids, IGNORE_LABEL).astype(np.int32)
        if not (labels[1:] != IGNORE_LABEL).any():
            raise BadSample(RejectReason.EMPTY_ANSWER, "no token of the conversation carries loss")
        return EncodedText(ids, labels)

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Turns in the template's format; the run's system prompt goes in front of the sample's system prompt."""
        messages = [{"role": turn.role, "content": self._protected(turn.text)} for turn in turns]
        if self._system_prompt is None:
            return messages
        if messages and messages[0]["role"] == "system":
            own = messages.pop(0)["content"]
            return [{"role": "system", "content": f"{self._system_prompt}\n\n{own}"}, *messages]
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _protected(self, text: str) -> str:
        """Mark where to cut control tokens in a text, and replace ``<image>`` by the tokenizer's image token."""
        pieces = text.replace(_CUT, "").split(IMAGE_PLACEHOLDER)
        return self._image_token.join(self._control_tokens.sub(rf"\1{_CUT}", piece) for piece in pieces)

    def _render(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        variables: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        # Transformers annotates this function as returning a string, but it returns texts and their spans.
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self._template,
            return_assistant_tokens_mask=self._has_markers,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        texts, spans = rendered
        return texts[0], spans[0] if self._has_markers else []

    def _render_with_spans(self, messages: Sequence[dict[str, str]]) -> tuple[str, list[Span]]:
        text, spans = self._render(messages)
        return text, spans if self._has_markers else self._spans_by_prefix(messages, text)

    def _spans_by_prefix(self, messages: Sequence[dict[str, str]], text: str) -> list[Span]:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], add_generation_prompt=True)
            through, _ = self._render(messages[: index + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise ConfigError(
                    "model.chat_template: this template renders earlier turns differently once later ones follow "
                    f"(seen at turn {index + 1} of {len(messages)}), so the assistant's tokens cannot be found "
                    "exactly; set model.chat_template to one with {% generation %} markers around the assistant's text"
                )
            spans.append((len(before), len(before) + self._turn_length(through[len(before) :])))
        return spans

    def _turn_length(self, turn: str) -> int:
        """Length of an assistant's turn without white space after its end-of-turn token, which some templates add."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self._specials) else len(turn)

    def _tokenise(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return ids ``[n]`` and the characters ``[n, 2]`` of ``text`` that each one covers.

        A text without cuts is one piece. SentencePiece tokenizers may begin each further piece with a space.
        """
        ids: list[int] = []
        offsets = []
        start = 0
        for piece in text.split(_CUT):
            encoded = self._tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += encoded["input_ids"]
            offsets.append(np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2) + start)
            start += len(piece) + len(_CUT)
        return np.array(ids, dtype=np.int32), np.concatenate(offsets)

    def _probe(self) -> None:
        """Check the template with a short conversation: its spans must contain the answers and no question."""
        try:
            text, spans = self._render_with_spans(self._messages(_PROBE))
        except jinja2.TemplateError as error:
            with_prompt = "" if self._system_prompt is None else " (with data.system_prompt as the system turn)"
            raise ConfigError(
                f"model.chat_template: fails on user and assistant turns{with_prompt}: {error}; choose another template"
            ) from error
        marked = "".join(text[start:end] for start, end in spans)
        for turn in _PROBE:
            if (turn.text in marked) != (turn.role == "assistant"):
                raise ConfigError(
                    "model.chat_template: its {% generation %} markers must enclose exactly the assistant's text, but "
                    f"{turn.role} text {turn.text!r} is {'in' if turn.text in marked else 'outside'} them; fix the "
                    "markers or choose another template"
                )


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        raise ConfigError(
            f"model.tokenizer: {tokenizer.name_or_path or type(tokenizer).__name__} has no fast tokenizer, which is "
            "needed to find the assistant's tokens; choose a directory with a tokenizer.json"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.chat_template: tokenizer {tokenizer.name_or_path!r} has no chat template; set model.chat_template"
        )
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"model.chat_template: the tokenizer has no default among its templates: {error}") from error


def _image_token_id(tokenizer: PreTrainedTokenizerBase, image_token: str) -> int:
    token_id = tokenizer.get_added_vocab().get(image_token)
    if token_id is None:
        raise ConfigError(
            f"model.image_token: {image_token!r} is not an added token of tokenizer {tokenizer.name_or_path!r}, so it "
            "would become several tokens; name an added token, or add this one to the tokenizer"
        )
    return int(token_id)


def _require_answers(turns: Sequence[Turn]) -> None:
    answers = [(index, turn.text) for index, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        raise BadSample(RejectReason.EMPTY_ANSWER, f"none of {len(turns)} turns is the assistant's")
    for index, text in answers:
        if not text.replace(IMAGE_PLACEHOLDER, "").strip():
            raise BadSample(RejectReason.EMPTY_ANSWER, f"assistant turn {index + 1} of {len(turns)} is blank")


def _inside(offsets: npt.NDArray[np.int64], spans: Iterable[Span]) -> npt.NDArray[np.bool_]:
    """Return which tokens have a character in a span; bool ``[n]``.

    ``return_assistant_tokens_mask`` is not used for this: if a span's last or first character belongs to no token, it
    marks everything to the end, or nothing.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        inside |= (starts < end) & (ends > start)
    return inside
