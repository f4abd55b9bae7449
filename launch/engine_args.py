"""The keyword arguments of LLM and AsyncLLM: the fields of ``EngineConfig`` that a Python program may set.

``runtime/common/config.py`` defines fields, defaults and checks; this TypedDict repeats names, types and help texts for
type checkers and editors. A test compares the two.
"""

from __future__ import annotations

from typing import TypedDict


class EngineArgs(TypedDict, total=False):
    """Keyword arguments of ``LLM`` and ``AsyncLLM``; defaults are those of ``EngineConfig``."""

    tensor_parallel_size: int
    """Number of tensor-parallel ranks, one process each."""
    distributed_executor_backend: str
    """Launcher of the ranks; auto: torchrun if its variables are set, one local process for TP 1, Ray otherwise."""
    dtype: str
    """Dtype of weights and activations; auto: the checkpoint's."""
    device: str
    """Device of the ranks; auto: cuda if there is one, else cpu."""
    max_model_len: int | None
    """Maximum length of prompt + output in tokens; default: the model's context length."""
    max_num_seqs: int
    """Maximum number of requests in one step."""
    max_num_batched_tokens: int
    """Maximum number of tokens in one step; longer prompts are prefilled in chunks; default: 2048 on a GPU, 512 on a
    CPU."""
    gpu_memory_utilization: float
    """Share of a GPU's memory that a rank may use."""
    kv_cache_memory: int | None
    """Bytes of KV cache per rank; default on a GPU: the rest of gpu_memory_utilization; on a CPU: enough for
    max_num_seqs sequences of max_model_len, at most a quarter of the free memory."""
    block_size: int
    """Tokens in one KV-cache block."""
    enable_prefix_caching: bool
    """Reuse the KV blocks of common prompt prefixes."""
    max_queued_requests: int
    """Maximum number of waiting requests; a server refuses more."""
    max_restarts: int
    """Worker-group restarts within ten minutes before requests fail with the error."""
    seed: int
    """Seed of requests without their own."""
    optimization_level: int
    """0: eager; 1: compile + piecewise graphs; 2, 3: and full graphs."""
    enforce_eager: bool
    """Neither compile nor capture graphs."""
    compile_mode: str | None
    """Compile mode; default: PIECEWISE, NONE at -O0."""
    cudagraph_mode: str | None
    """Graph mode; default: by -O."""
    cudagraph_capture_sizes: tuple[int, ...] | None
    """Token counts to capture; default: 1, 2, 4, 8, ...."""
    quantization: str | None
    """Quantization scheme; none is supported yet."""
    attention_backend: str
    """Attention implementation: cpu (C kernel), triton (GPU kernels) or torch (PyTorch ops); auto: the first that
    device, dtype, head size and installed compilers allow."""
    collectives: str
    """All-reduce on CPU: shared memory on one host, else gloo."""
    threads_per_rank: int | None
    """CPU threads of a rank; default: cores / ranks on the host."""
    spawn_timeout: float
    """Seconds to start every rank's process."""
    device_timeout: float
    """Seconds to initialize the ranks' devices."""
    group_timeout: float
    """Seconds for the rendezvous of the ranks."""
    weights_timeout: float
    """Seconds to load the weights."""
    kv_cache_timeout: float
    """Seconds to size and allocate the KV cache."""
    compile_timeout: float
    """Seconds to compile."""
    capture_timeout: float
    """Seconds to capture graphs."""
    ready_timeout: float
    """Seconds to compare fingerprints."""
    step_timeout: float
    """Seconds of a step before a silent rank counts as hung."""
    collective_timeout: float
    """Seconds a rank waits for its peers in one collective."""
    cache_dir: str
    """Folder of models and compiled code; default: LOCKSTEP_CACHE_DIR."""
