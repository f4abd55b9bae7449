"""The requests of ``bench throughput`` and ``bench serve``: mixed lengths and settings, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)
"""How requests are sampled, in turn. The names are those of SamplingParams and of HTTP alike."""

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name"
).split()
"""Common enough to be one token each in most vocabularies."""


@dataclass(frozen=True)
class Work:
    """One request.

    Attributes:
        prompt_tokens: how long its prompt should be.
        output_tokens: how many tokens it makes, end-of-sequence tokens ignored.
        sampling: keyword arguments of SamplingParams, seed included.
    """

    prompt_tokens: int
    output_tokens: int
    sampling: dict[str, Any]


def make_work(count: int, input_len: Sequence[int], output_len: Sequence[int], seed: int) -> list[Work]:
    """``count`` requests, lengths drawn evenly between the two ends of each range, settings taken in turn."""
    chance = random.Random(seed)
    return [
        Work(
            prompt_tokens=chance.randint(input_len[0], input_len[-1]),
            output_tokens=chance.randint(output_len[0], output_len[-1]),
            sampling={**SETTINGS[index % len(SETTINGS)], "seed": chance.randrange(2**31)},
        )
        for index in range(count)
    ]


def token_prompt(work: Work, vocab_size: int, chance: random.Random) -> list[int]:
    """Random token ids, as many as the prompt should have."""
    return [chance.randrange(vocab_size) for _ in range(work.prompt_tokens)]


def text_prompt(work: Work, chance: random.Random) -> str:
    """Random words, as many as the prompt should have tokens: about right, where a tokenizer is not at hand."""
    return " ".join(chance.choice(WORDS) for _ in range(work.prompt_tokens))
