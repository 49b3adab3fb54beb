"""Train the small byte-level BPE tokenizer under assets/tokenizer on the texts of assets/openclipart/train.parquet.

    python assets/build_tokenizer.py

It has 4096 entries, special tokens included, and a ChatML template. The template renders an image as `<image>` and
marks the assistant's answers, with their `<|im_end|>`, as generation. The same texts give the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet as pq
from build_openclipart import TEMPLATES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<pad>")
ROLES = ("system", "user", "assistant", "You are a helpful assistant.")
CHAT_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for item in content -%}
{%- if item['type'] == 'image' -%}
{{- '<image>' -}}
{%- elif item['type'] == 'text' -%}
{{- item['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- render(message['content']) + '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- render(message['content']) + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def corpus(parquet: Path) -> list[str]:
    """Every text of the data set, in order, then the question templates and the roles."""
    rows = pq.read_table(parquet, columns=["texts"]).column("texts").to_pylist()
    texts = [part for turns in rows for turn in turns for part in (turn["user"], turn["assistant"])]
    return [*texts, *TEMPLATES, *(f"{role}\n" for role in ROLES)]


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the texts give {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>", "<image>"],
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parquet", type=Path, default=ROOT / "assets" / "openclipart" / "train.parquet")
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tokenizer", help="folder for the tokenizer")
    args = parser.parse_args()
    texts = corpus(args.parquet)
    tokenizer = train(texts)
    save(tokenizer, args.out)
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    print(f"{args.out}: {VOCAB_SIZE} entries, {sum(map(len, texts)) / tokens:.2f} characters a token")


if __name__ == "__main__":
    main()
