"""A small byte-level tokenizer in a folder, for tests that need one but no model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

UNK, BOS, EOS = 0, 1, 2

TEXT = '{"name": "the quick brown fox", "age": 12.5, "tags": [true, false, null]} and so on, over and over again\n'


def write_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """Write ``tokenizer.json``: three special tokens, the 256 bytes, and at most so many tokens in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
