"""The engine's configuration, the compile and graph modes, and the field metadata behind command-line flags.

:class:`EngineConfig` is a frozen dataclass; ``launch/cli/args.py`` makes a flag of every field declared with
:func:`setting`. "auto" values are resolved once, by :func:`resolve`, into a new object. The model's configuration is in
``model_config.py``, one request's in ``sampling_params.py``; environment variables are read in ``launch/`` only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from runtime.common.errors import ConfigError

if TYPE_CHECKING:
    from runtime.common.model_config import ModelConfig

EXECUTORS = ("auto", "ray", "local", "torchrun")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "torch")
STAGES = ("spawn", "device", "group", "weights", "kv_cache", "compile", "capture", "ready")

STEP_TOKENS = {"cuda": 2048, "cpu": 512}
"""Default of ``max_num_batched_tokens`` by device; on two CPU cores such a step takes about a second."""

MAX_SEED = 2**63 - 1
TIMEOUTS = (0.01, 86400.0 * 7)
"""Bounds of every timeout in seconds: up to a week."""


class CompileMode(StrEnum):
    """How the model is compiled.

    NONE: eager. STOCK: ``torch.compile`` with its guards. DYNAMO_TRACE_ONCE: one trace without guards, the whole graph
    compiled by Inductor. PIECEWISE: one trace without guards, split at attention; Inductor compiles each distinct
    subgraph once.
    """

    NONE = "NONE"
    STOCK = "STOCK"
    DYNAMO_TRACE_ONCE = "DYNAMO_TRACE_ONCE"
    PIECEWISE = "PIECEWISE"


class GraphMode(StrEnum):
    """Which graphs are captured. A single step runs as NONE, PIECEWISE or FULL.

    A FULL graph holds the whole forward pass, attention included, for batches in which every request has one new
    token (decode). PIECEWISE graphs hold the subgraphs between the attention layers, which run eagerly, so they serve
    any batch of their number of tokens. FULL_AND_PIECEWISE captures FULL graphs for decode batches and PIECEWISE
    graphs for the others. FULL captures for decode only, as FULL_DECODE_ONLY does.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @classmethod
    def parse(cls, text: str) -> GraphMode:
        """The mode of that name.

        Raises:
            ConfigError: unknown name.
        """
        try:
            return cls(text)
        except ValueError:
            allowed = ", ".join(mode.value for mode in cls)
            raise ConfigError(f"cudagraph_mode is {text!r}; allowed: {allowed}") from None

    @property
    def decode(self) -> GraphMode:
        """The mode of a pure decode batch: NONE, PIECEWISE or FULL."""
        return self if self in (GraphMode.NONE, GraphMode.PIECEWISE) else GraphMode.FULL

    @property
    def mixed(self) -> GraphMode:
        """The mode of any other batch: NONE or PIECEWISE."""
        piecewise = self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
        return GraphMode.PIECEWISE if piecewise else GraphMode.NONE

    @classmethod
    def of(cls, decode: GraphMode, mixed: GraphMode) -> GraphMode:
        """The mode with these decode and mixed modes."""
        return next(mode for mode in reversed(cls) if (mode.decode, mode.mixed) == (decode, mixed))


GRAPH_MODES = tuple(mode.value for mode in GraphMode)
COMPILE_MODES = tuple(mode.value for mode in CompileMode)

DEFAULT_GRAPH_MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
"""The graph mode of each optimization level."""

Bounds = tuple[float, float]
"""The least and the greatest allowed value of a number, both included."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    short: str = "",
    flag: bool = True,
    bounds: Bounds | None = None,
) -> Any:
    """A dataclass field with the metadata of its flag (``launch/cli/args.py``) and of :func:`check_field`.

    Args:
        default: the field's default, immutable.
        help: the flag's help text.
        choices: the allowed values; empty: any.
        short: a second, short name of the flag.
        flag: whether the field has a flag.
        bounds: the allowed range of a number.
    """
    metadata = {"help": help, "choices": choices, "short": short, "flag": flag, "bounds": bounds}
    if isinstance(default, (list, dict)):
        raise TypeError("defaults of a frozen config are immutable: use a tuple")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """How to run one model. Names follow vLLM where the meaning is the same.

    ``LLM`` and ``AsyncLLM`` take these fields as keyword arguments, ``lockstep`` takes them as flags::

        config = EngineConfig(model="demo", tensor_parallel_size=2, max_model_len=1024)

    :func:`resolve` checks a configuration against the model and replaces every "auto" and every None that has a
    default.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    model: str = setting("demo", "checkpoint folder, Hugging Face ORG/NAME[@REVISION], or 'demo'", flag=False)
    tensor_parallel_size: int = setting(
        1, "number of tensor-parallel ranks, one process each", short="-tp", bounds=(1, 1024)
    )
    distributed_executor_backend: str = setting(
        "auto",
        "launcher of the ranks; auto: torchrun if its variables are set, one local process for TP 1, Ray otherwise",
        choices=EXECUTORS,
    )
    dtype: str = setting("auto", "dtype of weights and activations; auto: the checkpoint's", choices=DTYPES)
    device: str = setting("auto", "device of the ranks; auto: cuda if there is one, else cpu", choices=DEVICES)
    max_model_len: int | None = setting(
        None, "maximum length of prompt + output in tokens; default: the model's context length", bounds=(1, 2**50)
    )
    max_num_seqs: int = setting(64, "maximum number of requests in one step", bounds=(1, 65536))
    max_num_batched_tokens: int = setting(
        0,
        "maximum number of tokens in one step; longer prompts are prefilled in chunks; default: 2048 on a GPU, 512 on "
        "a CPU",
        bounds=(0, 2**20),
    )
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory that a rank may use", bounds=(0.01, 1.0))
    kv_cache_memory: int | None = setting(
        None,
        "bytes of KV cache per rank; default on a GPU: the rest of gpu_memory_utilization; on a CPU: enough for "
        "max_num_seqs sequences of max_model_len, at most a quarter of the free memory",
        bounds=(1, 2**50),
    )
    block_size: int = setting(16, "tokens in one KV-cache block", bounds=(1, 1024))
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of common prompt prefixes")
    max_queued_requests: int = setting(
        1024, "maximum number of waiting requests; a server refuses more", bounds=(1, 2**20)
    )
    max_restarts: int = setting(
        3, "worker-group restarts within ten minutes before requests fail with the error", bounds=(0, 1000)
    )
    seed: int = setting(0, "seed of requests without their own", bounds=(0, MAX_SEED))
    optimization_level: int = setting(
        2, "0: eager; 1: compile + piecewise graphs; 2, 3: and full graphs", short="-O", bounds=(0, 3)
    )
    enforce_eager: bool = setting(False, "neither compile nor capture graphs")
    compile_mode: str | None = setting(None, "compile mode; default: PIECEWISE, NONE at -O0", choices=COMPILE_MODES)
    cudagraph_mode: str | None = setting(None, "graph mode; default: by -O", choices=GRAPH_MODES)
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(
        None, "token counts to capture; default: 1, 2, 4, 8, ...", bounds=(1, 2**20)
    )
    quantization: str | None = setting(None, "quantization scheme; none is supported yet")
    attention_backend: str = setting(
        "auto",
        "attention implementation: cpu (C kernel), triton (GPU kernels) or torch (PyTorch ops); auto: the first that "
        "device, dtype, head size and installed compilers allow",
        choices=ATTENTION_BACKENDS,
    )
    collectives: str = setting(
        "auto", "all-reduce on CPU: shared memory on one host, else gloo", choices=("auto", "shm", "gloo")
    )
    threads_per_rank: int | None = setting(
        None, "CPU threads of a rank; default: cores / ranks on the host", bounds=(1, 2**50)
    )
    spawn_timeout: float = setting(120.0, "seconds to start every rank's process", bounds=TIMEOUTS)
    device_timeout: float = setting(60.0, "seconds to initialize the ranks' devices", bounds=TIMEOUTS)
    group_timeout: float = setting(60.0, "seconds for the rendezvous of the ranks", bounds=TIMEOUTS)
    weights_timeout: float = setting(1800.0, "seconds to load the weights", bounds=TIMEOUTS)
    kv_cache_timeout: float = setting(120.0, "seconds to size and allocate the KV cache", bounds=TIMEOUTS)
    compile_timeout: float = setting(1800.0, "seconds to compile", bounds=TIMEOUTS)
    capture_timeout: float = setting(600.0, "seconds to capture graphs", bounds=TIMEOUTS)
    ready_timeout: float = setting(60.0, "seconds to compare fingerprints", bounds=TIMEOUTS)
    step_timeout: float = setting(120.0, "seconds of a step before a silent rank counts as hung", bounds=TIMEOUTS)
    collective_timeout: float = setting(60.0, "seconds a rank waits for its peers in one collective", bounds=TIMEOUTS)
    cache_dir: str = setting("", "folder of models and compiled code; default: LOCKSTEP_CACHE_DIR", flag=False)
    run_dir: str = setting("", "folder of this engine's sockets; made and removed by launch/", flag=False)
    log_level: str = setting("INFO", "level of the logger; set from LOCKSTEP_LOG_LEVEL", flag=False)
    fault: str = setting("", "fault to inject, set from LOCKSTEP_FAULT: see workers/faults.py", flag=False)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if problem := check_field(each, getattr(self, each.name)):
                raise ConfigError(problem)
        if self.quantization is not None:
            raise ConfigError(
                f"quantization is {self.quantization!r}; no scheme is supported yet; leave it out and use a checkpoint "
                "with bfloat16, float16 or float32 weights"
            )
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: a "
                "step could not give every running request its one token; raise the first or lower the second"
            )

    def stage_timeout(self, stage: str) -> float:
        """The deadline in seconds of a start-up stage, one of :data:`STAGES`."""
        return float(getattr(self, f"{stage}_timeout"))

    def to_dict(self) -> dict[str, Any]:
        """The fields as msgpack types; :meth:`from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> EngineConfig:
        """A config from :meth:`to_dict`, from a YAML file, or from keyword arguments. Unknown keys are errors."""
        return cls(**checked_fields(cls, fields))


def checked_fields(cls: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for dataclass ``cls``, checked: known names, lists converted to tuples, declared types.

    Raises:
        ConfigError: an unknown name, or a value of another type.
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
    """Whether a value has a field's declared type, for the types that config fields use."""
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


def check_field(declared: dataclasses.Field[Any], value: Any) -> str | None:
    """One line that says why ``value`` is outside a field's ``choices`` or ``bounds``; None if it is allowed."""
    if value is None and declared.default is None:
        return None
    choices: tuple[str, ...] = declared.metadata["choices"]
    if choices and value not in choices:
        return f"{declared.name} is {value!r}; allowed: {', '.join(choices)}"
    bounds: Bounds | None = declared.metadata["bounds"]
    if bounds is None:
        return None
    low, high = bounds
    numbers = int if "int" in str(declared.type) else (int, float)
    for number in cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, numbers) or not low <= number <= high:
            return f"{declared.name} is {number!r}; allowed: {low} to {high}"
    return None


def resolve(config: EngineConfig, model: ModelConfig, *, device: str, executor: str) -> EngineConfig:
    """A copy without "auto" values, checked against the model.

    Args:
        config: the user's configuration.
        model: the checkpoint's configuration.
        device: "cpu" or "cuda".
        executor: one of :data:`EXECUTORS` except "auto".

    Raises:
        ConfigError: the configuration does not fit the model, or two settings contradict each other.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {longest} positions of this model "
            "(max_position_embeddings in its config.json); lower it to that"
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
        mode = DEFAULT_GRAPH_MODES[level].value
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
    )
