"""Parameters of parallel layers: which slice of which checkpoint tensor each one holds.

A layer describes the shard of its weight (:class:`WeightShard`), a linear method says how each of its parameters is
laid out over that weight (:class:`Layout`), and the :class:`ParameterLoader` attached to the parameter derives the
local shape from both, checks the shapes of checkpoint tensors, reads only this rank's slice and records what was
filled. ``workers/weights.py`` opens files and matches tensor names; it does not know the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn
from typing_extensions import override

from parallel.shard import Shard, ShardError

ShardId = str | int | None


class ShapeError(ValueError):
    """A checkpoint tensor does not have the shape that the model expects; the message names tensor and shapes."""


class DtypeError(ValueError):
    """A checkpoint tensor has a dtype that the parameter cannot hold; the message names tensor and dtypes."""


class TensorSource(Protocol):
    """A tensor of a checkpoint that can be read in part."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        ...

    def read(self, *slices: slice) -> torch.Tensor:
        """The part selected by one slice per dimension; reads no more than that."""
        ...


@dataclass(frozen=True)
class Partition:
    """The rows of a weight that come from one matrix of the model: q, k, v, gate, up, ...

    Attributes:
        shard_id: name of the matrix in a layer that stacks several: 0, 1, "q", ...; None where there is one only.
        total: rows (output elements) of the whole matrix.
        shard: the rows of this rank.
    """

    shard_id: ShardId
    total: int
    shard: Shard


@dataclass(frozen=True)
class WeightShard:
    """The part of a weight ``[output, input]`` that one rank holds.

    Attributes:
        partitions: of the output dimension, one per matrix stacked in it.
        input_shard: this rank's part of the input dimension.
        input_size: the whole input dimension.
    """

    partitions: tuple[Partition, ...]
    input_shard: Shard
    input_size: int

    @property
    def local_output_size(self) -> int:
        """Rows of this rank's weight."""
        return sum(partition.shard.size for partition in self.partitions)


def replicated_vector(size: int) -> WeightShard:
    """The shard of a vector that every rank holds whole, such as a norm's weight; its layout is PER_CHANNEL."""
    return WeightShard((Partition(None, size, Shard(0, size)),), Shard(0, 1), 1)


WHOLE = -1
"""A block size: one entry covers a whole dimension, and every rank holds it."""


@dataclass(frozen=True)
class Layout:
    """How the entries of a stored tensor cover a weight ``[output, input]``.

    The tensor has one dimension per block size that is given. Shards follow: the entries of a shard are those that
    cover its elements, and its borders have to be borders of entries.

    =================  =======================================  ===========================================
    layout             example                                  tensor
    =================  =======================================  ===========================================
    plain              bf16 or int8 weight                      ``Layout(1, 1)``: ``[N, K]``
    per channel        scale of an int8 weight, a bias          ``Layout(1, None)``: ``[N]``
    per channel (2-D)  the same with a dimension of size 1      ``Layout(1, WHOLE)``: ``[N, 1]``
    per group          int4 scale of 128 inputs                 ``Layout(1, 128)``: ``[N, K / 128]``
    block scale        fp8 scale of 128 x 128 elements          ``Layout(128, 128)``: ``[N / 128, K / 128]``
    packed             8 int4 in an int32 along the input       ``Layout(1, 8)``: ``[N, K / 8]``
    packed (GPTQ)      the same, input dimension first          ``Layout(1, 8, input_first=True)``: ``[K / 8, N]``
    scalar             one scale per matrix                     ``Layout(None, None)``: ``[]`` or ``[1]``
    =================  =======================================  ===========================================

    Attributes:
        output_block: output elements per entry; :data:`WHOLE`: one entry for all of them; None: the tensor has no
            output dimension.
        input_block: the same for the input dimension.
        input_first: whether the input dimension comes first.
    """

    output_block: int | None = 1
    input_block: int | None = 1
    input_first: bool = False


PLAIN = Layout(1, 1)
PER_CHANNEL = Layout(1, None)
SCALAR = Layout(None, None)


class ParameterLoader:
    """Fills one parameter of one layer from checkpoint tensors.

    The parameter holds this rank's entries of every partition, in order; of a :data:`SCALAR` layout, one entry for
    each partition. A tensor holds one partition (``shard_id`` names it) or all of them stacked (``shard_id`` None).

    Args:
        module: the layer; its parameter is looked up at every load, because materializing replaces it.
        name: of the parameter within the layer.
        shard: of the layer's weight.
        layout: how the parameter's entries cover the weight.
        zero: keep zeros and ignore the checkpoint's values: for a bias that only one rank adds.

    Raises:
        ShardError: a shard border is inside an entry, e.g. of a block scale.
    """

    def __init__(
        self, module: ParallelModule, name: str, shard: WeightShard, layout: Layout = PLAIN, *, zero: bool = False
    ) -> None:
        self.label = f"{module.prefix}.{name}" if module.prefix else name
        self._module = module
        self._name = name
        self._partitions = shard.partitions
        self._layout = layout
        self._zero = zero
        self._filled: set[ShardId] = set()
        self._rows = [self._entries(p.shard, p.total, layout.output_block) for p in shard.partitions]
        self._columns = self._entries(shard.input_shard, shard.input_size, layout.input_block)
        self._num_columns = _count(shard.input_size, layout.input_block)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's parameter."""
        return self._arrange(sum(rows.size for rows in self._rows), self._columns.size, stacked=True)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of that dtype can fill the parameter: the same one, or both plain floating-point dtypes."""
        own = self._parameter().dtype
        return dtype == own or (_is_plain(dtype) and _is_plain(own))

    def check_shape(self, name: str, shape: tuple[int, ...], shard_id: ShardId = None) -> None:
        """Check a checkpoint tensor's shape without reading it.

        Raises:
            ShapeError: the tensor has another shape than the model.
            ValueError: the parameter has no such partition.
        """
        wanted = self._wanted(name, shard_id)
        rows = sum(_count(self._partitions[index].total, self._layout.output_block) for index in wanted)
        stacked = len(wanted) > 1
        expected = self._arrange(rows, self._num_columns, stacked=stacked)
        # A scalar may be stored with one dimension, and one scalar may serve all partitions.
        scalar = self._layout == SCALAR and tuple(shape) in ((), (1,))
        if tuple(shape) != expected and not scalar:
            raise ShapeError(
                f"tensor {name} has shape {list(shape)}; {self.label} needs {list(expected)}. The checkpoint does not "
                "fit its config.json"
            )

    def load(self, source: TensorSource, shard_id: ShardId = None) -> None:
        """Copy this rank's slice of ``source`` into the parameter, converting between plain floating-point dtypes.

        Args:
            source: the whole tensor; only the slice is read.
            shard_id: the partition that the tensor holds; None if it holds the whole (plain or fused) matrix.

        Raises:
            ShapeError: the tensor has another shape than the model.
            DtypeError: the tensor has a dtype that cannot be converted.
            ValueError: the parameter has no such partition.
            RuntimeError: the parameter is still on the meta device.
        """
        parameter = self._parameter()
        if parameter.is_meta:
            raise RuntimeError(
                f"{self.label} is on the meta device; materialize the model before loading {source.name}"
            )
        self.check_shape(source.name, source.shape, shard_id)
        base = 0
        for index in self._wanted(source.name, shard_id):
            partition, rows = self._partitions[index], self._rows[index]
            target = self._target(parameter, index)
            if self._zero:
                target.zero_()
            else:
                self._copy(source, target, Shard(base + rows.start, rows.size))
            self._filled.add(partition.shard_id)
            base += _count(partition.total, self._layout.output_block)

    def missing(self) -> list[str]:
        """What was never filled: the parameter's name, with ``[shard_id]`` where it is one partition of several."""
        return [
            self.label if partition.shard_id is None else f"{self.label}[{partition.shard_id}]"
            for partition in self._partitions
            if partition.shard_id not in self._filled
        ]

    def _parameter(self) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._module, self._name)
        return parameter

    def _wanted(self, name: str, shard_id: ShardId) -> list[int]:
        """Indices of the partitions that a tensor holds."""
        found = [i for i, p in enumerate(self._partitions) if shard_id is None or p.shard_id == shard_id]
        if not found:
            known = ", ".join(repr(partition.shard_id) for partition in self._partitions)
            raise ValueError(f"{self.label} has no partition {shard_id!r} for tensor {name}; it has {known}")
        return found

    def _entries(self, shard: Shard, total: int, block: int | None) -> Shard:
        """The entries that cover a shard of a dimension of ``total`` elements; one where there is no dimension."""
        if block is None or block == WHOLE:
            return Shard(0, 1)
        if shard.start % block or (shard.stop % block and shard.stop != total):
            raise ShardError(
                f"{self.label}: the shard of elements {shard.start} to {shard.stop} divides a group of {block}; give "
                "the layer a multiple that is a multiple of the group"
            )
        return Shard(shard.start // block, _count(shard.size, block))

    def _arrange(self, rows: int, columns: int, *, stacked: bool) -> tuple[int, ...]:
        """The shape of a tensor with that many entries per dimension."""
        layout = self._layout
        if layout == SCALAR:
            return (rows,) if stacked else ()
        shape = ((rows,) if layout.output_block else ()) + ((columns,) if layout.input_block else ())
        return shape[::-1] if layout.input_first else shape

    def _target(self, parameter: torch.Tensor, index: int) -> torch.Tensor:
        """The part of the parameter that holds a partition."""
        layout = self._layout
        if layout.output_block is None and layout != SCALAR:
            return parameter.detach()  # Every partition has the same input dimension.
        begin = sum(rows.size for rows in self._rows[:index])
        dim = 1 if layout.input_first and layout.input_block else 0
        return parameter.detach().narrow(dim, begin, self._rows[index].size)

    def _copy(self, source: TensorSource, target: torch.Tensor, rows: Shard) -> None:
        """Copy the entries ``rows`` (and this rank's columns) of a tensor."""
        if self._layout == SCALAR:
            stacked = len(source.shape) == 1 and source.shape[0] > 1
            slices = (slice(rows.start, rows.stop),) if stacked else tuple(slice(0, 1) for _ in source.shape)
        else:
            slices = tuple(slice(s.start, s.stop) for s in self._slices(rows))
        part = source.read(*slices)
        if not self.accepts(part.dtype):
            raise DtypeError(f"tensor {source.name} is stored as {part.dtype}; {self.label} holds {target.dtype}")
        if self._layout == SCALAR:
            part = part.reshape(1)
        if part.shape != target.shape:
            raise ShapeError(f"reading a slice of {source.name} gave {list(part.shape)} and not {list(target.shape)}")
        target.copy_(part)

    def _slices(self, rows: Shard) -> list[Shard]:
        layout = self._layout
        slices = ([rows] if layout.output_block else []) + ([self._columns] if layout.input_block else [])
        return slices[::-1] if layout.input_first else slices


class ParallelModule(nn.Module):
    """A module that shards its own parameters.

    ``to_empty`` and ``to`` replace a meta parameter by a new object; this class keeps the loader attached.

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
        """Register an uninitialized parameter of ``loader.local_shape`` that ``loader`` fills."""
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


def _count(total: int, block: int | None) -> int:
    """Entries of a dimension of ``total`` elements; one where there is no dimension."""
    return 1 if block is None or block == WHOLE else -(-total // block)


def _is_plain(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are numbers without a scale: fp16, bf16, fp32, fp64, and not fp8 or int4 in int32."""
    return dtype.is_floating_point and dtype.itemsize >= 2
