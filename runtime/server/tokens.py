"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from runtime.server.chat import render_prompt
from runtime.server.errors import BodyError
from runtime.server.schemas import DETOKENIZE, TOKENIZE
from runtime.server.serving import Serving
from runtime.server.validate import check_body


async def tokenize(serving: Serving, body: Any, *, request_id: str) -> dict[str, Any]:
    """The token ids of a prompt or of messages."""
    body = check_body(body, TOKENIZE)
    serving.model_name(body.get("model"))
    if "messages" in body:
        token_ids = (await serving.in_thread(render_prompt, serving, body)).token_ids
    else:
        special = body.get("add_special_tokens", True)
        # In full, however long: whoever asks may want to know by how much a text is too long.
        token_ids = await serving.in_thread(serving.tokenizer.encode, body["prompt"], special)
    texts = None
    if body.get("return_token_strs"):
        texts = await serving.in_thread(lambda: [serving.texts[token_id] for token_id in token_ids])
    return {
        "count": len(token_ids),
        "max_model_len": serving.max_model_len,
        "tokens": list(token_ids),
        "token_strs": texts,
    }


async def detokenize(serving: Serving, body: Any, *, request_id: str) -> dict[str, Any]:
    """The text of token ids, special ones included."""
    body = check_body(body, DETOKENIZE)
    serving.model_name(body.get("model"))
    token_ids = body["tokens"]
    size = serving.model_config.vocab_size
    if token_ids and max(token_ids) >= size:
        position = next(index for index, token_id in enumerate(token_ids) if token_id >= size)
        raise BodyError(
            f"tokens[{position}] is {token_ids[position]}; allowed: 0 to {size - 1}", param=f"tokens[{position}]"
        )
    return {"prompt": await serving.in_thread(serving.tokenizer.decode, token_ids, False)}
