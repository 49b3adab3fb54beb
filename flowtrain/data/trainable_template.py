"""A chat template that can be trained: the tokenizer's own, or one of ours where that one cannot give exact labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowtrain.data.conversation import ConversationEncoder
from flowtrain.data.sources.base import BadSample
from flowtrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_WORDS = """\
{%- for message in messages -%}
{{- message['role'] | upper + ':' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- ' ' + message['content'] -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A chat template in place of the tokenizer's own."""

    template: str
    name: str
    """What readers know it by."""
    reason: str
    """Why the tokenizer's own is not used: a clause in one line."""

    @property
    def text(self) -> str:
        """What was done, and why."""
        return f"replaced by {self.name}, since {self.reason}"


def trainable_template(tokenizer: PreTrainedTokenizerBase, image_token: str, image_text: str) -> Replacement | None:
    """Return a template in place of the tokenizer's own; None if its own can be trained.

    That is ChatML where the tokenizer has its tokens, else roles in words, and the end of sequence after an answer.
    image_token, image_text: as for ``ConversationEncoder``. Sets the template of ``tokenizer``. Raises ConfigError if
    neither can give exact labels with this tokenizer.
    """
    try:
        ConversationEncoder(tokenizer, image_token=image_token, image_text=image_text)
    except ConfigError as error:
        reason = _reason(error) if tokenizer.chat_template else "the tokenizer has none"
    else:
        return None
    known = tokenizer.get_added_vocab()
    is_chatml = all(token in known for token in _CHATML_TOKENS)
    template, name = (_CHATML, "ChatML") if is_chatml else (_WORDS, "roles in words (USER:, ASSISTANT:)")
    tokenizer.chat_template = template
    ConversationEncoder(tokenizer, image_token=image_token, image_text=image_text)
    return Replacement(template, name, reason)


def _reason(error: ConfigError) -> str:
    """What is wrong with the tokenizer's template, without the ways out: here it is replaced."""
    of_template, cause = "the chat template ", error.__cause__
    if isinstance(cause, BadSample) and cause.detail.startswith(of_template):
        said = cause.detail.removeprefix(of_template)
    else:
        said = f"cannot be used: {str(error).removeprefix('model.chat_template: ')}"
    return f"the tokenizer's own {' '.join(said.split('; ')[0].split())}"
