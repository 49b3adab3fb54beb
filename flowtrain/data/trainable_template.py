"""A chat template that can be trained: the tokenizer's own, or one of ours where that one cannot give exact labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowtrain.data.conversation import ConversationEncoder
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


def trainable_template(tokenizer: PreTrainedTokenizerBase, image_token: str, image_text: str) -> str | None:
    """Return a template in place of the tokenizer's own; None if its own can be trained.

    That is ChatML where the tokenizer has its tokens, else roles in words, and the end of sequence after an answer.
    image_token, image_text: as for ``ConversationEncoder``. Sets the template of ``tokenizer``. Raises ConfigError if
    neither can give exact labels with this tokenizer.
    """
    try:
        ConversationEncoder(tokenizer, image_token=image_token, image_text=image_text)
    except ConfigError:
        known = tokenizer.get_added_vocab()
        template = _CHATML if all(token in known for token in _CHATML_TOKENS) else _WORDS
    else:
        return None
    tokenizer.chat_template = template
    ConversationEncoder(tokenizer, image_token=image_token, image_text=image_text)
    return template
