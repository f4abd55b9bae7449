"""Linear layers over tensor-parallel ranks.

Each layer holds the shard of its weight, slices checkpoint tensors accordingly, and runs the collective that its
sharding needs. How the weight is stored and multiplied by is a :class:`~parallel.linear_method.LinearMethod`. Every
forward returns ``(output, bias)``, where the bias is None unless the caller has to add it.

Modules are built under ``torch.device("meta")``; their parameters are filled later, through their loaders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from typing_extensions import override

from parallel.group import TensorParallelGroup
from parallel.linear_method import LinearInput, LinearMethod, QuantConfig, choose_method, require_tensor
from parallel.parameter import PER_CHANNEL, ParallelModule, ParameterLoader, Partition, WeightShard
from parallel.shard import HeadShard, Shard, ShardError, heads_in, split, split_heads


class LinearBase(ParallelModule):
    """Base class of the linear layers: group, shard, method and bias.

    Args:
        layer_kind: the kind that the quantization config sees.
        shard: this rank's part of the weight.
        group: the ranks.
        bias: whether there is one. It is sharded like the output dimension.
        quant_config: chooses the method; None: unquantized.
        prefix: the layer's full name in the model.
        disable_tp: hold the full weight on every rank and run no collective.
        dtype: of activations and plain weights; default: torch's default dtype.
        zero_bias: keep a bias of zeros, because another rank adds it.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        layer_kind: str,
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
        self.tp_rank, self.tp_size = _rank_and_size(group, disable_tp)
        self.weight_shard = shard
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.method: LinearMethod = choose_method(quant_config, layer_kind, prefix)
        self.method.create_parameters(self, shard, self.dtype)
        if bias:
            self.add_parameter("bias", ParameterLoader(self, "bias", shard, PER_CHANNEL, zero=zero_bias), self.dtype)
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
    """A linear layer whose output dimension is sharded: every rank computes its part of the output.

    Args:
        input_size: of the whole layer, present on every rank.
        output_size: of the whole layer.
        gather_output: return the whole output on every rank instead of the local part.
        multiple: output elements that are never divided, e.g. a quantization group.

    The others: see :class:`LinearBase`.

    Raises:
        ShardError: the output cannot be divided over that many ranks.
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
        multiple: int = 1,
    ) -> None:
        tp_rank, tp_size = _rank_and_size(group, disable_tp)
        self._shards = split(output_size, tp_size, multiple=multiple)
        partitions = (Partition(None, output_size, self._shards[tp_rank]),)
        super().__init__(
            "column", WeightShard(partitions, Shard(0, input_size), input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
        )  # fmt: skip
        self.gather_output = gather_output

    def forward(self, x: LinearInput) -> tuple[LinearInput, torch.Tensor | None]:
        """x ``[T, input_size]`` to ``[T, local_output_size]``, or ``[T, output_size]`` with ``gather_output``."""
        y = self.method.apply(self, x, self.bias)
        if self.gather_output and self.tp_size > 1:
            y = gather_columns(self.group, require_tensor(y, self), self._shards)
        return y, None


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers of the same input in one product, e.g. gate and up.

    A rank holds its slice of the first matrix, then its slice of the second, and so on: its output is the local part
    of each, in order. Checkpoint tensors hold one matrix (``shard_id`` 0, 1, ...) or all of them, fused (None).

    Args:
        input_size: of the whole layers, present on every rank.
        output_sizes: of each whole matrix.
        multiple: output elements that are never divided, e.g. a quantization group.
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
        multiple: int = 1,
    ) -> None:
        tp_rank, tp_size = _rank_and_size(group, disable_tp)
        partitions = tuple(
            Partition(i, size, split(size, tp_size, multiple=multiple)[tp_rank]) for i, size in enumerate(output_sizes)
        )
        super().__init__(
            "merged", WeightShard(partitions, Shard(0, input_size), input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
        )  # fmt: skip
        self.local_output_sizes = tuple(partition.shard.size for partition in partitions)

    def forward(self, x: LinearInput) -> tuple[LinearInput, torch.Tensor | None]:
        """x ``[T, input_size]`` to ``[T, sum(local_output_sizes)]``."""
        return self.method.apply(self, x, self.bias), None


class QKVParallelLinear(LinearBase):
    """The query, key and value projections in one product, sharded by KV group.

    The output is this rank's query heads, then its key heads, then its value heads. With more ranks than KV heads,
    several ranks hold the same KV head. Checkpoint tensors hold "q", "k" or "v", or all of them, fused (None).

    Args:
        hidden_size: the input, present on every rank.
        head_dim: elements of one head.
        num_heads: query heads of the whole layer.
        num_kv_heads: KV heads of the whole layer.
        multiple: output elements that are never divided, e.g. a quantization group.
        q_multiple: the same for the queries only, where the output projection takes them in groups.

    Attributes:
        head_shards: the heads of every rank.
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
        multiple: int = 1,
        q_multiple: int = 1,
    ) -> None:
        tp_rank, tp_size = _rank_and_size(group, disable_tp)
        self.head_shards = split_heads(
            num_heads,
            num_kv_heads,
            tp_size,
            q_multiple=heads_in(math.lcm(multiple, q_multiple), head_dim),
            kv_multiple=heads_in(multiple, head_dim),
        )
        self.head_shard: HeadShard = self.head_shards[tp_rank]
        q, kv = self.head_shard.q.scaled(head_dim), self.head_shard.kv.scaled(head_dim)
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

    def forward(self, x: LinearInput) -> tuple[LinearInput, torch.Tensor | None]:
        """x ``[T, hidden_size]`` to ``[T, q_size + 2 * kv_size]``."""
        return self.method.apply(self, x, self.bias), None


class RowParallelLinear(LinearBase):
    """A linear layer whose input dimension is sharded: every rank has a part of the input and a partial sum.

    Partial sums are fp32, and only their sum over the ranks is rounded. Rounding each to bf16 breaks models whose
    residual stream has a few huge entries: two partials of thousands whose sum is near zero lose all precision, and
    TP 2 then gives other tokens than TP 1.

    The bias is added once: after the all-reduce or, where the partial sums are returned, to that of rank 0. In the
    latter case the other ranks hold a bias of zeros, so that every rank traces the same graph.

    Args:
        input_size: of the whole layer; a rank's input is its shard.
        output_size: of the whole layer.
        reduce_results: all-reduce the output; else return the partial sum.
        shards: of the input in elements, one per rank, where they are not the default (attention heads).
        multiple: input elements that are never divided, e.g. a quantization group; unused with ``shards``.

    Raises:
        ShardError: the input cannot be divided over that many ranks, or ``shards`` do not cover it.
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
        multiple: int = 1,
    ) -> None:
        tp_rank, tp_size = _rank_and_size(group, disable_tp)
        if disable_tp or shards is None:
            shards = split(input_size, tp_size, multiple=multiple)
        _check_shards(shards, input_size, tp_size, prefix)
        partitions = (Partition(None, output_size, Shard(0, output_size)),)
        super().__init__(
            "row", WeightShard(partitions, shards[tp_rank], input_size), group=group, bias=bias,
            quant_config=quant_config, prefix=prefix, disable_tp=disable_tp, dtype=dtype,
            zero_bias=not reduce_results and tp_rank > 0,
        )  # fmt: skip
        self.reduce_results = reduce_results

    def forward(self, x: LinearInput) -> tuple[LinearInput, torch.Tensor | None]:
        """x ``[T, input_shard.size]`` to ``[T, output_size]``: the sum over ranks, or this rank's partial sum."""
        if self.tp_size == 1 or not self.reduce_results:
            return self.method.apply(self, x, self.bias), None
        partial = require_tensor(self.method.apply(self, x, None, out_dtype=torch.float32), self)
        y = self.group.all_reduce(partial)
        dtype = x.dtype if isinstance(x, torch.Tensor) else self.dtype
        return (y if self.bias is None else y + self.bias).to(dtype), None


def gather_columns(group: TensorParallelGroup, y: torch.Tensor, shards: tuple[Shard, ...]) -> torch.Tensor:
    """All-gather of uneven shards: ``[T, shards[rank].size]`` of every rank to ``[T, total]`` on every rank."""
    longest = max(shard.size for shard in shards)
    parts = group.all_gather(F.pad(y, (0, longest - y.shape[-1])))
    return torch.cat([parts[rank, ..., : shard.size] for rank, shard in enumerate(shards)], dim=-1)


def _rank_and_size(group: TensorParallelGroup, disable_tp: bool) -> tuple[int, int]:
    """The rank and size for which a layer is sharded."""
    return (0, 1) if disable_tp else (group.rank, group.size)


def _check_shards(shards: tuple[Shard, ...], total: int, parts: int, prefix: str) -> None:
    """Refuse shards that are not one contiguous range per rank, together all of the dimension."""
    starts = [0, *(shard.stop for shard in shards)]
    if len(shards) != parts or [*(shard.start for shard in shards), total] != starts:
        name = prefix or "a row-parallel layer"
        raise ShardError(f"{name}: {shards} do not divide {total} elements over {parts} ranks")
