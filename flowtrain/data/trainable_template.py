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
{{- CONTENT + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
_PLAIN = """\
{%- for message in messages -%}
{{- message['role'] | upper + ':' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- ' ' + CONTENT -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""


def trainable_template(tokenizer: PreTrainedTokenizerBase, image_token: str, image_text: str) -> str | None:
    """Return a template in place of the tokenizer's own; None if its own can be trained.

    image_text: what stands in a text for an image, the image token included. Sets the template of ``tokenizer``. Raises
    ConfigError if no template can give exact labels with this tokenizer.
    """
    try:
        ConversationEncoder(tokenizer, image_token=image_token)
    except ConfigError:
        template = _template_for(tokenizer, image_token, image_text)
    else:
        return None
    tokenizer.chat_template = template
    ConversationEncoder(tokenizer, image_token=image_token)
    return template


def _template_for(tokenizer: PreTrainedTokenizerBase, image_token: str, image_text: str) -> str:
    """ChatML where the tokenizer has its tokens, else roles in words, and the end of sequence after an answer."""
    known = tokenizer.get_added_vocab()
    template = _CHATML if all(token in known for token in _CHATML_TOKENS) else _PLAIN
    enclosed = f".replace('{image_token}', '{image_text}')" if image_text != image_token else ""
    return template.replace("CONTENT", f"message['content']{enclosed}")
