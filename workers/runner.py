"""Runs steps on one rank: StepPlan -> static buffers -> forward pass -> sampler -> StepResult.

The runner owns everything that a rank keeps between steps: the model, the KV cache, the buffers with the request
states, and the sampler. ``worker.py`` calls it for the driver's RPC methods; ops read ``forward_context.py`` during a
forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from parallel.group import TensorParallelGroup
from parallel.library import python_implementations
from parallel.platform import platform_for
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.config import EngineConfig, GraphMode
from runtime.common.errors import ConfigError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import StepPlan, StepResult
from workers.batch import Batch, BatchBuffers
from workers.compile.levels import EAGER, CompileSettings, missing_for_compiling, resolve_level
from workers.forward_context import AttentionMetadata, ForwardContext
from workers.graphs.dispatcher import Dispatch, resolve_capture_sizes, supported_mode, uniform_query_len
from workers.graphs.graph_runner import GraphRunner
from workers.graphs.inputs import Forward, StaticInputs
from workers.kv_cache import KVCacheSpec, allocate_kv_cache
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model
from workers.quantization.registry import get_quant_config
from workers.sampling.logprobs import PromptScorer
from workers.sampling.sampler import Sampler
from workers.weights import LoadReport, load_weights

if TYPE_CHECKING:
    from workers.compile.compiler import CompileReport

Progress = Callable[[int, int], None]
"""Called with the number of completed parts of a start-up stage, and their total."""

CPU_KV_SHARE_OF_FREE_MEMORY = 0.25
"""Share of a host's free memory that the KV caches of its ranks take on CPU."""


class ModelRunner:
    """The model of one rank, and everything needed to run its steps.

    Args:
        config: the resolved engine config.
        model_config: of the checkpoint.
        group: the connected tensor-parallel group.
        ranks_on_host: number of ranks that share this host's memory.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, group: TensorParallelGroup, *, ranks_on_host: int
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.group = group
        self.device = group.device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._ranks_on_host = ranks_on_host
        self.model: DecoderForCausalLM
        self.kv_spec: KVCacheSpec
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.buffers: BatchBuffers
        self.sampler: Sampler
        self.prompt_scorer: PromptScorer
        self.graphs: GraphRunner
        self.forward: Forward
        self.graph_mode = GraphMode.NONE

    def load_model(self, progress: Progress | None = None) -> LoadReport:
        """Build the model on the meta device, then load this rank's shard of the checkpoint.

        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape.
        """
        checkpoint = inspect_checkpoint(self.config.model)
        quant_config = get_quant_config(self.config.quantization, self.device)
        self.model = build_model(
            self.model_config,
            group=self.group,
            dtype=self.dtype,
            quant_config=quant_config,
            attention_backend=self.config.attention_backend,
        )
        report = load_weights(self.model, checkpoint, device=self.device, progress=progress)
        self.kv_spec = KVCacheSpec.from_model(self.model, self.config.block_size)
        return report

    # ---- KV cache

    def affordable_kv_blocks(self) -> int:
        """Number of KV blocks that fit this rank's memory, at most what ``max_num_seqs`` sequences can fill.

        Raises:
            ConfigError: not even one block fits.
        """
        assert self.config.max_model_len is not None, "resolve() sets max_model_len"
        blocks_per_seq = -(-self.config.max_model_len // self.config.block_size)
        useful = self.config.max_num_seqs * blocks_per_seq
        memory = self.config.kv_cache_memory or self._free_memory_for_kv()
        blocks = min(useful, memory // self.kv_spec.bytes_per_block)
        if blocks < 1:
            raise ConfigError(
                f"{memory} bytes for the KV cache of rank {self.group.rank} hold no block of "
                f"{self.kv_spec.bytes_per_block} bytes; raise --kv-cache-memory or --gpu-memory-utilization, or "
                "lower --block-size"
            )
        return blocks

    def _free_memory_for_kv(self) -> int:
        """Bytes for the KV cache: what ``gpu_memory_utilization`` leaves beside the peak of the largest steps."""
        if self.device.type == "cuda":
            self._profile_memory()
            free, total = torch.cuda.mem_get_info(self.device)
            reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
            used = total - free - reusable
            return max(0, int(total * self.config.gpu_memory_utilization) - used - peak)
        return int(available_memory() * CPU_KV_SHARE_OF_FREE_MEMORY / self._ranks_on_host)

    def _profile_memory(self) -> None:
        """Measure the peak memory of the largest steps by running them once with a KV cache of one block."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.allocate(1)
        self._run_largest_steps()
        self.kv_caches = {}

    @torch.inference_mode()
    def _run_largest_steps(self) -> None:
        """Run the longest prompt and the largest decode batch as dummy batches: no KV writes."""
        inputs = StaticInputs(self.buffers)
        prompt, decode = inputs.dummy_prompt, inputs.dummy_decode
        for make, rows in ((prompt, self.buffers.max_num_tokens), (decode, self.config.max_num_seqs)):
            hidden = self.graphs.run(Dispatch(GraphMode.NONE, rows), make(rows))
            self.model.compute_logits(hidden[: self.config.max_num_seqs])
        torch.cuda.synchronize(self.device)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache, the static buffers and the sampler. ``num_blocks`` is the minimum over ranks."""
        assert self.config.max_model_len is not None, "resolve() sets max_model_len"
        self.kv_caches = allocate_kv_cache(self.kv_spec, num_blocks, self.device)
        self.buffers = BatchBuffers(
            max_num_tokens=self.config.max_num_batched_tokens,
            max_num_reqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            num_blocks=num_blocks,
            device=self.device,
        )
        self.sampler = Sampler(
            self.group,
            self.model.vocab_shard,
            self.model_config.vocab_size,
            self.device,
            eos_token_ids=self.model_config.eos_token_ids,
            checkpoint=self.config.model,
        )
        self.prompt_scorer = PromptScorer(self.group, self.model.vocab_shard, self.model_config.vocab_size)
        self.use(self.model, EAGER)

    # ---- compile and capture

    def compile(self, progress: Progress | None = None) -> tuple[Forward, CompileReport, CompileSettings]:
        """Compile the model at the config's level. Steps keep running the plain model until :meth:`use`.

        Raises:
            CompileError: this rank cannot compile it; TraceError if the model's own code is the reason.
        """
        from workers.compile.compiler import compile_model  # Late: a start without compiling needs none of it.

        platform = platform_for(self.device)
        settings = resolve_level(self.config, missing=missing_for_compiling(platform))
        forward, report = compile_model(
            self.model,
            mode=settings.mode,
            config=self.config,
            model_config=self.model_config,
            platform=platform,
            device=self.device,
            example_tokens=min(16, self.config.max_num_batched_tokens),
            progress=progress,
        )
        return forward, report, settings

    def use(self, forward: Forward, settings: CompileSettings) -> str:
        """Run steps with ``forward`` from now on; returns a warning about an unsupported graph mode, or "".

        Args:
            forward: the model, or the result of :meth:`compile`.
            settings: the compile settings of ``forward``.
        """
        mode, warning = supported_mode(
            settings.graph_mode,
            compile_mode=settings.mode,
            device_type=self.device.type,
            attention_capturable=self.model.attention_backend.capturable,
            collectives_capturable=self.group.backend in ("none", "nccl"),
        )
        sizes = resolve_capture_sizes(
            self.config.cudagraph_capture_sizes,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            device_type=self.device.type,
        )
        self.forward = forward
        self.graph_mode = mode
        self.graphs = GraphRunner(
            forward,
            mode=mode,
            sizes=sizes,
            buffers=self.buffers,
            make_context=self.make_context,
            device=self.device,
            direct=python_implementations("CPU") if self.device.type == "cpu" else {},
        )
        if sizes.dropped:
            dropped = ", ".join(map(str, sizes.dropped))
            warning += f"{'; ' if warning else ''}capture sizes {dropped} are larger than any step, and are left out"
        return warning

    def warm_up(self, progress: Progress | None = None) -> None:
        """Prepare graph capture, and compile kernels before the first request. A collective call."""
        if self.device.type == "cuda":
            self._run_largest_steps()
        self.graphs.warm_up(progress)

    def capture(self, progress: Progress | None = None) -> int:
        """Capture the graphs and return their number. Not a collective call.

        Raises:
            CaptureError: a graph could not be captured; none is held then.
        """
        return len(self.graphs.capture(progress))

    # ---- steps

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A collective call: every rank runs the same plan at the same time.

        Returns:
            sampled tokens and prompt log-probabilities on rank 0; neither on the other ranks.
        """
        started = time.perf_counter()
        self.group.set_epoch(plan.step_id)  # The first collective detects a rank that runs another step.
        self.buffers.update_requests(plan)
        choice, batch = self.fill_buffers(plan)
        prepared = time.perf_counter()
        hidden = self.graphs.run(choice, batch.metadata)
        computed = time.perf_counter()
        # The plan alone decides which rows are scored and sampled, so every rank enters the same collectives.
        prompts = (
            self.prompt_scorer.score(hidden, batch.prompt_spans, self.model.compute_logits)
            if batch.prompt_spans
            else []
        )
        tokens = []
        if batch.sample_requests:
            tokens = self.sampler.sample(self.compute_sample_logits(hidden, batch), batch.sample_requests)
        elif self.device.type == "cuda":
            # Nothing was read back: wait, or the next step would overwrite pinned buffers that are being copied.
            torch.cuda.current_stream().synchronize()
        ended = time.perf_counter()
        stats = {"prepare": prepared - started, "forward": computed - prepared, "sample": ended - computed}
        return StepResult(plan.step_id, tuple(tokens), stats, tuple(prompts))

    def fill_buffers(self, plan: StepPlan) -> tuple[Dispatch, Batch]:
        """Choose the graph for a plan, and fill the static buffers to its size."""
        lengths = uniform_query_len(request.num_tokens for request in plan.scheduled)
        choice = self.graphs.choose(plan.num_tokens, len(plan.scheduled), lengths)
        # A FULL graph reads the rows of as many requests as tokens.
        padded_reqs = choice.size if choice.mode is GraphMode.FULL else 0
        return choice, self.buffers.fill(plan, choice.size, padded_reqs)

    def compute_sample_logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """This rank's logits, [n, V_local], of the rows that are sampled."""
        return self.model.compute_logits(hidden.index_select(0, batch.sample_rows))

    def make_context(self, metadata: AttentionMetadata) -> ForwardContext:
        """The forward context of one step; building it calls the attention backend's ``prepare_step``."""
        return ForwardContext.for_step(metadata, self.model.attention_layers, self.kv_caches)


def available_memory() -> int:
    """Bytes of memory available on this host, by the kernel's estimate."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable; set --kv-cache-memory")
