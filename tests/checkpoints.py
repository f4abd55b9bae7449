"""Tiny random checkpoints of every architecture, made by transformers' own classes and kept until the tests end.

``tiny_checkpoint("qwen2")`` gives a folder as ``save_pretrained`` writes it; asked again, the same one, so copy it to
change it. Sizes are awkward on purpose: 6 query heads over 2 KV heads, 1003 tokens of vocabulary, and an intermediate
size that no TP size divides in equal blocks. Every parameter is random, norms and biases too, so that none can be
forgotten unnoticed.
"""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZES: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 250,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}
"""Family and settings of each kind of checkpoint."""


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")


@functools.cache
def tiny_checkpoint(
    kind: str = "llama", *, dtype: str = "float32", max_shard_size: str = "1GB", **settings: Any
) -> Path:
    """The folder of a checkpoint: config.json, safetensors, and a byte-level tokenizer with a chat template.

    Args:
        kind: a key of :data:`KINDS`.
        dtype: in which it is stored.
        max_shard_size: as ``save_pretrained`` takes it; "100KB" gives several shards and an index.
        **settings: more keys of the config, hashable.
    """
    family, own = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomize(model)
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_root().name))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    _write_tokenizer(folder, config.vocab_size)
    return folder


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter values that keep activations near one, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise if "embed_tokens" in name else noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(noise * 0.2 + ("norm" in name))


@functools.cache
def reference_model(folder: Path) -> Any:
    """transformers' model of a checkpoint, on the CPU, in the stored dtype."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@torch.no_grad()
def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits for one sequence: [len(token_ids), vocab_size]."""
    return reference_model(folder)(torch.tensor([token_ids])).logits[0]


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, one list per length; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer trained on some English of the standard library."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([inspect.getsource(inspect)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
        "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
