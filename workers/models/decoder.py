"""The decoder that all our models share; what they differ in comes with the config.

The text follows the computation: embed, then per layer norm, attention, norm, MLP, at the end a norm and the logits.
Each normalisation takes the sum that precedes it along (``norm(x, residual)``), so that the all-reduce which ends a
row-parallel layer, the addition and the norm stand side by side and can become one op.

No rank, device or collective appears here: layers know their cut. ``forward`` never branches on a tensor's value, so
the whole model can be traced as one graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from parallel.group import TensorParallelGroup
from parallel.linear import QKVParallelLinear, QuantConfig, RowParallelLinear
from parallel.shard import Shard, split_heads
from runtime.common.model_config import ModelConfig
from workers.attention.base import AttentionBackend
from workers.attention.registry import create_backend
from workers.layers.attention import Attention
from workers.layers.mlp import MLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, rotary_embedding


class SelfAttention(nn.Module):
    """Projections, optional per-head norms, rotation, attention, and the projection back.

    Args:
        config: sizes, biases, and whether each query and key head is normalised before it is rotated.
        group, dtype, quant_config: for the parallel layers.
        attention_backend: of the model.
        prefix: the layer's full name.
        sliding_window: tokens a token sees, itself included; None: all before it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        quant_config: QuantConfig | None,
        attention_backend: AttentionBackend[Any],
        prefix: str,
        sliding_window: int | None,
    ) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            heads,
            kv_heads,
            group=group,
            bias=config.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            dtype=dtype,
        )
        cut = split_heads(heads, kv_heads, group.size)
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            group=group,
            bias=config.o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            dtype=dtype,
            shards=tuple(Shard(s.q.start * self.head_dim, s.q.size * self.head_dim) for s in cut),
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, prefix=f"{prefix}.q_norm")
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, prefix=f"{prefix}.k_norm")
        local = self.qkv_proj.head_shard
        self.attn = Attention(
            local.q.size,
            local.kv.size,
            self.head_dim,
            dtype=dtype,
            backend=attention_backend,
            prefix=f"{prefix}.attn",
            sliding_window=sliding_window,
        )

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]; ``rotation`` is the rotary embedding of the tokens' positions."""
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
    """Attention and MLP, each behind a norm and beside a residual. Arguments as for :class:`SelfAttention`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        quant_config: QuantConfig | None,
        attention_backend: AttentionBackend[Any],
        prefix: str,
        sliding_window: int | None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, prefix=f"{prefix}.input_layernorm")
        self.self_attn = SelfAttention(
            config,
            group=group,
            dtype=dtype,
            quant_config=quant_config,
            attention_backend=attention_backend,
            prefix=f"{prefix}.self_attn",
            sliding_window=sliding_window,
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, prefix=f"{prefix}.post_attention_layernorm")
        self.mlp = MLP(
            size,
            config.intermediate_size,
            config.hidden_act,
            quant_config,
            config.mlp_bias,
            f"{prefix}.mlp",
            group=group,
            dtype=dtype,
        )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of [T, hidden_size] whose sum is the residual stream; before the first layer there is one."""
        if residual is None:
            normed, stream = self.input_layernorm(hidden), hidden
        else:
            normed, stream = self.input_layernorm(hidden, residual)
        attended = self.self_attn(normed, rotation)
        normed, stream = self.post_attention_layernorm(attended, stream)
        return self.mlp(normed), stream


class DecoderModel(nn.Module):
    """Embedding, layers, final norm. Arguments as for :class:`DecoderForCausalLM`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        quant_config: QuantConfig | None,
        attention_backend: AttentionBackend[Any],
        prefix: str,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=group, prefix=f"{prefix}.embed_tokens", dtype=dtype
        )
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                group=group,
                dtype=dtype,
                quant_config=quant_config,
                attention_backend=attention_backend,
                prefix=f"{prefix}.layers.{layer}",
                sliding_window=config.layer_window(layer),
            )
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, prefix=f"{prefix}.norm")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions, int64 [T] each, -> [T, hidden_size]."""
        rotation = self.rotary_emb(positions)
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class DecoderForCausalLM(nn.Module):
    """One rank's shard of a decoder-only language model. A family subclasses it and adds what no config says.

    Build it under ``torch.device("meta")``; ``workers/weights.py`` fills it.

    Args:
        config: the whole model's sizes.
        group: the ranks.
        dtype: of parameters and activations.
        quant_config: of the linear layers; None: plain weights.
        attention_backend: a name of ``workers/attention/registry.py``, or "auto".

    Attributes:
        attention_backend: of all attention layers.
        attention_layers: every attention layer by its name, as the forward context wants them.
        ignored_weights: ends of the names of checkpoint tensors that are not loaded.
    """

    dynamic_arg_dims: ClassVar[Mapping[str, int]] = {"input_ids": 0, "positions": 0}
    """Which dimension of each argument of :meth:`forward` counts tokens: one graph serves every number of them."""

    fused_weights: ClassVar[Mapping[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    """Layers of a checkpoint that are part of one layer here: its name, and which part."""

    computed_weights: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
    )
    """Ends of the names of checkpoint tensors that are computed here."""

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
        self.model = DecoderModel(
            config,
            group=group,
            dtype=dtype,
            quant_config=quant_config,
            attention_backend=self.attention_backend,
            prefix="model",
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            group=group,
            quant_config=quant_config,
            prefix="lm_head",
            dtype=dtype,
        )
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.ignored_weights = self.computed_weights + (("lm_head.weight",) if config.tie_word_embeddings else ())
        self.attention_layers = {m.prefix: m for m in self.modules() if isinstance(m, Attention)}

    @property
    def vocab_shard(self) -> Shard:
        """The token ids whose logits this rank computes."""
        return self.lm_head.vocab_shard

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One step over the flattened batch, inside a forward context.

        Args:
            input_ids: int64 [T], tokens of all requests one after another, padding at the end.
            positions: int64 [T], each token's place in its request.

        Returns:
            hidden states after the last norm, [T, hidden_size], the same on every rank.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> this rank's logits [n, vocab_shard.size]."""
        return self.lm_head(hidden)
