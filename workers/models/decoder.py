"""The decoder that all model families share; a family overrides the factory methods of :class:`DecoderForCausalLM`.

The modules follow the computation: embedding; then per layer norm, attention, norm, MLP; then a norm and the logits.
Each norm takes the preceding residual addition along (``norm(x, residual)``), so that the all-reduce at the end of a
row-parallel layer, the addition and the norm are adjacent and can be fused into one op.

No rank, device or collective appears here: the layers hold their shards. ``forward`` never branches on a tensor's
value, so the whole model can be traced as one graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup
from parallel.linear import QKVParallelLinear, RowParallelLinear
from parallel.linear_method import QuantConfig, joint_multiple, output_multiple
from parallel.shard import Shard
from runtime.common.model_config import ModelConfig, RopeConfig
from workers.attention.base import AttentionBackend
from workers.attention.registry import create_backend
from workers.layers.attention import Attention
from workers.layers.mlp import MLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, rotary_embedding

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the tokens' positions, from :class:`~workers.layers.rotary.RotaryEmbedding`."""


@dataclass(frozen=True)
class BuildContext:
    """What every layer of a model is built with.

    Attributes:
        config: the whole model's sizes.
        group: the ranks.
        dtype: of activations and plain weights.
        quant_config: chooses the linear methods; None: plain weights.
        attention_backend: of all attention layers.
    """

    config: ModelConfig
    group: TensorParallelGroup
    dtype: torch.dtype
    quant_config: QuantConfig | None
    attention_backend: AttentionBackend[Any]


class SelfAttention(nn.Module):
    """Query, key and value projections, rotation, attention, and the output projection.

    Args:
        context: sizes, biases, ranks and dtype.
        prefix: the layer's full name.
        sliding_window: tokens a token attends to, including itself; None: all before it.
        q_norm, k_norm: applied to every query and key head before rotation; None: no norm.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        *,
        sliding_window: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        config, group, dtype, quant_config = context.config, context.group, context.dtype, context.quant_config
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            group=group,
            bias=config.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            dtype=dtype,
            multiple=output_multiple(quant_config),
            q_multiple=joint_multiple(quant_config),
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            group=group,
            bias=config.o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            dtype=dtype,
            shards=tuple(shard.q.scaled(config.head_dim) for shard in self.qkv_proj.head_shards),
        )
        self.q_norm, self.k_norm = q_norm, k_norm
        local = self.qkv_proj.head_shard
        self.attn = Attention(
            local.q.size,
            local.kv.size,
            config.head_dim,
            dtype=dtype,
            backend=context.attention_backend,
            prefix=f"{prefix}.attn",
            sliding_window=sliding_window,
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; ``rotation`` is that of the tokens' positions."""
        qkv, _ = self.qkv_proj(hidden)
        sizes = [self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size]
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary_embedding(query, key, *rotation)
        attended = self.attn(query, key, value)
        output, _ = self.o_proj(attended)
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [T, hidden_size] whose sum is the residual stream; the first layer gets one."""
        if residual is None:
            normed, stream = self.input_layernorm(hidden), hidden
        else:
            normed, stream = self.input_layernorm(hidden, residual)
        attended = self.self_attn(normed, rotation)
        normed, stream = self.post_attention_layernorm(attended, stream)
        return self.mlp(normed), stream


class DecoderModel(nn.Module):
    """Embedding, layers and final norm, made by the factory methods of the model class.

    Args:
        owner: the model; not stored, because it contains this module.
        context: what every layer is built with.
        prefix: the module's full name.
    """

    def __init__(self, owner: DecoderForCausalLM, context: BuildContext, prefix: str) -> None:
        super().__init__()
        config = context.config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            group=context.group,
            prefix=f"{prefix}.embed_tokens",
            dtype=context.dtype,
            multiple=output_multiple(context.quant_config),
        )
        ropes = [owner.rope_config(layer) for layer in range(config.num_layers)]
        distinct = tuple(dict.fromkeys(ropes))
        self.rotary_embs = nn.ModuleList(owner.make_rotary(rope) for rope in distinct)
        self._rotary_index = tuple(distinct.index(rope) for rope in ropes)
        self.layers = nn.ModuleList(
            owner.make_layer(layer, f"{prefix}.layers.{layer}") for layer in range(config.num_layers)
        )
        self.norm = owner.make_norm(config.hidden_size, f"{prefix}.norm")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions, int64 [T] each, -> [T, hidden_size]."""
        rotations = [rotary_emb(positions) for rotary_emb in self.rotary_embs]
        hidden, residual = self.embed_tokens(input_ids), None
        for layer, rotary in zip(self.layers, self._rotary_index, strict=True):
            hidden, residual = layer(hidden, residual, rotations[rotary])
        hidden, _ = self.norm(hidden, residual)
        return hidden


class DecoderForCausalLM(nn.Module):
    """One rank's part of a decoder-only language model.

    A family is a subclass. What its layers are made of, and how layers differ from each other, is decided by the
    factory methods :meth:`make_layer`, :meth:`make_attention`, :meth:`make_mlp`, :meth:`make_norm`,
    :meth:`make_rotary`, :meth:`rope_config` and :meth:`sliding_window`; the defaults follow the config::

        class GemmaForCausalLM(DecoderForCausalLM):
            def make_norm(self, size, prefix):
                return GemmaRMSNorm(size, self.config.rms_norm_eps, dtype=self.context.dtype, prefix=prefix)

    Build a model under ``torch.device("meta")``; ``workers/weights.py`` fills it.

    Args:
        config: the whole model's sizes.
        group: the ranks.
        dtype: of parameters and activations.
        quant_config: of the linear layers; None: plain weights.
        attention_backend: a name of ``workers/attention/registry.py``, or "auto".

    Attributes:
        attention_backend: of all attention layers.
        context: what every layer is built with.
        attention_layers: every attention layer by its name, as the forward context takes them.
        ignored_weights: suffixes of the names of checkpoint tensors that are not loaded.
    """

    dynamic_arg_dims: ClassVar[Mapping[str, int]] = {"input_ids": 0, "positions": 0}
    """The token dimension of each argument of :meth:`forward`: one graph serves every number of tokens."""

    fused_weights: ClassVar[Mapping[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    """Checkpoint layers that are one partition of a fused layer: the fused layer's name and the shard id."""

    computed_weights: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
    )
    """Suffixes of the names of checkpoint tensors that are computed and not loaded."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        quant_config: QuantConfig | None = None,
        attention_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.attention_backend = create_backend(attention_backend, group.device, dtype=dtype, head_dim=config.head_dim)
        self.context = BuildContext(config, group, dtype, quant_config, self.attention_backend)
        self.model = DecoderModel(self, self.context, "model")
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            group=group,
            quant_config=quant_config,
            prefix="lm_head",
            dtype=dtype,
            multiple=output_multiple(quant_config),
        )
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.ignored_weights = self.computed_weights + (("lm_head.weight",) if config.tie_word_embeddings else ())
        self.attention_layers = {m.prefix: m for m in self.modules() if isinstance(m, Attention)}

    # ---- factory methods, called while the model is built

    def make_layer(self, layer: int, prefix: str) -> nn.Module:
        """Decoder layer number ``layer``: called with (hidden, residual or None, rotation)."""
        size = self.config.hidden_size
        return DecoderLayer(
            input_layernorm=self.make_norm(size, f"{prefix}.input_layernorm"),
            self_attn=self.make_attention(layer, f"{prefix}.self_attn"),
            post_attention_layernorm=self.make_norm(size, f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(layer, f"{prefix}.mlp"),
        )

    def make_attention(self, layer: int, prefix: str) -> nn.Module:
        """Self-attention of layer number ``layer``: called with (hidden, rotation)."""
        q_norm = k_norm = None
        if self.config.qk_norm:
            q_norm, k_norm = (self.make_norm(self.config.head_dim, f"{prefix}.{name}") for name in ("q_norm", "k_norm"))
        return SelfAttention(
            self.context, prefix, sliding_window=self.sliding_window(layer), q_norm=q_norm, k_norm=k_norm
        )

    def make_mlp(self, layer: int, prefix: str) -> nn.Module:
        """Feed-forward network of layer number ``layer``: [T, hidden_size] -> [T, hidden_size]."""
        config, context = self.config, self.context
        return MLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            context.quant_config,
            config.mlp_bias,
            prefix,
            group=context.group,
            dtype=context.dtype,
        )

    def make_norm(self, size: int, prefix: str) -> nn.Module:
        """Norm over ``size`` elements: called with x, or with (x, residual) for (norm(x + residual), x + residual)."""
        return RMSNorm(size, self.config.rms_norm_eps, dtype=self.context.dtype, prefix=prefix)

    def make_rotary(self, rope: RopeConfig) -> RotaryEmbedding:
        """Rotary embedding of the layers with this configuration."""
        config = self.config
        return RotaryEmbedding(rope, config.head_dim, config.max_position_embeddings, dtype=self.context.dtype)

    def rope_config(self, layer: int) -> RopeConfig:
        """Rotary configuration of layer number ``layer``; layers with equal ones share a table."""
        return self.config.rope

    def sliding_window(self, layer: int) -> int | None:
        """Tokens that layer number ``layer`` attends to, including the token itself; None: all before it."""
        return self.config.layer_window(layer)

    # ---- computation

    @property
    def vocab_shard(self) -> Shard:
        """The token ids whose logits this rank computes."""
        return self.lm_head.vocab_shard

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One step over the flattened batch, inside a forward context.

        Args:
            input_ids: int64 [T], the tokens of all requests one after another, padding at the end.
            positions: int64 [T], each token's position in its request.

        Returns:
            hidden states after the last norm, [T, hidden_size], the same on every rank.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> this rank's logits [n, vocab_shard.size], fp32."""
        return self.lm_head(hidden)
