"""Which numbers of tokens are captured.

A step is padded to the next captured size, so sizes trade the cost of padding against the cost of capturing. On a GPU
a small step takes the time of reading the weights, whatever its size, and sizes can be far apart. A CPU pays for every
padded row, so there they grow by an eighth at most; its replay costs little to capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.common.errors import ConfigError

MIXED_LIMIT = {"cuda": 512, "cpu": 64}
"""Above so many tokens a step computes for so long that the cost of launching it, or of its Python, is hidden."""


@dataclass(frozen=True)
class CaptureSizes:
    """Numbers of tokens to capture, ascending.

    Attributes:
        decode: for batches with one new token per request; never more than there can be requests.
        mixed: for any batch.
        dropped: sizes that were asked for and that no step can have.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def resolve_capture_sizes(
    requested: Sequence[int] | None, *, max_num_seqs: int, max_num_batched_tokens: int, device_type: str
) -> CaptureSizes:
    """The sizes to capture.

    Args:
        requested: the flag's list in any order, duplicates allowed; None for the default.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: a size below 1, or no size that a step can have.
    """
    if requested is None:
        limit = min(max_num_batched_tokens, max(MIXED_LIMIT[device_type], max_num_seqs))
        return CaptureSizes(default_sizes(max_num_seqs, device_type), default_sizes(limit, device_type))
    sizes = sorted(set(requested))
    kept = tuple(size for size in sizes if size <= max_num_batched_tokens)
    if not kept or kept[0] < 1:
        raise ConfigError(
            f"cudagraph_capture_sizes is {', '.join(map(str, requested)) or 'empty'}; allowed: numbers of tokens from "
            f"1 to max_num_batched_tokens, {max_num_batched_tokens}. Leave it out for a default, or set cudagraph_mode "
            "NONE to capture nothing"
        )
    decode = tuple(size for size in kept if size <= max_num_seqs)
    return CaptureSizes(decode, kept, tuple(size for size in sizes if size > max_num_batched_tokens))


def default_sizes(limit: int, device_type: str) -> tuple[int, ...]:
    """Sizes from 1 to ``limit``, both included."""
    sizes = [1, 2, 4] if device_type == "cuda" else list(range(1, 16))
    size = 8 if device_type == "cuda" else 16
    while size < limit:
        sizes.append(size)
        power_of_two = 1 << (size.bit_length() - 1)
        size += max(8, power_of_two // 16) if device_type == "cuda" else power_of_two // 8
    return (*(size for size in sizes if size < limit), limit)
