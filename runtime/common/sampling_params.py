"""One request's sampling parameters and its structured output, both frozen and checked when they are made.

The engine's configuration is ``config.py``'s, whose ``setting`` makes the fields. Whether a grammar or schema compiles
is checked by ``runtime/text/grammar_check.py``; sampling itself is in ``workers/sampling/``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from runtime.common.config import MAX_SEED, check_field, checked_fields, setting
from runtime.common.errors import ConfigError, RequestError

MAX_PARALLEL_SAMPLES = 128
MAX_OUTPUT_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
LOGIT_BIAS_BOUNDS = (-100.0, 100.0)
MAX_STRUCTURED_CHOICES = 1024
MAX_GRAMMAR_CHARACTERS = 256 * 1024


@dataclass(frozen=True)
class StructuredOutputs:
    """Constraint on the output; exactly one field is set. Names are vLLM's.

    Attributes:
        json: a JSON schema, as text or as the parsed object; kept as text.
        json_object: any JSON object.
        regex: a regular expression that matches the whole output.
        grammar: a context-free grammar in Lark's notation, or in GBNF (recognised by ``::=``).
        choice: one of these texts.

    Raises:
        RequestError: none or several are set, or one is too long.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        value: Any = self.json
        if isinstance(value, (dict, bool)):
            object.__setattr__(self, "json", json.dumps(value))
        if self.choice:
            choice = _as_tuple(self.choice)
            most = MAX_STRUCTURED_CHOICES
            if choice is None or len(choice) > most or not all(isinstance(v, str) and v for v in choice):
                raise RequestError(
                    f"choice takes at most {most} strings that are not empty; got {self.choice!r:.200}",
                    param="structured_outputs",
                )
            object.__setattr__(self, "choice", choice)
        for name in ("json", "regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(
                    f"structured output by {name} takes a text that is not empty; got {text!r:.200}",
                    param="structured_outputs",
                )
            if text is not None and len(text) > MAX_GRAMMAR_CHARACTERS:
                raise RequestError(
                    f"{name} has {len(text)} characters; allowed: {MAX_GRAMMAR_CHARACTERS}", param="structured_outputs"
                )
        asked = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) not in (None, False, ())]
        if len(asked) != 1:
            given = ", ".join(asked) or "none"
            raise RequestError(
                f"structured output takes exactly one of json, json_object, regex, grammar, choice; got {given}",
                param="structured_outputs",
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as msgpack types."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Field names and meanings are vLLM's.

    For example::

        greedy = SamplingParams(temperature=0.0, max_tokens=64, stop=("END",))
        two = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=1)

    Raises:
        RequestError: a value is out of range, or two values contradict each other.
    """

    n: int = setting(1, "number of output sequences of each prompt", short="-n", bounds=(1, MAX_PARALLEL_SAMPLES))
    max_tokens: int = setting(16, "maximum number of tokens to generate", bounds=(1, MAX_OUTPUT_TOKENS))
    min_tokens: int = setting(
        0,
        "minimum number of tokens before an end-of-sequence token or a stop string ends the output",
        bounds=(0, MAX_OUTPUT_TOKENS),
    )
    temperature: float = setting(1.0, "0: greedy; higher: flatter", bounds=(0.0, 100.0))
    top_p: float = setting(
        1.0, "sample from the most likely tokens whose probabilities sum to this", bounds=(1e-9, 1.0)
    )
    top_k: int = setting(0, "sample from this many most likely tokens; 0: all", bounds=(0, 2**31 - 1))
    min_p: float = setting(0.0, "drop tokens below this share of the highest probability", bounds=(0.0, 1.0))
    presence_penalty: float = setting(0.0, "subtracted from the logit of every generated token", bounds=(-2.0, 2.0))
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit for each time it was generated", bounds=(-2.0, 2.0)
    )
    repetition_penalty: float = setting(
        1.0, "divides positive and multiplies negative logits of prompt and output tokens", bounds=(0.01, 100.0)
    )
    stop: tuple[str, ...] = setting((), "stop at the first of these strings; the text ends before it")
    stop_token_ids: tuple[int, ...] = setting((), "stop at any of these token ids")
    ignore_eos: bool = setting(False, "continue after an end-of-sequence token")
    seed: int | None = setting(None, "seed of this request", flag=False, bounds=(0, MAX_SEED))
    logprobs: int | None = setting(
        None,
        "return log-probabilities of the sampled token and of this many most likely ones",
        bounds=(0, MAX_LOGPROBS),
    )
    prompt_logprobs: int | None = setting(
        None, "return them for every prompt token except the first", flag=False, bounds=(0, MAX_LOGPROBS)
    )
    logit_bias: tuple[tuple[int, float], ...] = setting((), "added to the logits of these token ids", flag=False)
    structured_outputs: StructuredOutputs | None = setting(None, "constraint on the output", flag=False)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if problem := check_field(each, getattr(self, each.name)):
                raise RequestError(problem, param=each.name)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        if self.structured_outputs is not None and self.min_tokens:
            raise RequestError(
                "min_tokens and structured_outputs contradict each other: what matches may be shorter",
                param="min_tokens",
            )
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", param="min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether a penalty changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as msgpack types."""
        fields = {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}
        if self.structured_outputs is not None:
            fields["structured_outputs"] = self.structured_outputs.to_dict()
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SamplingParams:
        """The inverse of :meth:`to_dict`; unknown keys and wrong types are errors."""
        compound = {name: fields[name] for name in ("logit_bias", "structured_outputs") if name in fields}
        try:
            return cls(**checked_fields(cls, {k: v for k, v in fields.items() if k not in compound}), **compound)
        except ConfigError as error:
            raise RequestError(str(error)) from None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else _as_tuple(value)
    if values is None or len(values) > MAX_STOP_STRINGS or not all(isinstance(v, str) and v for v in values):
        raise RequestError(
            f"{name} takes at most {MAX_STOP_STRINGS} strings that are not empty; got {value!r}", param=name
        )
    return values


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    values = _as_tuple(value)
    if values is None or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise RequestError(f"{name} takes token ids, whole numbers; got {value!r}", param=name)
    return values


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs from a mapping or from such pairs, ascending by id."""
    pairs = _as_tuple(cast("Mapping[Any, Any]", value).items() if isinstance(value, Mapping) else value)
    low, high = LOGIT_BIAS_BOUNDS
    allowed = f"logit_bias takes at most {MAX_LOGIT_BIAS} pairs of a token id and a number from {low:g} to {high:g}"
    if pairs is None or len(pairs) > MAX_LOGIT_BIAS:
        raise RequestError(f"{allowed}; got {value!r:.200}", param="logit_bias")
    result: dict[int, float] = {}
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(cast("Sequence[Any]", pair)) == 2):
            raise RequestError(f"{allowed}; got {pair!r:.200}", param="logit_bias")
        token_id, bias = cast("tuple[Any, Any]", pair)
        numbers = isinstance(token_id, int) and isinstance(bias, (int, float))
        if not numbers or isinstance(token_id, bool) or isinstance(bias, bool) or not low <= bias <= high:
            raise RequestError(f"{allowed}; got {token_id!r:.99}: {bias!r:.99}", param="logit_bias")
        result[token_id] = float(bias)
    return tuple(sorted(result.items()))


def _structured(fields: Mapping[str, Any]) -> StructuredOutputs:
    known = {f.name for f in dataclasses.fields(StructuredOutputs)}
    if unknown := sorted(fields.keys() - known):
        raise RequestError(
            f"structured_outputs has no field {unknown[0]!r}; there are {', '.join(sorted(known))}",
            param="structured_outputs",
        )
    return StructuredOutputs(**fields)


def _as_tuple(value: Any) -> tuple[Any, ...] | None:
    return tuple(cast("Iterable[Any]", value)) if isinstance(value, Iterable) else None
