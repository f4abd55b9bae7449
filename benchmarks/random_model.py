"""Random models that need no checkpoint: a small one as a folder, a large one directly on the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from typing_extensions import override

from parallel.parameter import ParallelModule
from workers.kv_cache import KVCacheSpec
from workers.models.registry import build_model
from workers.quantization.registry import get_quant_config
from workers.runner import ModelRunner
from workers.weights import HasBuffers, LoadReport


def write_checkpoint(folder: Path, sizes: dict[str, Any]) -> Path:
    """A Llama checkpoint in float32 whose logits are far enough apart that rounding changes no greedy token.

    Args:
        folder: made here.
        sizes: keys of config.json, at least those of :func:`llama_config`.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_config(sizes) | {"torch_dtype": "float32"}))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in _tensors(sizes).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise if "embed" in name else noise * shape[1] ** -0.5
    save_file(tensors, folder / "model.safetensors")
    words = {f"t{number}": number for number in range(sizes["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def llama_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama with these sizes."""
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    return fixed | {"rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2} | sizes


def _tensors(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's weights, as checkpoints have them."""
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    heads, kv_heads = (sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for number in range(sizes["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


class RandomRunner(ModelRunner):
    """A rank whose weights are made on the device, with no checkpoint to read."""

    @override
    def load_model(self, progress: Callable[[int, int], None] | None = None) -> LoadReport:
        """Build the model and fill it with noise that keeps activations near one."""
        quant_config = get_quant_config(None, self.device)
        self.model = build_model(self.model_config, group=self.group, dtype=self.dtype, quant_config=quant_config)
        self.model.to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, scale, generator=generator)
        for module in self.model.modules():
            if isinstance(module, HasBuffers):
                module.fill_buffers(self.device)
            if isinstance(module, ParallelModule):
                module.process_after_loading()
        self.kv_spec = KVCacheSpec.from_model(self.model, self.config.block_size)
        return LoadReport(0, 0, 0.0)
