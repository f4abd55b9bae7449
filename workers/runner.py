"""Runs steps: StepPlan -> static buffers -> forward pass -> sampler -> StepResult.

The runner owns everything one rank holds between steps: the model, the KV cache, the buffers and the sampler.
It knows no channel and no verb (``worker.py``); how attention reads its metadata is ``forward_context.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from parallel.group import TensorParallelGroup
from parallel.library import python_implementations
from parallel.platform import platform_for
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.config import CompileMode, EngineConfig, GraphMode
from runtime.common.errors import ConfigError
from runtime.common.model_config import ModelConfig
from runtime.common.protocol import PromptLogprobs, SampledToken, StepPlan, StepResult
from workers.batch import Batch, BatchBuffers
from workers.compile.levels import CompileSettings, missing_for_compiling, resolve_level
from workers.faults import FaultInjector
from workers.forward_context import AttentionMetadata, ForwardContext
from workers.graphs.dispatcher import Dispatch, uniform_query_len
from workers.graphs.graph_runner import GraphRunner
from workers.graphs.inputs import Forward, StaticInputs
from workers.graphs.modes import supported_mode
from workers.graphs.sizes import CaptureSizes, resolve_capture_sizes
from workers.kv_cache import KVCacheSpec, allocate_kv_cache
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model
from workers.quantization.registry import get_quant_config
from workers.sampling.logprobs import PromptScorer, PromptSpan, is_finite
from workers.sampling.sampler import Sampler
from workers.weights import LoadReport, load_weights

if TYPE_CHECKING:
    from workers.compile.compiler import CompileReport

CPU_KV_SHARE_OF_FREE_MEMORY = 0.25
"""On CPU the KV cache takes at most this share of the memory that is free, divided among the ranks of a host."""


class ModelRunner:
    """One rank's model and everything it needs to run a step.

    Args:
        config: resolved.
        group: the tensor-parallel group, already connected.
        ranks_on_host: how many ranks share this host's memory.
        faults: carries out an injected fault; None in production.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        group: TensorParallelGroup,
        *,
        ranks_on_host: int,
        faults: FaultInjector | None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.group = group
        self.device = group.device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._ranks_on_host = ranks_on_host
        self._faults = faults
        self.model: DecoderForCausalLM
        self.kv_spec: KVCacheSpec
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.buffers: BatchBuffers
        self.sampler: Sampler
        self.prompt_scorer: PromptScorer
        self.graphs: GraphRunner
        self.forward: Forward
        self.graph_mode = GraphMode.NONE
        self._last: tuple[Dispatch, AttentionMetadata]

    def load_model(self, progress: Callable[[int, int], None] | None = None) -> LoadReport:
        """Build the model on the meta device, then fill this rank's shard from the checkpoint.

        Raises:
            CheckpointError: missing, unexpected or misshaped tensors.
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

    def affordable_kv_blocks(self) -> int:
        """KV blocks this rank has memory for, at most what the configured sequences can ever fill.

        Raises:
            ConfigError: not even one sequence block fits.
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
        if self.device.type == "cuda":
            self._profile_memory()
            free, total = torch.cuda.mem_get_info(self.device)
            reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
            used = total - free - reusable
            return max(0, int(total * self.config.gpu_memory_utilization) - used - peak)
        return int(available_memory() * CPU_KV_SHARE_OF_FREE_MEMORY / self._ranks_on_host)

    def _profile_memory(self) -> None:
        """Find the peak memory of the largest steps by running them once over a cache of one block."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self.allocate(1)
        self._run_largest_steps()
        self.kv_caches = {}

    @torch.inference_mode()
    def _run_largest_steps(self) -> None:
        """The longest prompt and the largest decode batch there can be, of no request's: nothing is written."""
        inputs = StaticInputs(self.buffers)
        prompt, decode = inputs.prompt, inputs.decode
        for make, rows in ((prompt, self.buffers.max_num_tokens), (decode, self.config.max_num_seqs)):
            hidden = self.graphs.run(Dispatch(GraphMode.NONE, rows), make(rows))
            self.model.compute_logits(hidden[: self.config.max_num_seqs])
        torch.cuda.synchronize(self.device)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make ready what is to be captured, and have kernels compiled before the first request. Collective."""
        if self.device.type == "cuda":
            self._run_largest_steps()
        self.graphs.warm_up(progress)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache, the static buffers and the sampler. ``num_blocks`` is the minimum over ranks."""
        assert self.config.max_model_len is not None, "resolve() sets max_model_len"
        self.kv_caches = allocate_kv_cache(self.kv_spec, num_blocks, self.device)
        self.buffers = BatchBuffers(
            max_num_tokens=self.config.max_num_batched_tokens,
            max_num_reqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
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
        self.use(self.model, CompileSettings(0, CompileMode.NONE, "NONE", ()))

    # ---- compile and capture

    def compile(
        self, progress: Callable[[int, int], None] | None = None
    ) -> tuple[Forward, CompileReport, CompileSettings]:
        """Compile the model at the config's level, without using it yet: all ranks vote first.

        Raises:
            CompileError: this rank cannot compile it; TraceError where the model's own code is the reason.
        """
        from workers.compile.compiler import compile_model  # Late: a start without compiling needs none of it.

        platform = platform_for(self.device)
        mode = None if self.config.compile_mode is None else CompileMode(self.config.compile_mode)
        settings = resolve_level(self.config, platform, mode=mode, missing=missing_for_compiling(platform))
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
        """Run steps by ``forward`` from now on; gives a warning about graphs that cannot be had, or "".

        Args:
            forward: the model itself, or what :meth:`compile` gave.
            settings: the level it came from.
        """
        mode, warning = supported_mode(
            GraphMode.parse(settings.graph_mode),
            device_type=self.device.type,
            split=settings.mode is CompileMode.PIECEWISE,
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
            make_context=self._context,
            device=self.device,
            direct=python_implementations("CPU") if self.device.type == "cpu" else {},
        )
        if sizes.dropped:
            dropped = ", ".join(map(str, sizes.dropped))
            warning += f"{'; ' if warning else ''}capture sizes {dropped} are larger than any step, and are left out"
        return warning

    def measure_last_step(self, repeats: int) -> dict[str, float]:
        """For benchmarks on the CPU: make the last step's forward pass again and again; every rank at once.

        Returns:
            seconds of one pass as steps make it (``forward``), and of what it spends within ops (``ops``: ATen and
            our own; of a compiled model its subgraphs and the splitting ops). Each is the least of the repeats, since
            everything else on the machine only adds to it.
        """
        choice, metadata = self._last
        probe = GraphRunner(
            self.forward,
            mode=GraphMode.FULL,
            sizes=CaptureSizes((choice.size,), ()),
            buffers=self.buffers,
            make_context=self._context,
            device=self.device,
        )
        buffers = self.buffers
        statics = (
            buffers.input_ids,
            buffers.positions,
            buffers.slot_mapping,
            buffers.seq_lens,
            buffers.query_start_loc,
        )
        kept = [static.array.copy() for static in statics]
        probe.capture()  # Fills the buffers with padding.
        for static, array in zip(statics, kept, strict=True):
            static.array[:] = array
        forward = ops = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            self.graphs.run(choice, metadata)
            forward = min(forward, time.perf_counter() - started)
            ops = min(ops, probe.op_seconds(Dispatch(GraphMode.FULL, choice.size), metadata))
        return {"forward": forward, "ops": ops}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on this rank, at the same time as every other rank runs it.

        Returns:
            the sampled tokens and what is known of prompts on rank 0; an empty result on the others.
        """
        started = time.perf_counter()
        self.group.set_epoch(plan.step_id)  # A rank that is in another step is found by its first collective.
        for req_id in plan.dropped:
            self.sampler.drop(req_id)
            self.prompt_scorer.drop(req_id)
        for new in plan.new:
            self.sampler.add(new)
            self.prompt_scorer.add(new)
        self.buffers.apply(plan)
        spans = self.prompt_scorer.spans(plan, self.buffers.requests)
        lengths = uniform_query_len(request.num_tokens for request in plan.scheduled)
        choice = self.graphs.choose(plan.num_tokens, len(plan.scheduled), lengths)
        padded_reqs = choice.size if choice.mode is GraphMode.FULL else 0
        batch = self.buffers.fill(plan, choice.size, padded_reqs)
        self._last = choice, batch.metadata
        prepared = time.perf_counter()
        hidden = self.graphs.run(choice, batch.metadata)
        tokens: list[SampledToken] | None = []
        computed = time.perf_counter()
        # Which rows are scored and sampled follows from the plan alone, so every rank enters the same collectives.
        prompts = self._score_prompts(hidden, spans) if spans else []
        if batch.sample_req_ids:
            tokens = self._sample(hidden, batch, plan.step_id)
        elif self.device.type == "cuda":
            # Nothing was read back: wait, or the next step would overwrite pinned buffers still being copied.
            torch.cuda.current_stream().synchronize()
        ended = time.perf_counter()
        stats = {"prepare": prepared - started, "forward": computed - prepared, "sample": ended - computed}
        return StepResult(plan.step_id, tuple(tokens or ()), stats, tuple(prompts))

    def _context(self, metadata: AttentionMetadata) -> ForwardContext:
        """The context of one step; building it calls the attention backend's ``prepare_step``."""
        return ForwardContext.for_step(metadata, self.model.attention_layers, self.kv_caches)

    def _score_prompts(self, hidden: torch.Tensor, spans: Sequence[PromptSpan]) -> list[PromptLogprobs]:
        good: list[PromptLogprobs] = []
        for report in self.prompt_scorer.score(hidden, spans, self.model.compute_logits):
            if is_finite(report):
                good.append(report)
            else:
                self.sampler.mark_broken(report.req_id)
        return good

    def _sample(self, hidden: torch.Tensor, batch: Batch, step_id: int) -> list[SampledToken] | None:
        logits = self.model.compute_logits(hidden.index_select(0, batch.sample_rows))
        if self._faults is not None and self._faults.poisons_logits(step_id):
            logits[0] = float("nan")
        token_ids, tokens = self.sampler.sample(logits, batch.sample_req_ids)
        for req_id, token_id in zip(batch.sample_req_ids, token_ids, strict=True):
            self.buffers.requests[req_id].append_token(token_id)
        return tokens


def available_memory() -> int:
    """Bytes of memory this host can still give out, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable; set --kv-cache-memory")
