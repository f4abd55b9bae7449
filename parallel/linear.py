"""Linear layers over tensor-parallel ranks. Each knows its shard, how to cut a checkpoint tensor, and its forward.

Three things stay apart: the *cut* (:class:`WeightShard`, made by the layer), the *local sum* (a :class:`LinearMethod`:
plain or quantized) and the *collective* (the group's, called by the layer). Every forward returns ``(output, optional
bias)``, where the bias is None unless a caller is left to add it.

Modules are built under ``torch.device("meta")``; parameters are filled later, through their ``loader``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from typing_extensions import override

from parallel.group import TensorParallelGroup
from parallel.parameter import ParallelModule, ParameterLoader, Partition, ShapeError, TensorSource
from parallel.shard import BLOCK, HeadShard, Shard, ShardError, split, split_heads

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "LinearMethod",
    "MergedColumnParallelLinear",
    "ParallelModule",
    "ParameterLoader",
    "Partition",
    "QKVParallelLinear",
    "QuantConfig",
    "RowParallelLinear",
    "ShapeError",
    "TensorSource",
    "UnquantizedLinearMethod",
    "WeightShard",
]


@dataclass(frozen=True)
class WeightShard:
    """What one rank holds of the weight ``[output, input]`` of a linear layer.

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


class LinearMethod(ABC):
    """How a layer stores its weight and multiplies by it. Implementations are in ``workers/quantization/``."""

    @abstractmethod
    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        """Add the layer's parameters (all but the bias), each with its loader, on the ambient device."""

    @abstractmethod
    def apply(
        self,
        layer: ParallelModule,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """This rank's product: x ``[T, input_shard.size]`` to ``[T, local_output_size]``, plus the bias if given.

        Args:
            layer: holds the parameters.
            x: the input.
            bias: added if given.
            out_dtype: None for x's dtype, or ``torch.float32`` for the fp32 sums without a final rounding, which
                partial sums and logits need.
        """

    @abstractmethod
    def process_after_loading(self, layer: ParallelModule) -> None:
        """Called once when every parameter is filled: the place to rearrange them."""


class QuantConfig(Protocol):
    """Chooses the linear method of each layer of a model."""

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        """The method of the layer named ``prefix``; None for :class:`UnquantizedLinearMethod`.

        ``layer_kind`` is "column", "merged", "qkv", "row" or "lm_head".
        """
        ...


class UnquantizedLinearMethod(LinearMethod):
    """A plain weight ``[local_output_size, input_shard.size]`` in the layer's dtype, multiplied by torch."""

    @override
    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        loader = ParameterLoader(layer, "weight", shard.partitions, columns=(shard.input_shard, shard.input_size))
        layer.add_parameter("weight", loader, dtype)

    @override
    def apply(
        self,
        layer: ParallelModule,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        weight = layer.weight
        if out_dtype is None or out_dtype == x.dtype:
            return F.linear(x, weight, bias)
        if x.is_cpu:  # torch.mm takes out_dtype on CUDA only.
            return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))
        product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=out_dtype).unflatten(0, x.shape[:-1])
        return product if bias is None else product + bias

    @override
    def process_after_loading(self, layer: ParallelModule) -> None:
        pass


def choose_method(quant_config: QuantConfig | None, layer_kind: str, prefix: str) -> LinearMethod:
    """The method of a layer: what ``quant_config`` chooses, else :class:`UnquantizedLinearMethod`."""
    method = None if quant_config is None else quant_config.get_linear_method(layer_kind, prefix)
    return UnquantizedLinearMethod() if method is None else method


class LinearBase(ParallelModule):
    """What the linear layers share: group, cut, method and bias. The arguments here are common to all of them.

    Args:
        kind: the layer kind a quantization config sees.
        cut: what this rank holds.
        group: the ranks.
        bias: whether there is one. It is cut like the rows.
        quant_config: chooses the method; None: unquantized.
        prefix: the layer's full name in the model.
        disable_tp: hold the full weight on every rank and use no collective.
        dtype: of the parameters; default: torch's default dtype.
        zero_bias: keep a bias of zeros, because another rank adds it.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        kind: str,
        shard: WeightShard,
        *,
        group: TensorParallelGroup,
        bias: bool,
        quant_config: QuantConfig | None,
        prefix: str,
        disable_tp: bool,
        dtype: torch.dtype | None,
        zero_bias: bool = False,
    ) -> None:
        super().__init__(prefix)
        self.group = group
        self.tp_rank, self.tp_size = _place(group, disable_tp)
        self.weight_shard = shard
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.method = choose_method(quant_config, kind, prefix)
        self.method.create_parameters(self, shard, dtype)
        if bias:
            self.add_parameter("bias", ParameterLoader(self, "bias", shard.partitions, zero=zero_bias), dtype)
        else:
            self.register_parameter("bias", None)

    @override
    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)

    @override
    def extra_repr(self) -> str:
        shard = self.weight_shard
        inputs = f"{shard.input_shard.size}/{shard.input_size}"
        return f"output_size={shard.local_output_size}, input_size={inputs}, tp_rank={self.tp_rank}"


class ColumnParallelLinear(LinearBase):
    """A linear layer whose output dimension is cut: every rank computes its own columns of the output.

    Args:
        input_size: of the whole layer, present on every rank.
        output_size: of the whole layer.
        gather_output: return the whole output on every rank instead of the local part.
        multiple: output elements that stay together, see :func:`parallel.shard.split`.

    The others: see :class:`LinearBase`. Raises :class:`~parallel.shard.ShardError` if it cannot be cut.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: TensorParallelGroup,
        bias: bool = False,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        disable_tp: bool = False,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        multiple: int = BLOCK,
    ) -> None:
        tp_rank, tp_size = _place(group, disable_tp)
        self._shards = split(output_size, tp_size, multiple)
        partitions = (Partition(None, output_size, self._shards[tp_rank]),)
        super().__init__(
            "column", WeightShard(partitions, Shard(0, input_size), input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
        )  # fmt: skip
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x ``[T, input_size]`` to ``[T, local rows]``, or ``[T, output_size]`` with ``gather_output``."""
        y = self.method.apply(self, x, self.bias)
        if self.gather_output and self.tp_size > 1:
            y = gather_columns(self.group, y, self._shards)
        return y, None


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers of the same input in one product, e.g. gate and up.

    A rank holds its slice of the first matrix, then its slice of the second, and so on: its output is the local part
    of each, in order. Checkpoint tensors: one per matrix (``shard_id`` 0, 1, ...) or all in one (None).

    Args:
        input_size: of the whole layers, present on every rank.
        output_sizes: of each whole matrix.
        multiple: output elements that stay together.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        group: TensorParallelGroup,
        bias: bool = False,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        disable_tp: bool = False,
        dtype: torch.dtype | None = None,
        multiple: int = BLOCK,
    ) -> None:
        tp_rank, tp_size = _place(group, disable_tp)
        partitions = tuple(
            Partition(i, size, split(size, tp_size, multiple)[tp_rank]) for i, size in enumerate(output_sizes)
        )
        super().__init__(
            "merged", WeightShard(partitions, Shard(0, input_size), input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
        )  # fmt: skip
        self.local_output_sizes = tuple(partition.shard.size for partition in partitions)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x ``[T, input_size]`` to ``[T, sum(local_output_sizes)]``."""
        return self.method.apply(self, x, self.bias), None


class QKVParallelLinear(LinearBase):
    """The query, key and value projections in one product, cut by KV group.

    The output is this rank's query heads, then its key heads, then its value heads. With more ranks than KV heads,
    several ranks hold the same KV head. Checkpoint tensors: "q", "k", "v", or all in one below one another (None).

    Args:
        hidden_size: the input, present on every rank.
        head_dim: elements of one head.
        num_heads: query heads of the whole layer.
        num_kv_heads: KV heads of the whole layer.

    Attributes:
        head_shard: this rank's heads.
        q_size: elements of the output that are queries.
        kv_size: elements of the output that are keys, and as many values.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        group: TensorParallelGroup,
        bias: bool = False,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        disable_tp: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        tp_rank, tp_size = _place(group, disable_tp)
        self.head_shard: HeadShard = split_heads(num_heads, num_kv_heads, tp_size)[tp_rank]
        q, kv = _elements(self.head_shard.q, head_dim), _elements(self.head_shard.kv, head_dim)
        whole_kv = num_kv_heads * head_dim
        partitions = (
            Partition("q", num_heads * head_dim, q),
            Partition("k", whole_kv, kv),
            Partition("v", whole_kv, kv),
        )
        super().__init__(
            "qkv", WeightShard(partitions, Shard(0, hidden_size), hidden_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
        )  # fmt: skip
        self.q_size = q.size
        self.kv_size = kv.size

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x ``[T, hidden_size]`` to ``[T, q_size + 2 * kv_size]``."""
        return self.method.apply(self, x, self.bias), None


class RowParallelLinear(LinearBase):
    """A linear layer whose input dimension is cut: every rank has a part of the input and a partial sum.

    Partial sums stay in fp32 until the ranks' sum is rounded, once. Rounded to bf16 each, they ruin models whose
    residual stream has a few huge entries: two partials of thousands whose sum is near zero lose all of it, so that
    the same prompt was answered wrongly at TP 2 and rightly at TP 1.

    The bias is added once: after the all-reduce, or, where the partials are returned, to rank 0's. In the latter case
    the other ranks hold zeros for it, so that every rank traces the same graph.

    Args:
        input_size: of the whole layer; a rank's input is its shard.
        output_size: of the whole layer.
        reduce_results: sum over the ranks; else return the partial sum.
        shards: the cut of the input in elements, one per rank, where it is not the default (attention heads).
        multiple: input elements that stay together in the default cut.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: TensorParallelGroup,
        bias: bool = False,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        disable_tp: bool = False,
        dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        shards: tuple[Shard, ...] | None = None,
        multiple: int = BLOCK,
    ) -> None:
        tp_rank, tp_size = _place(group, disable_tp)
        if disable_tp or shards is None:
            shards = split(input_size, tp_size, multiple)
        _check_shards(shards, input_size, tp_size, prefix)
        partitions = (Partition(None, output_size, Shard(0, output_size)),)
        super().__init__(
            "row", WeightShard(partitions, shards[tp_rank], input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
            zero_bias=not reduce_results and tp_rank > 0,
        )  # fmt: skip
        self.reduce_results = reduce_results

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x ``[T, local columns]`` to ``[T, output_size]``: the sum over ranks, or this rank's part of it."""
        if self.tp_size == 1 or not self.reduce_results:
            return self.method.apply(self, x, self.bias), None
        y = self.group.all_reduce(self.method.apply(self, x, None, out_dtype=torch.float32))
        return (y if self.bias is None else y + self.bias).to(x.dtype), None


def gather_columns(group: TensorParallelGroup, y: torch.Tensor, shards: tuple[Shard, ...]) -> torch.Tensor:
    """The whole ``[T, total]`` from every rank's ``[T, shards[rank].size]``, on every rank, of shards of any size."""
    longest = max(shard.size for shard in shards)
    parts = group.all_gather(F.pad(y, (0, longest - y.shape[-1])))
    return torch.cat([parts[rank, ..., : shard.size] for rank, shard in enumerate(shards)], dim=-1)


def _place(group: TensorParallelGroup, disable_tp: bool) -> tuple[int, int]:
    """The rank and size by which a layer is cut."""
    return (0, 1) if disable_tp else (group.rank, group.size)


def _elements(heads: Shard, head_dim: int) -> Shard:
    return Shard(heads.start * head_dim, heads.size * head_dim)


def _check_shards(shards: tuple[Shard, ...], total: int, parts: int, prefix: str) -> None:
    """Refuse a cut that is not one neighbouring range per rank, together all of the dimension."""
    starts = [0, *(shard.stop for shard in shards)]
    if len(shards) != parts or [*(shard.start for shard in shards), total] != starts:
        raise ShardError(f"{prefix or 'a row-parallel layer'}: {shards} do not cut {total} elements over {parts} ranks")
