"""What a full KV block holds, as a hash: its own tokens, all tokens before them, and the salt of who may share it.

Equal hashes mean equal keys and values, since those depend on nothing but the tokens up to their position. Which block
holds what is ``block_pool.py``'s; when it is looked up and offered is ``scheduler.py``'s.
"""

from __future__ import annotations

import hashlib
from array import array

from runtime.engine.request import Request

HASH_BYTES = 16


def extend_hashes(request: Request, count: int, block_size: int) -> None:
    """Make ``request.block_hashes`` cover its first ``count`` blocks, all of known tokens. Tokens never change, so a
    hash once made stays right.

    Each hash is BLAKE2b over the one before it, the salt's for the first, and the block's token ids as 8 bytes each.
    The salt is hashed under another name than blocks are, so that no salt can be chosen to look like a prefix.
    """
    hashes, prompt, output = request.block_hashes, request.prompt_token_ids, request.output_token_ids
    for index in range(len(hashes), count):
        start, end = index * block_size, (index + 1) * block_size
        tokens = array("q", prompt[start:end])
        if end > len(prompt):
            tokens.extend(output[max(start - len(prompt), 0) : end - len(prompt)])
        previous = hashes[-1] if hashes else _digest(b"salt", request.cache_salt or b"")
        hashes.append(_digest(b"block", previous + tokens.tobytes()))


def _digest(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=kind).digest()
