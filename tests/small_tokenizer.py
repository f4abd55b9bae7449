"""Small byte-level tokenizers, for tests that need one but no model."""

from __future__ import annotations

import functools
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


@functools.cache
def byte_backend() -> Tokenizer:
    """One token for each byte, in the order of the bytes."""
    # The byte-level alphabet writes printable bytes as they are, and the others as letters from 256 on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
