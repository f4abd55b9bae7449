"""CUDA graphs played on the CPU, to prove whatever is not the CUDA call itself.

A capture notes every op down and its replay does them again in the same memory. Unlike a real capture it also carries
them out, so results exist early; :class:`FakeCuda` therefore overwrites all that a capture made when it ends. Events
are kept in the order in which they came.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.attention.attention_op import attention
from workers.attention.kv_cache_update_op import kv_cache_update
from workers.graphs import cuda_graph

SEEN_THROUGH = {
    torch.ops.lockstep.attention.default: attention,
    torch.ops.lockstep.kv_cache_update.default: kv_cache_update,
}


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Noted(TorchDispatchMode):
    """Carries ops out and notes them down with the tensors they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SEEN_THROUGH:
            # A device sees the launches inside, not the op.
            with self:
                return SEEN_THROUGH[func](*args)
        result = func(*args, **(kwargs or {}))
        # Aliases, so that the memory stays and the objects that the caller holds can be seen to die.
        kept = [tensor.as_strided(tensor.shape, tensor.stride()) for tensor in _tensors_in(result)]
        self.calls.append((func, _aliases(args), _aliases(kwargs or {}), kept))
        return result


def _aliases(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.as_strided(argument.shape, argument.stride(), argument.storage_offset())
    if isinstance(argument, (list, tuple)):
        return type(argument)(_aliases(item) for item in argument)
    if isinstance(argument, dict):
        return {name: _aliases(item) for name, item in argument.items()}
    return argument


class FakeCuda:
    """What a test sees of the pretended device.

    Attributes:
        events: ("begin" | "end" | "replay" | "reset", number of the graph), and ("synchronize" | "empty_cache" |
            "pool", 0).
        pools: that each capture was given.
        modes: capture error modes.
        streams: that were current when a capture began.
        fail_at: the capture that fails, by number; None: none.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.pools: list[Any] = []
        self.modes: list[str] = []
        self.streams: list[Any] = []
        self.fail_at: int | None = None
        self.capturing: FakeGraph | None = None
        self.current: Any = FakeStream()
        self.graphs = 0

    @property
    def alive(self) -> int:
        """Graphs that were captured to the end and not reset."""
        ended, reset = ({number for event, number in self.events if event == what} for what in ("end", "reset"))
        return len(ended - reset)

    def note(self, what: str, number: int = 0) -> None:
        self.events.append((what, number))


class FakeStream:
    """A stream that is waited for."""

    def __init__(self, device: Any = None) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    cuda: FakeCuda

    def __init__(self) -> None:
        self.number = self.cuda.graphs
        self.cuda.graphs += 1
        self._noted = _Noted()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.cuda.capturing is None, "one capture at a time"
        self.cuda.capturing = self
        self.cuda.note("begin", self.number)
        self.cuda.pools.append(pool)
        self.cuda.modes.append(capture_error_mode)
        self.cuda.streams.append(self.cuda.current)
        self._noted.__enter__()

    def capture_end(self) -> None:
        self._noted.__exit__(None, None, None)
        self.cuda.capturing = None
        if self.cuda.fail_at == self.number:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.note("end", self.number)
        for _, _, _, results in self._noted.calls:
            for result in results:
                if result.is_floating_point() and all(result.stride()):
                    result.fill_(float("nan"))

    def replay(self) -> None:
        self.cuda.note("replay", self.number)
        for func, args, kwargs, kept in self._noted.calls:
            for place, value in zip(kept, _tensors_in(func(*args, **kwargs)), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    def reset(self) -> None:
        self.cuda.note("reset", self.number)


def unowned_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """What ``cuda_graph.unowned`` does, over the CPU's memory."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (elements * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace torch.cuda as far as ``cuda_graph.py`` uses it."""
    cuda = FakeCuda()

    @contextlib.contextmanager
    def stream(entered: FakeStream) -> Generator[None]:
        before, cuda.current = cuda.current, entered
        yield
        cuda.current = before

    def pool() -> str:
        cuda.note("pool")
        return f"pool {sum(what == 'pool' for what, _ in cuda.events)}"

    replaced = {
        "CUDAGraph": type("CUDAGraph", (FakeGraph,), {"cuda": cuda}),
        "Stream": FakeStream,
        "stream": stream,
        "current_stream": lambda device: cuda.current,
        "synchronize": lambda device: cuda.note("synchronize"),
        "empty_cache": lambda: cuda.note("empty_cache"),
        "graph_pool_handle": pool,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "unowned", unowned_on_cpu)
    return cuda
