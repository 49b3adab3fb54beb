"""A trained model as `flowtrain export` wrote it, and held-out samples: what the demo's scripts share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging


@dataclass(frozen=True)
class Sample:
    """One picture, and the first question about it with its answer."""

    image: Image.Image
    question: str
    answer: str


def samples(data: Path) -> Iterator[Sample]:
    """Samples of a parquet file with exactly one picture, in order."""
    for row in pq.read_table(data).to_pylist():
        if len(row["images"]) == 1:
            turn = row["texts"][0]
            image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
            yield Sample(image, turn["user"], turn["assistant"])


class ExportedModel:
    """The model and the processor, loaded with Hugging Face's classes alone."""

    def __init__(self, directory: Path) -> None:
        logging.disable_progress_bar()
        self.processor = AutoProcessor.from_pretrained(directory)
        self.model = AutoModelForImageTextToText.from_pretrained(directory).eval()

    @torch.inference_mode()
    def caption(self, image: Image.Image, question: str, max_new_tokens: int = 24) -> str:
        """The model's answer, greedily decoded."""
        inputs = self.processor(images=image, text=self._rendered(question), return_tensors="pt")
        end = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        output = self.model.generate(**inputs, **settings)
        answer: str = self.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answer.strip()

    @torch.inference_mode()
    def answer_loss(self, image: Image.Image, question: str, answer: str) -> float:
        """The loss in nats, a mean over the tokens that training gives a loss: the answer and its end."""
        inputs, labels = self.labelled(image, question, answer)
        return float(self.model(**inputs, labels=labels).loss)

    def labelled(self, image: Image.Image, question: str, answer: str) -> tuple[dict[str, Any], torch.Tensor]:
        """The model's inputs for a question with its answer, and their labels, -100 where there is no loss."""
        prompt, whole = self._rendered(question), self._rendered(question, answer)
        assert whole.startswith(prompt), "the chat template renders the same question differently with an answer"
        said = whole.removeprefix(prompt).rstrip("\n")
        inputs = self.processor(images=image, text=prompt + said, return_tensors="pt")
        ids, said_ids = inputs["input_ids"], self.processor.tokenizer(said, add_special_tokens=False)["input_ids"]
        assert ids[0, -len(said_ids) :].tolist() == said_ids, "the answer's tokens are others after the question"
        labels = torch.full_like(ids, -100)
        labels[0, -len(said_ids) :] = ids[0, -len(said_ids) :]
        return inputs, labels

    def _rendered(self, question: str, answer: str | None = None) -> str:
        """The chat template's text: up to where an answer would begin, or with the answer."""
        content = [{"type": "image"}, {"type": "text", "text": f"\n{question}"}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        rendered: str = self.processor.apply_chat_template(messages, add_generation_prompt=answer is None)
        return rendered
