"""Pure functions of graph capture: the supported graph mode, the captured sizes, and the graph that a step runs in.

Their arguments come from the config and the step plan and are equal on every rank, so all ranks capture the same
graphs and replay the same one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.common.config import CompileMode, GraphMode
from runtime.common.errors import ConfigError

MIXED_LIMIT = {"cuda": 512, "cpu": 64}
"""Above this number of tokens a step computes long enough to hide its launches, or its Python."""


@dataclass(frozen=True)
class Dispatch:
    """How one step runs: as NONE, PIECEWISE or FULL, padded to ``size`` rows."""

    mode: GraphMode
    size: int


@dataclass(frozen=True)
class Captured:
    """Numbers of tokens with a captured graph, ascending.

    Attributes:
        full: graphs of whole decode steps: one new token per request, as many requests as tokens.
        piecewise: graphs for any batch.
    """

    full: tuple[int, ...] = ()
    piecewise: tuple[int, ...] = ()


def dispatch(num_tokens: int, num_reqs: int, uniform_query_len: int | None, captured: Captured) -> Dispatch:
    """The graph of a step: the smallest that fits, FULL before PIECEWISE, NONE if none fits.

    Args:
        num_tokens: tokens of the step.
        num_reqs: requests of the step.
        uniform_query_len: number of new tokens of every request, None if it differs between requests.
        captured: the captured sizes.
    """
    if num_tokens > 0:
        if uniform_query_len == 1 and num_reqs == num_tokens:
            at = bisect.bisect_left(captured.full, num_tokens)
            if at < len(captured.full):
                return Dispatch(GraphMode.FULL, captured.full[at])
        at = bisect.bisect_left(captured.piecewise, num_tokens)
        if at < len(captured.piecewise):
            return Dispatch(GraphMode.PIECEWISE, captured.piecewise[at])
    return Dispatch(GraphMode.NONE, num_tokens)


def uniform_query_len(lengths: Iterable[int]) -> int | None:
    """The number of new tokens that all requests of a step have; None if they differ or there is no request."""
    found = set(lengths)
    return found.pop() if len(found) == 1 else None


def supported_mode(
    mode: GraphMode,
    *,
    compile_mode: CompileMode,
    device_type: str,
    attention_capturable: bool,
    collectives_capturable: bool,
) -> tuple[GraphMode, str]:
    """The part of a graph mode that this machine can capture.

    A CPU replays the stages of a traced model. A CUDA graph holds launches only, and nothing that reads a value back
    to the host. PIECEWISE graphs are those of the subgraphs of a piecewise compiled model.

    Args:
        mode: as configured.
        compile_mode: how the model is compiled.
        device_type: "cpu" or "cuda".
        attention_capturable: whether the attention backend launches the same kernels whatever a batch holds.
        collectives_capturable: whether the collectives run on the device.

    Returns:
        the mode to capture, and a warning that says what was dropped and why; empty if nothing was.
    """
    if mode is GraphMode.NONE:
        return mode, ""
    traced = compile_mode in (CompileMode.DYNAMO_TRACE_ONCE, CompileMode.PIECEWISE)
    decode, mixed, reasons = mode.decode, mode.mixed, list[str]()
    if device_type == "cpu" and not traced:
        decode = mixed = GraphMode.NONE
        reasons.append(f"a CPU replays traced models only, and the compile mode is {compile_mode} (use -O1 or higher)")
    elif device_type == "cuda" and not collectives_capturable:
        decode = mixed = GraphMode.NONE
        reasons.append("these collectives run on the host")
    else:
        if device_type == "cuda" and decode is GraphMode.FULL and not attention_capturable:
            decode = mixed
            reasons.append("this attention backend reads sizes on the host, so no graph can hold it")
        if GraphMode.PIECEWISE in (decode, mixed) and compile_mode is not CompileMode.PIECEWISE:
            decode = decode if decode is GraphMode.FULL else GraphMode.NONE
            mixed = GraphMode.NONE
            reasons.append(f"compile mode {compile_mode} has no subgraphs to capture (use PIECEWISE and -O1 or higher)")
    if not reasons:
        return mode, ""
    found = GraphMode.of(decode, mixed)
    return found, f"graph mode {mode} becomes {found}: {'; '.join(reasons)}"


@dataclass(frozen=True)
class CaptureSizes:
    """Numbers of tokens to capture, ascending.

    Attributes:
        decode: for batches with one new token per request; at most the maximum number of requests.
        mixed: for any batch.
        dropped: requested sizes that are larger than any step.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def resolve_capture_sizes(
    requested: Sequence[int] | None, *, max_num_seqs: int, max_num_batched_tokens: int, device_type: str
) -> CaptureSizes:
    """The sizes to capture.

    Args:
        requested: ``--cudagraph-capture-sizes``, in any order, duplicates allowed; None for the default.
        max_num_seqs: maximum number of requests in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        device_type: "cpu" or "cuda".

    Raises:
        ConfigError: a size is below 1, or every size is larger than any step.
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
    """Sizes from 1 to ``limit``, both included.

    A step is padded to the next size. On a GPU a small step takes the time of reading the weights whatever its size,
    so sizes are far apart. A CPU computes every padded row, so sizes grow by an eighth at most.
    """
    sizes = [1, 2, 4] if device_type == "cuda" else list(range(1, 16))
    size = 8 if device_type == "cuda" else 16
    while size < limit:
        sizes.append(size)
        power_of_two = 1 << (size.bit_length() - 1)
        size += max(8, power_of_two // 16) if device_type == "cuda" else power_of_two // 8
    return (*(size for size in sizes if size < limit), limit)
