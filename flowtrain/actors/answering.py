"""A backbone rank's part in answering held-out samples after their evaluation."""

from __future__ import annotations

from collections import Counter

import torch

from flowtrain.actors.reading import Fetched
from flowtrain.config.run import RunConfig
from flowtrain.models.families.base import Family
from flowtrain.training.batch import weightless
from flowtrain.training.generation import Prompt, answers_to, prompt_of
from flowtrain.training.trainer import Trainer
from flowtrain.types.evaluation import GeneratedAnswer
from flowtrain.types.plan import StepPlan


class Answering:
    """Keeps the prompts of the samples that the model answers, and then answers them with the other ranks.

    A replica answers the samples that it has evaluated, so their features have come to it already.

    is_leader: whether this rank reports for its replica.
    """

    def __init__(self, config: RunConfig, family: Family, trainer: Trainer, is_leader: bool) -> None:
        self._sets = tuple(config.data.eval_sets.values())
        self._max_seq_len = config.data.max_seq_len
        self._family = family
        self._trainer = trainer
        self._is_leader = is_leader
        tower = trainer.model.encoder
        self._rows_of = tower.shape.num_rows if tower is not None else None
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._idle = weightless(family.pooled_dim(family.encoder_names[0]), dtype, trainer.group.device)
        self._special = {number for number, token in family.tokenizer.added_tokens_decoder.items() if token.special}
        self._prompts: dict[int, Prompt] = {}

    def keep(self, plan: StepPlan, fetched: Fetched) -> None:
        """Keep the prompts of a microbatch of an evaluation that has run."""
        wanted = self._wanted(plan)
        for index, position in enumerate(fetched.batch.positions):
            if position in wanted:
                prompt = prompt_of(fetched.batch, index, self._family.image_token_id, self._rows_of)
                self._prompts[position] = prompt

    def answers(self, plan: StepPlan) -> tuple[GeneratedAnswer, ...]:
        """Answer the prompts of an evaluation; collective. Only the leader of a replica gets its answers."""
        wanted, dp_size = self._wanted(plan), plan.dp_size
        counts = Counter(
            rank
            for slot in range(plan.num_slots)
            for rank in range(dp_size)
            for position in plan.microbatch_positions(slot, rank)
            if position in wanted
        )
        if not counts:
            return ()
        prompts = [self._prompts[position] for position in sorted(self._prompts)]
        self._prompts = {}
        limit = self._sets[plan.unit.eval_set].max_new_tokens
        limits = [min(limit, self._max_seq_len - prompt.num_tokens) for prompt in prompts]
        stops = [self._stops(prompt) for prompt in prompts]
        found = answers_to(prompts, max(counts.values()), limits, stops, self._idle, self._trainer)
        if not self._is_leader:
            return ()
        pairs = zip(prompts, found, strict=True)
        return tuple([GeneratedAnswer(prompt.position, self._text(tokens), len(tokens)) for prompt, tokens in pairs])

    def _wanted(self, plan: StepPlan) -> range:
        """Positions of the first samples of the set."""
        first, count = plan.unit.first_position, self._sets[plan.unit.eval_set].num_generated
        return range(first, first + min(count, plan.unit.num_positions))

    def _stops(self, prompt: Prompt) -> set[int]:
        """Tokens that end an answer: the tokenizer's, and the one that ends answers in the data."""
        ends = {prompt.reference[-1]} & self._special
        end = self._family.tokenizer.eos_token_id
        return ends if end is None else {*ends, int(end)}

    def _text(self, tokens: list[int]) -> str:
        return str(self._family.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def answering_of(config: RunConfig, family: Family, trainer: Trainer, is_leader: bool) -> Answering | None:
    """Return a rank's part in answering; None if nothing is answered, as on emulated devices, which have no weights."""
    answers = any(each.num_generated for each in config.data.eval_sets.values())
    return Answering(config, family, trainer, is_leader) if answers and config.emulation is None else None
