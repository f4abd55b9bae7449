"""A model under test: weights, KV cache and block tables of a few requests, stepped by hand.

Imported in rank processes, so it imports no transformers.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from parallel.embedding import split_vocab
from parallel.group import TensorParallelGroup
from parallel.linear import gather_columns
from runtime.common.checkpoint import inspect_checkpoint
from runtime.common.model_config import load_model_config
from workers.forward_context import AttentionMetadata, ForwardContext, forward_context
from workers.kv_cache import KVCacheSpec, allocate_kv_cache
from workers.models.decoder import DecoderForCausalLM
from workers.models.registry import build_model
from workers.quantization.registry import get_quant_config
from workers.weights import load_weights

Step = list[tuple[int, list[int]]]
"""What one step computes: (request, its next tokens)."""


class ModelStepper:
    """One rank's model over a poisoned KV cache whose blocks are given out in no order.

    Args:
        model: with its weights.
        group: the ranks.
        block_size: tokens in a block.
        num_blocks: of the cache.
    """

    def __init__(
        self, model: DecoderForCausalLM, group: TensorParallelGroup, *, block_size: int = 4, num_blocks: int = 64
    ) -> None:
        self.model = model
        self.group = group
        self.vocab = split_vocab(model.config.vocab_size, group.size)
        self.block_size = block_size
        self.kv_caches = allocate_kv_cache(KVCacheSpec.from_model(self.model, block_size), num_blocks, group.device)
        for cache in self.kv_caches.values():
            cache.fill_(float("nan"))
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    @torch.inference_mode()
    def step(self, step: Step, padding: int = 0) -> torch.Tensor:
        """The whole vocabulary's logits of every token of the step, fp32 [num_tokens, vocab_size], on every rank."""
        input_ids, positions, metadata = self.prepare(step, padding)
        with forward_context(ForwardContext.for_step(metadata, self.model.attention_layers, self.kv_caches)):
            hidden = self.model(input_ids, positions)
        logits = self.model.compute_logits(hidden[: metadata.num_tokens])
        whole = logits if self.group.size == 1 else gather_columns(self.group, logits, self.vocab)
        return whole.float()

    def prepare(self, step: Step, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Input ids, positions and metadata of a step, and the requests' tables advanced by it."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for request, tokens in step:
            first = self.computed.get(request, 0)
            last = self.computed[request] = first + len(tokens)
            table = self.blocks.setdefault(request, [])
            while len(table) * self.block_size < last:
                table.append(self.free.pop())
            at = range(first, last)
            ids += tokens
            positions += at
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in at]
            starts.append(starts[-1] + len(tokens))
        tables = [self.blocks[request] for request, _ in step]
        widest = max((len(table) for table in tables), default=1)
        lengths = [self.computed[request] for request, _ in step]
        metadata = AttentionMetadata(
            num_tokens=len(ids),
            num_reqs=len(step),
            max_query_len=max((len(tokens) for _, tokens in step), default=0),
            max_seq_len=max(lengths, default=0),
            slot_mapping=torch.tensor(slots + [-1] * padding),
            block_table=torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32).view(-1, widest),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )
        return torch.tensor(ids + [0] * padding), torch.tensor(positions + [0] * padding), metadata


class ModelHarness(ModelStepper):
    """The model of a checkpoint.

    Args:
        folder: of the checkpoint.
        group: the ranks.
        dtype: default: the checkpoint's.
        block_size: tokens in a block.
        num_blocks: of the cache.
    """

    def __init__(
        self, folder: Path, group: TensorParallelGroup, dtype: str = "", *, block_size: int = 4, num_blocks: int = 64
    ) -> None:
        config = load_model_config(folder)
        model = build_model(
            config,
            group=group,
            dtype=getattr(torch, dtype or config.dtype),
            quant_config=get_quant_config(None, group.device),
        )
        self.report = load_weights(model, inspect_checkpoint(folder), device=group.device)
        super().__init__(model, group, block_size=block_size, num_blocks=num_blocks)


def schedules(sequences: list[list[int]]) -> dict[str, list[Step]]:
    """Ways to compute the same sequences: whole, in chunks, token by token, and everything at once."""
    longest = max(len(tokens) for tokens in sequences)

    def chunked(size: int) -> list[Step]:
        begins = range(0, longest, size)
        return [[(r, s[b : b + size]) for r, s in enumerate(sequences) if len(s) > b] for b in begins]

    # Request 0 decodes, request r > 0 comes r steps later and takes chunks of r + 2 tokens.
    mixed: list[Step] = []
    done = [0] * len(sequences)
    while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
        step: Step = []
        for r, tokens in enumerate(sequences):
            size = (len(tokens) // 2 if not mixed else 1) if r == 0 else r + 2
            if len(mixed) >= r and done[r] < len(tokens):
                step.append((r, tokens[done[r] : done[r] + size]))
                done[r] += size
        mixed.append(step)
    return {"whole": chunked(longest), "chunked": chunked(5), "decode": chunked(1), "mixed": mixed}


def run_schedules(
    group: TensorParallelGroup, folder: str, sequences: list[list[int]], dtype: str = ""
) -> dict[str, list[bytes]]:
    """For each of :func:`schedules`, every sequence's logits as fp32 bytes; empty on ranks but the first."""
    harness = ModelHarness(Path(folder), group, dtype, num_blocks=256)
    result: dict[str, list[bytes]] = {}
    for number, (name, steps) in enumerate(schedules(sequences).items()):
        base = number * len(sequences)
        parts: dict[int, list[torch.Tensor]] = {r: [] for r in range(len(sequences))}
        for padding, step in enumerate(steps):
            logits = harness.step([(base + r, tokens) for r, tokens in step], padding % 3)
            for (r, _), part in zip(step, logits.split([len(tokens) for _, tokens in step]), strict=True):
                parts[r].append(part)
        if group.rank == 0:
            result[name] = [torch.cat(parts[r]).cpu().numpy().tobytes() for r in parts]
    return result
