"""Everything a user can set: the engine's configuration and one request's sampling parameters.

Both are frozen dataclasses; ``launch/cli/args.py`` makes the command line from the field metadata, so a field added
here is a flag. "auto" values are resolved once, by :func:`resolve`, into a new object; afterwards nothing changes. What
a checkpoint says about itself lives in ``model_config.py``; environment variables are read in ``launch/`` only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runtime.common.errors import ConfigError

if TYPE_CHECKING:
    from runtime.common.model_config import ModelConfig

EXECUTORS = ("auto", "ray", "local", "torchrun")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "torch")
STAGES = ("spawn", "device", "group", "weights", "kv_cache", "compile", "capture", "ready")

STEP_TOKENS = {"cuda": 2048, "cpu": 512}
"""``max_num_batched_tokens`` unless it is set: enough to be quick, and about a second on two cores."""

MAX_SEED = 2**63 - 1


class CompileMode(StrEnum):
    """How the model is compiled.

    NONE: not at all. STOCK: torch.compile as it comes, guards and all. DYNAMO_TRACE_ONCE: one trace, no guards, the
    whole graph through Inductor. PIECEWISE: one trace, no guards, cut at attention, each distinct subgraph through
    Inductor once.
    """

    NONE = "NONE"
    STOCK = "STOCK"
    DYNAMO_TRACE_ONCE = "DYNAMO_TRACE_ONCE"
    PIECEWISE = "PIECEWISE"


class GraphMode(StrEnum):
    """How steps run. The first three are also what one step runs as; the pairs differ by kind of batch.

    A FULL graph holds the whole forward pass, attention included, for batches in which every request has one new
    token (decode). A PIECEWISE graph holds what stands between the attention layers, which run as ever, so it serves
    any batch of its number of tokens. FULL alone captures for decode only, as FULL_DECODE_ONLY does.
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
            ConfigError: there is none.
        """
        try:
            return cls(text)
        except ValueError:
            allowed = ", ".join(mode.value for mode in cls)
            raise ConfigError(f"cudagraph_mode is {text!r}; allowed: {allowed}") from None

    @property
    def decode(self) -> GraphMode:
        """NONE, PIECEWISE or FULL: what a pure decode batch asks for."""
        return self if self in (GraphMode.NONE, GraphMode.PIECEWISE) else GraphMode.FULL

    @property
    def mixed(self) -> GraphMode:
        """NONE or PIECEWISE: what any other batch asks for."""
        piecewise = self in (GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
        return GraphMode.PIECEWISE if piecewise else GraphMode.NONE

    @classmethod
    def of(cls, decode: GraphMode, mixed: GraphMode) -> GraphMode:
        """The mode whose halves these are."""
        return next(mode for mode in reversed(cls) if (mode.decode, mode.mixed) == (decode, mixed))


GRAPH_MODES = tuple(mode.value for mode in GraphMode)
COMPILE_MODES = tuple(mode.value for mode in CompileMode)

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
    attention_backend: str = setting(
        "auto",
        "attention implementation: cpu (C kernel), triton (GPU kernels) or torch (PyTorch ops); auto: the first that "
        "device, dtype, head size and installed compilers allow",
        choices=ATTENTION_BACKENDS,
    )
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
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
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
