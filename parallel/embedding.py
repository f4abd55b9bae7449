"""Token embedding and LM head over tensor-parallel ranks, both sharded by vocabulary.

Both have the same shards, so that a head can share the embedding's weight. The head returns local logits only; the
sampler runs the collectives on them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from typing_extensions import override

from parallel.group import TensorParallelGroup, get_group
from parallel.library import dispatch_keys, register_op
from parallel.linear_method import LinearMethod, QuantConfig, UnquantizedLinearMethod, choose_method, require_tensor
from parallel.parameter import PER_CHANNEL, ParallelModule, ParameterLoader, Partition, WeightShard
from parallel.shard import Shard, split


@functools.cache
def split_vocab(vocab_size: int, parts: int, multiple: int = 1) -> tuple[Shard, ...]:
    """The rows of the embedding and of the LM head that each rank holds; see :func:`parallel.shard.split`."""
    return split(vocab_size, parts, multiple=multiple)


class _VocabParallel(ParallelModule):
    """Base class of the layers with a weight ``[vocabulary, hidden]`` that is sharded by vocabulary.

    Args:
        num_embeddings: the whole vocabulary.
        embedding_dim: the hidden size.
        group: the ranks.
        prefix: the layer's full name in the model.
        dtype: of the weight; default: torch's default dtype.
        multiple: vocabulary entries that are never divided, e.g. a quantization group.

    Attributes:
        vocab_shard: the token ids of this rank.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: TensorParallelGroup,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
    ) -> None:
        super().__init__(prefix)
        self.group = group
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.multiple = multiple
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.vocab_shard = split_vocab(num_embeddings, group.size, multiple)[group.rank]
        partitions = (Partition(None, num_embeddings, self.vocab_shard),)
        self.weight_shard = WeightShard(partitions, Shard(0, embedding_dim), embedding_dim)


class VocabParallelEmbedding(_VocabParallel):
    """Token embedding. Every rank looks up the ids it holds, with zeros for the others; an all-reduce adds them up."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: TensorParallelGroup,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, group=group, prefix=prefix, dtype=dtype, multiple=multiple)
        UnquantizedLinearMethod().create_parameters(self, self.weight_shard, self.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids ``[T]`` (int32 or int64) to ``[T, embedding_dim]``, on every rank."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = torch.ops.lockstep.vocab_embedding(
            input_ids, self.weight, self.num_embeddings, self.multiple, self.group.name
        )
        return self.group.all_reduce(local)


class ParallelLMHead(_VocabParallel):
    """The projection to logits. Each rank computes those of ``vocab_shard``.

    Args:
        bias: whether there is one, sharded like the vocabulary.
        quant_config: chooses the method, as for layer kind "lm_head"; None: unquantized.

    The others: see the embedding's.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: TensorParallelGroup,
        bias: bool = False,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        multiple: int = 1,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, group=group, prefix=prefix, dtype=dtype, multiple=multiple)
        self._embedding: tuple[VocabParallelEmbedding, ...] = ()
        self.method: LinearMethod = choose_method(quant_config, "lm_head", prefix)
        self.method.create_parameters(self, self.weight_shard, self.dtype)
        if bias:
            self.add_parameter("bias", ParameterLoader(self, "bias", self.weight_shard, PER_CHANNEL), self.dtype)
        else:
            self.register_parameter("bias", None)

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight from now on; the head's own weight parameter is removed.

        The weight is looked up at every use, because materializing the model replaces it.

        Raises:
            ValueError: the embedding has another shape or other shards, or the head's method stores no plain weight.
        """
        own, other = (self.num_embeddings, self.embedding_dim), (embedding.num_embeddings, embedding.embedding_dim)
        name = self.prefix or "the LM head"
        if own != other or self.vocab_shard != embedding.vocab_shard:
            raise ValueError(
                f"{name} {own} with {self.vocab_shard} cannot share the weight of an embedding {other} with "
                f"{embedding.vocab_shard}"
            )
        if "weight" not in self._parameters:
            raise ValueError(f"{name} stores no plain weight that it could share with the embedding")
        del self.weight
        # In a tuple, so that the embedding does not become a submodule here and its weight a parameter with two names.
        self._embedding = (embedding,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden ``[n, embedding_dim]`` to the local logits ``[n, vocab_shard.size]``, in fp32.

        Logits are not rounded to a narrower dtype, in which the best tokens often tie.
        """
        return require_tensor(self.method.apply(self, hidden, self.bias, out_dtype=torch.float32), self)

    @override
    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)

    @override
    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not found otherwise: the weight, once it is tied.
        if name == "weight" and (tied := self.__dict__.get("_embedding")):
            return tied[0].weight
        return super().__getattr__(name)


def _vocab_embedding(
    input_ids: torch.Tensor, weight: torch.Tensor, vocab_size: int, multiple: int, group_name: str
) -> torch.Tensor:
    """The rows of the ids that this rank holds, zeros for the others.

    An opaque op, because tensor operations would put the rank's first id into the traced graph, which all ranks share.
    """
    group = get_group(group_name)
    shard = split_vocab(vocab_size, group.size, multiple)[group.rank]
    local = input_ids - shard.start
    held = (local >= 0) & (local < shard.size)
    rows = F.embedding(torch.where(held, local, 0), weight)
    return rows.masked_fill_(~held.unsqueeze(-1), 0)


def _vocab_embedding_fake(
    input_ids: torch.Tensor, weight: torch.Tensor, vocab_size: int, multiple: int, group_name: str
) -> torch.Tensor:
    return weight.new_empty((*input_ids.shape, weight.shape[1]))


register_op("vocab_embedding", _vocab_embedding, fake=_vocab_embedding_fake, dispatch_key=dispatch_keys())
