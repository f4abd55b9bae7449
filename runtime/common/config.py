"""Everything a user can set: the engine's configuration and one request's sampling parameters.

Both are frozen dataclasses; ``launch/cli/args.py`` makes the command line from the field metadata, so a field added
here is a flag. "auto" values are resolved once, by :func:`resolve`, into a new object; afterwards nothing changes. What
a checkpoint says about itself lives in ``model_config.py``; environment variables are read in ``launch/`` only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from runtime.common.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from runtime.common.model_config import ModelConfig

EXECUTORS = ("auto", "ray", "local", "torchrun")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
COMPILE_MODES = ("NONE", "STOCK", "DYNAMO_TRACE_ONCE", "PIECEWISE")
STAGES = ("spawn", "device", "group", "weights", "kv_cache", "compile", "capture", "ready")

STEP_TOKENS = {"cuda": 2048, "cpu": 512}
"""``max_num_batched_tokens`` unless it is set: enough to be quick, and about a second on two cores."""

MAX_SEED = 2**63 - 1
MAX_PARALLEL_SAMPLES = 128
MAX_OUTPUT_TOKENS = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
LOGIT_BIAS_BOUNDS = (-100.0, 100.0)
MAX_STRUCTURED_CHOICES = 1024
MAX_GRAMMAR_CHARACTERS = 256 * 1024


Bounds = tuple[float, float]
"""The least and the greatest value that a number may have, both included."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    short: str = "",
    flag: bool = True,
    bounds: Bounds | None = None,
) -> Any:
    """A dataclass field with the metadata that ``launch/cli/args.py`` turns into a flag, and its numeric bounds."""
    metadata = {"help": help, "choices": choices, "short": short, "flag": flag, "bounds": bounds}
    if isinstance(default, (list, dict)):
        raise TypeError("defaults of a frozen config are immutable: use a tuple")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """How to run one model. Names follow vLLM where the meaning is the same.

    Construct it freely, then pass it through :func:`resolve`, which checks it against the model and replaces every
    "auto" and every None that has a default. Raises :class:`ConfigError` for values that can never be right.
    """

    model: str = setting("demo", "folder with a Hugging Face checkpoint, or 'demo'", flag=False)
    tensor_parallel_size: int = setting(1, "number of tensor-parallel ranks, one process each", short="-tp")
    distributed_executor_backend: str = setting(
        "auto",
        "who starts the ranks; auto: torchrun if its variables are set, one local process for TP 1, Ray otherwise",
        choices=EXECUTORS,
    )
    dtype: str = setting("auto", "dtype of weights and activations; auto: the checkpoint's own", choices=DTYPES)
    device: str = setting("auto", "where the ranks compute; auto: cuda if there is one", choices=DEVICES)
    max_model_len: int | None = setting(None, "longest prompt + output in tokens; default: what the model was made for")
    max_num_seqs: int = setting(64, "most requests in one step")
    max_num_batched_tokens: int = setting(
        0, "most tokens in one step; longer prompts are cut in chunks, which decodes wait for; default: 2048 on a "
        "GPU, 512 on a CPU"
    )  # fmt: skip
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory that a rank may use")
    kv_cache_memory: int | None = setting(
        None, "bytes of KV cache per rank; default on a GPU: what gpu_memory_utilization leaves; on CPU: what "
        "max_num_seqs sequences of max_model_len can fill, at most a quarter of the free memory"
    )  # fmt: skip
    block_size: int = setting(16, "tokens in one KV-cache block")
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of prompts that begin alike")
    max_queued_requests: int = setting(1024, "requests that may wait before a server refuses more")
    max_restarts: int = setting(3, "failures of the worker group within ten minutes that are mended by a restart")
    seed: int = setting(0, "seed of requests that bring none")
    optimization_level: int = setting(2, "0: eager; 1: compile + piecewise graphs; 2, 3: and full graphs", short="-O")
    enforce_eager: bool = setting(False, "neither compile nor capture graphs")
    compile_mode: str | None = setting(
        None, "how to compile; default: PIECEWISE, nothing at -O0", choices=COMPILE_MODES
    )
    cudagraph_mode: str | None = setting(None, "graph mode; default: by -O", choices=GRAPH_MODES)
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None, "token counts to capture; default: 1, 2, 4, 8, ...")
    quantization: str | None = setting(None, "quantization scheme; default: what the checkpoint says")
    collectives: str = setting(
        "auto", "all-reduce on CPU: shared memory on one host, else gloo", choices=("auto", "shm", "gloo")
    )
    threads_per_rank: int | None = setting(None, "CPU threads of a rank; default: cores / ranks on the host")
    spawn_timeout: float = setting(120.0, "seconds for every rank's process to come up")
    device_timeout: float = setting(60.0, "seconds for every rank to take its device")
    group_timeout: float = setting(60.0, "seconds for the ranks to meet")
    weights_timeout: float = setting(1800.0, "seconds to load the weights")
    kv_cache_timeout: float = setting(120.0, "seconds to size and allocate the KV cache")
    compile_timeout: float = setting(1800.0, "seconds to compile")
    capture_timeout: float = setting(600.0, "seconds to capture graphs")
    ready_timeout: float = setting(60.0, "seconds to compare fingerprints")
    step_timeout: float = setting(120.0, "seconds a step may take before its silent rank is called hung")
    collective_timeout: float = setting(60.0, "seconds a rank waits for the others in one collective")
    cache_dir: str = setting("", "where compiled code is kept; default: LOCKSTEP_CACHE_DIR", flag=False)
    run_dir: str = setting("", "where this engine keeps its sockets; made and removed by launch/", flag=False)
    log_level: str = setting("INFO", "level of our logger; default: LOCKSTEP_LOG_LEVEL", flag=False)
    fault: str = setting("", "fault to inject, from LOCKSTEP_FAULT: see workers/faults.py", flag=False)

    def __post_init__(self) -> None:
        _check_choice("distributed_executor_backend", self.distributed_executor_backend, EXECUTORS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("collectives", self.collectives, ("auto", "shm", "gloo"))
        if self.compile_mode is not None:
            _check_choice("compile_mode", self.compile_mode, COMPILE_MODES)
        if self.cudagraph_mode is not None:
            _check_choice("cudagraph_mode", self.cudagraph_mode, GRAPH_MODES)
        _check_range("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 0, 2**20)
        _check_range("block_size", self.block_size, 1, 1024)
        _check_range("max_queued_requests", self.max_queued_requests, 1, 2**20)
        _check_range("max_restarts", self.max_restarts, 0, 1000)
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("optimization_level", self.optimization_level, 0, 3)
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        for name in ("max_model_len", "kv_cache_memory", "threads_per_rank"):
            if (value := getattr(self, name)) is not None:
                _check_range(name, value, 1, 2**50)
        for name in (*(f"{stage}_timeout" for stage in STAGES), "step_timeout", "collective_timeout"):
            _check_range(name, getattr(self, name), 0.01, 86400.0 * 7)
        for size in self.cudagraph_capture_sizes or ():
            _check_range("cudagraph_capture_sizes", size, 1, 2**20)
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: a "
                "step could not give every running request its one token; raise the first or lower the second"
            )

    def stage_timeout(self, stage: str) -> float:
        """The deadline in seconds of a start-up stage, one of :data:`STAGES`."""
        return float(getattr(self, f"{stage}_timeout"))

    def to_dict(self) -> dict[str, Any]:
        """The fields as msgpack can carry them; :meth:`from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> EngineConfig:
        """A config from :meth:`to_dict`, from a YAML file, or from keyword arguments. Unknown keys are errors."""
        return cls(**checked_fields(cls, fields))


def checked_fields(cls: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for dataclass ``cls``: known names, lists made tuples, values of the declared type.

    Raises:
        ConfigError: an unknown name (the nearest known one is suggested) or a value of another type.
    """
    known = {f.name: f for f in dataclasses.fields(cls)}
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r} for {cls.__name__}; known: {', '.join(sorted(known))}")
        value = tuple(value) if isinstance(value, list) else value
        declared = str(known[name].type)
        if "float" in declared and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not _fits(value, declared):
            raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); it takes {declared}")
        result[name] = value
    return result


def _fits(value: Any, declared: str) -> bool:
    """Whether a value is of a field's declared type, for the few types our config fields use."""
    options = [option.strip() for option in declared.split("|")]
    if value is None:
        return "None" in options
    for option in options:
        if option.startswith("tuple[int"):
            if isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                return True
        elif option.startswith("tuple[str"):
            if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
                return True
        elif option == type(value).__name__:
            return True
    return False


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; allowed: {low} to {high}")


def resolve(config: EngineConfig, model: ModelConfig, *, device: str, executor: str) -> EngineConfig:
    """A new config in which nothing is "auto" any more, checked against the model.

    Args:
        config: as the user gave it.
        model: what the checkpoint says.
        device: "cpu" or "cuda", as ``launch/`` found it.
        executor: one of :data:`EXECUTORS` but "auto", as ``launch/`` chose it.

    Raises:
        ConfigError: the model cannot be run as asked.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {longest} positions this model was made for "
            "(max_position_embeddings in its config.json); ask for at most that many"
        )
    level = 0 if config.enforce_eager else config.optimization_level
    mode = config.cudagraph_mode
    if config.enforce_eager and mode not in (None, "NONE"):
        raise ConfigError(f"enforce_eager and cudagraph_mode {mode} contradict each other; drop one of them")
    if config.compile_mode not in (None, "NONE") and level == 0:
        raise ConfigError(
            f"compile_mode {config.compile_mode} and -O0 or enforce_eager contradict each other; drop one"
        )
    if mode is None:
        mode = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")[level]
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    return dataclasses.replace(
        config,
        device=device,
        distributed_executor_backend=executor,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or max(STEP_TOKENS[device], config.max_num_seqs),
        optimization_level=level,
        cudagraph_mode=mode,
        quantization=config.quantization or model.quantization,
    )


@dataclass(frozen=True)
class StructuredOutputs:
    """What the output has to match: exactly one of the fields is set. Names are vLLM's.

    Attributes:
        json: a JSON schema, as text or as the object it stands for; kept as text.
        json_object: any JSON object.
        regex: a regular expression that matches the whole output.
        grammar: a context-free grammar in Lark's notation, or in GBNF (recognised by ``::=``).
        choice: one of these texts.

    Raises:
        RequestError: none or several are set, or one is too long. Whether a schema or grammar can be used at all is
            ``structured.py``'s to say.
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
        """Only what is set, as msgpack can carry it."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Field names and meanings are vLLM's.

    Raises:
        RequestError: a value out of range or two that contradict each other.
    """

    n: int = setting(
        1, "number of independent continuations of each prompt", short="-n", bounds=(1, MAX_PARALLEL_SAMPLES)
    )
    max_tokens: int = setting(16, "most tokens to generate", bounds=(1, MAX_OUTPUT_TOKENS))
    min_tokens: int = setting(
        0, "fewest tokens before an end-of-sequence token or a stop string may end it", bounds=(0, MAX_OUTPUT_TOKENS)
    )
    temperature: float = setting(1.0, "0: greedy; higher: flatter", bounds=(0.0, 100.0))
    top_p: float = setting(1.0, "sample among the likeliest tokens that sum to this probability", bounds=(1e-9, 1.0))
    top_k: int = setting(0, "sample among this many likeliest tokens; 0: all", bounds=(0, 2**31 - 1))
    min_p: float = setting(0.0, "drop tokens less likely than this share of the likeliest", bounds=(0.0, 1.0))
    presence_penalty: float = setting(
        0.0, "subtracted from the logit of every token already generated", bounds=(-2.0, 2.0)
    )
    frequency_penalty: float = setting(0.0, "the same, times how often it was generated", bounds=(-2.0, 2.0))
    repetition_penalty: float = setting(
        1.0, "divides positive and multiplies negative logits of tokens seen", bounds=(0.01, 100.0)
    )
    stop: tuple[str, ...] = setting((), "end at the first of these strings, which is not part of the text")
    stop_token_ids: tuple[int, ...] = setting((), "end at any of these tokens")
    ignore_eos: bool = setting(False, "go on after an end-of-sequence token")
    seed: int | None = setting(None, "seed of this request", flag=False, bounds=(0, MAX_SEED))
    logprobs: int | None = setting(
        None, "report log-probabilities: of the chosen token and of this many best ones", bounds=(0, MAX_LOGPROBS)
    )
    prompt_logprobs: int | None = setting(
        None, "the same for every token of the prompt but the first", flag=False, bounds=(0, MAX_LOGPROBS)
    )
    logit_bias: tuple[tuple[int, float], ...] = setting((), "added to the logits of these token ids", flag=False)
    structured_outputs: StructuredOutputs | None = setting(None, "what the output has to match", flag=False)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check_bounds(each, getattr(self, each.name))
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
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether tokens already seen change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Only what differs from the defaults, as msgpack can carry it."""
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


def _check_bounds(declared: dataclasses.Field[Any], value: Any) -> None:
    """Check a field of :class:`SamplingParams` that has ``bounds``. Raises :class:`RequestError`."""
    bounds: Bounds | None = declared.metadata.get("bounds")
    if bounds is None or (value is None and declared.default is None):
        return
    numbers = int if "int" in str(declared.type) else (int, float)
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        raise RequestError(f"{declared.name} is {value!r}; allowed: {low} to {high}", param=declared.name)


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
