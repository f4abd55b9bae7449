"""The interface between a parallel layer and the way its weight is stored and multiplied by, with the torch default.

A layer makes the *shard* of its weight and calls the *collective*; a :class:`LinearMethod` makes the parameters and the
*local product*. Methods for quantized weights and for CPUs are in ``workers/quantization/``; a :class:`QuantConfig`
chooses one for each layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from typing_extensions import override

from parallel.parameter import ParallelModule, ParameterLoader, WeightShard


class QuantizedTensor(NamedTuple):
    """An activation that was quantized before the layer.

    Attributes:
        values: ``[T, K]`` in the quantized dtype.
        scale: what ``values`` are multiplied by; its shape and dtype are those of the scheme.
    """

    values: torch.Tensor
    scale: torch.Tensor


LinearInput = torch.Tensor | QuantizedTensor
"""What a linear layer takes: an activation, or a quantized one where its method supports that."""


class LinearMethod(ABC):
    """How a layer stores its weight and multiplies by it. One object serves one layer or several."""

    @abstractmethod
    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        """Add the layer's parameters (all but the bias), each with its loader, on the ambient device.

        Args:
            layer: receives the parameters.
            shard: the rank's part of the weight.
            dtype: of the model's activations, and of weights that are not quantized.
        """

    @abstractmethod
    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> LinearInput:
        """This rank's product: x ``[T, input_shard.size]`` to ``[T, local_output_size]``, plus the bias if given.

        Args:
            layer: holds the parameters.
            x: the input; methods that quantize activations may also take a :class:`QuantizedTensor`.
            bias: added if given.
            out_dtype: None for the model's dtype, or ``torch.float32`` for the fp32 sums without a final rounding,
                which partial sums and logits need.

        Returns:
            a tensor. Where the layer runs no collective on the output, a method may return a
            :class:`QuantizedTensor` for the next layer.
        """

    @abstractmethod
    def process_after_loading(self, layer: ParallelModule) -> None:
        """Called once when every parameter is filled: the place to rearrange them."""


class QuantConfig(Protocol):
    """Chooses the linear method of each layer of a model and states how its weights may be sharded."""

    @property
    def input_multiple(self) -> int:
        """Input elements of a weight that share quantization parameters and are not divided over ranks."""
        ...

    @property
    def output_multiple(self) -> int:
        """Output elements of a weight that share quantization parameters and are not divided over ranks."""
        ...

    def get_linear_method(self, layer_kind: str, prefix: str) -> LinearMethod | None:
        """The method of the layer named ``prefix``; None for :class:`UnquantizedLinearMethod`.

        ``layer_kind`` is "column", "merged", "qkv", "row" or "lm_head".
        """
        ...


class UnquantizedLinearMethod(LinearMethod):
    """A plain weight ``[local_output_size, input_shard.size]`` in the layer's dtype, multiplied by torch."""

    @override
    def create_parameters(self, layer: ParallelModule, shard: WeightShard, dtype: torch.dtype) -> None:
        layer.add_parameter("weight", ParameterLoader(layer, "weight", shard), dtype)

    @override
    def apply(
        self,
        layer: ParallelModule,
        x: LinearInput,
        bias: torch.Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        x = require_tensor(x, layer)
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


def output_multiple(quant_config: QuantConfig | None) -> int:
    """Elements that stay together in an output dimension that no other layer takes as its input."""
    return 1 if quant_config is None else quant_config.output_multiple


def joint_multiple(quant_config: QuantConfig | None) -> int:
    """Elements that stay together in a dimension that is one layer's output and the next layer's input."""
    return 1 if quant_config is None else math.lcm(quant_config.input_multiple, quant_config.output_multiple)


def require_tensor(x: LinearInput, layer: ParallelModule) -> torch.Tensor:
    """``x`` itself.

    Raises:
        TypeError: it is a :class:`QuantizedTensor`, which the layer cannot use here.
    """
    if isinstance(x, torch.Tensor):
        return x
    raise TypeError(f"{layer.prefix or type(layer).__name__} needs a plain tensor here, got a QuantizedTensor")
