"""Logprobs in the formats of OpenAI's two completion APIs, and of vLLM for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.engine.request import TokenLogprob
from runtime.text.tokenizer import REPLACEMENT, Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class TokenTexts:
    """Texts and bytes of single tokens; each token is decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # Bounded by the vocabulary.

    def __getitem__(self, token_id: int) -> str:
        """The token's text, also of a special token. An incomplete character becomes a replacement character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode((token_id,), skip_special_tokens=False)
        return text

    def bytes_of(self, token_id: int) -> list[int]:
        """The token's UTF-8 bytes, also of an incomplete character: joined over all tokens, those of the text."""
        text = self[token_id]
        return list(self._tokenizer.token_bytes(token_id) if REPLACEMENT in text else text.encode())


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts, num_top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts[token_id], "logprob": _finite(logprob), "bytes": texts.bytes_of(token_id)}

    content = [
        {**entry(t.token_id, t.logprob), "top_logprobs": [entry(*pair) for pair in t.top[:num_top]]} for t in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Formats ``choices[].logprobs`` of one text completion, in one object or over several events.

    Args:
        texts: texts of single tokens.
        num_top: alternatives for each token; the token itself is added if it is not among them.
    """

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._offset = 0

    def format(self, token_ids: Sequence[int], tokens: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Format the next tokens. The first token of a prompt has no logprob: None."""
        names: list[str] = []
        offsets: list[int] = []
        top: list[dict[str, float] | None] = []
        for token_id, token in zip(token_ids, tokens, strict=True):
            name = self._texts[token_id]
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(name)
            top.append(None if token is None else self._top(token))
        return {
            "tokens": names,
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            found.setdefault(self._texts[token_id], _finite(logprob))  # Of tokens with the same text, the likeliest.
        return found


def prompt_logprobs(tokens: Sequence[TokenLogprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt an object by token id, None for the first."""

    def entries(token: TokenLogprob) -> dict[str, Any]:
        ranked: dict[int, tuple[float, int | None]] = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1)
        }
        ranked.setdefault(token.token_id, (token.logprob, None))  # Not among the top ones: its rank is unknown.
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts[token_id]}
            for token_id, (logprob, rank) in ranked.items()
        }

    return [None if token is None else entries(token) for token in tokens]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # Not max(): that would keep a NaN.
