"""How a parameter of a parallel layer is filled: which slice of which checkpoint tensor goes where.

A layer states its cut as :class:`Partition` objects; the :class:`ParameterLoader` that hangs on each parameter checks
shapes, reads only the slice of this rank and keeps account of what came. Opening files and matching tensor names is
the matter of ``workers/weights.py``; what the cuts are is known by the layers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn
from typing_extensions import override

from parallel.shard import Shard

ShardId = str | int | None


class ShapeError(ValueError):
    """A checkpoint tensor does not have the shape that the model expects; the message names all three."""


class TensorSource(Protocol):
    """A tensor of a checkpoint that can be read in part."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""
        ...

    def read(self, *slices: slice) -> torch.Tensor:
        """The part of it that one slice per dimension cuts out, reading no more than that."""
        ...


@dataclass(frozen=True)
class Partition:
    """A run of rows (dimension 0) of a parameter that comes from one matrix of the model.

    Attributes:
        shard_id: how a checkpoint tensor that holds this matrix alone is called: 0, 1, "q", ...; None where the
            parameter is one matrix only.
        total: rows of the whole matrix.
        shard: the rows this rank keeps.
    """

    shard_id: ShardId
    total: int
    shard: Shard


class ParameterLoader:
    """Fills one parameter of one layer from checkpoint tensors.

    The parameter holds this rank's rows of every partition, in order. A tensor holds one partition (``shard_id``
    names it) or all of them stacked (``shard_id`` None).

    Args:
        module: the layer; its parameter is looked up at every load, because materialising replaces it.
        name: of the parameter within the layer.
        partitions: its rows.
        columns: what this rank keeps of dimension 1, and the whole size; None for a parameter of one dimension.
        zero: keep zeros whatever the checkpoint says (for what only one rank may add).
    """

    def __init__(
        self,
        module: ParallelModule,
        name: str,
        partitions: tuple[Partition, ...],
        *,
        columns: tuple[Shard, int] | None = None,
        zero: bool = False,
    ) -> None:
        self.label = f"{module.prefix}.{name}" if module.prefix else name
        self._module = module
        self._name = name
        self._partitions = partitions
        self._columns = columns
        self._zero = zero
        self._filled: set[ShardId] = set()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's parameter."""
        rows = sum(partition.shard.size for partition in self._partitions)
        return (rows,) if self._columns is None else (rows, self._columns[0].size)

    def load(self, source: TensorSource, shard_id: ShardId = None) -> None:
        """Copy this rank's slice of ``source`` into the parameter, converting its dtype.

        Args:
            source: the whole tensor; only the slice is read.
            shard_id: which partition it is, None if it is the whole (plain or already fused) matrix.

        Raises:
            ShapeError: the tensor has another shape than the model.
            ValueError: the parameter has no such partition.
            RuntimeError: the parameter is still on the meta device.
        """
        parameter: torch.Tensor = getattr(self._module, self._name)
        if parameter.is_meta:
            raise RuntimeError(
                f"{self.label} is on the meta device; materialise the model before loading {source.name}"
            )
        wanted = self._partitions if shard_id is None else tuple(p for p in self._partitions if p.shard_id == shard_id)
        if not wanted:
            known = ", ".join(repr(partition.shard_id) for partition in self._partitions)
            raise ValueError(f"{self.label} has no partition {shard_id!r} for tensor {source.name}; it has {known}")
        self._check_shape(source, sum(partition.total for partition in wanted))
        columns = () if self._columns is None else (slice(self._columns[0].start, self._columns[0].stop),)
        base = 0
        for partition in wanted:
            begin = self._offset(partition)
            target = parameter.detach()[begin : begin + partition.shard.size]
            if self._zero:
                target.zero_()
            else:
                part = source.read(slice(base + partition.shard.start, base + partition.shard.stop), *columns)
                if part.shape != target.shape:
                    raise ShapeError(f"reading a slice of {source.name} gave {_dims(part)} and not {_dims(target)}")
                target.copy_(part)
            self._filled.add(partition.shard_id)
            base += partition.total

    def missing(self) -> list[str]:
        """What was never filled: the parameter's name, with ``[shard_id]`` where it is one partition of several."""
        return [
            self.label if partition.shard_id is None else f"{self.label}[{partition.shard_id}]"
            for partition in self._partitions
            if partition.shard_id not in self._filled
        ]

    def _offset(self, partition: Partition) -> int:
        before = self._partitions[: self._partitions.index(partition)]
        return sum(other.shard.size for other in before)

    def _check_shape(self, source: TensorSource, rows: int) -> None:
        expected = (rows,) if self._columns is None else (rows, self._columns[1])
        if tuple(source.shape) != expected:
            raise ShapeError(
                f"tensor {source.name} has shape {list(source.shape)}; {self.label} needs {list(expected)}. The "
                "checkpoint does not fit its config.json"
            )


class ParallelModule(nn.Module):
    """A module that cuts its own parameters.

    ``to_empty`` and ``to`` replace a meta parameter by a new object; this class sees to it that the loader stays on.

    Args:
        prefix: the layer's full name in the model, for messages.

    Attributes:
        weight: where the module has a plain weight.
    """

    weight: torch.Tensor

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def add_parameter(self, name: str, loader: ParameterLoader, dtype: torch.dtype) -> None:
        """Register an uninitialised parameter of ``loader.local_shape`` that ``loader`` fills."""
        parameter = nn.Parameter(torch.empty(loader.local_shape, dtype=dtype), requires_grad=False)
        parameter.loader = loader  # pyright: ignore[reportAttributeAccessIssue]
        self.register_parameter(name, parameter)

    def process_after_loading(self) -> None:
        """Called once when every parameter is filled; a quantized layer rearranges its weights here."""

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        parameters: dict[str, Any] = self._parameters
        loaders = {name: parameter.loader for name, parameter in parameters.items() if hasattr(parameter, "loader")}
        super()._apply(fn, recurse)
        for name, loader in loaders.items():
            parameters[name].loader = loader
        return self


def _dims(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))
