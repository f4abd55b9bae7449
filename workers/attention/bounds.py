"""Bounds of the KV cache: slots and block ids of a step are checked where a backend reads them on the host."""

from __future__ import annotations

import torch

from workers.forward_context import AttentionMetadata


class KVCacheBoundsError(RuntimeError):
    """A slot or a block id of a step lies outside the KV cache; nothing outside the cache was written."""


def check_slots(slot_mapping: torch.Tensor, num_blocks: int, block_size: int) -> None:
    """Check int64 [T] slots, of which negative ones are padding.

    Raises:
        KVCacheBoundsError: a slot is beyond the cache; the message names the first one.
    """
    beyond = (slot_mapping >= num_blocks * block_size).nonzero().flatten()
    if beyond.numel():
        token = int(beyond[0])
        raise KVCacheBoundsError(
            f"slot {int(slot_mapping[token])} of token {token} is outside the KV cache, which has {num_blocks} blocks "
            f"of {block_size} tokens"
        )


def check_blocks(blocks: torch.Tensor, num_blocks: int) -> None:
    """Check block ids of any shape.

    Raises:
        KVCacheBoundsError: a block id is negative or beyond the cache; the message names the first one.
    """
    outside = blocks[(blocks < 0) | (blocks >= num_blocks)]
    if outside.numel():
        raise KVCacheBoundsError(f"block {int(outside[0])} is outside the KV cache, which has {num_blocks} blocks")


def check_block_table(metadata: AttentionMetadata, num_blocks: int, block_size: int) -> None:
    """Check the blocks of every request's context.

    Raises:
        KVCacheBoundsError: as :func:`check_blocks`.
    """
    lengths: list[int] = metadata.seq_lens[: metadata.num_reqs].tolist()
    for request, length in enumerate(lengths):
        check_blocks(metadata.block_table[request, : -(-length // block_size)], num_blocks)
