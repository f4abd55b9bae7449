"""``/tokenize`` and ``/detokenize``, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from runtime.server.app_state import AppState
from runtime.server.chat import render_prompt
from runtime.server.errors import BodyError
from runtime.server.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest


async def tokenize(state: AppState, body: TokenizeTextRequest | TokenizeChatRequest) -> dict[str, Any]:
    """The token ids of a text or of messages."""
    state.model_name(body.model)
    if isinstance(body, TokenizeChatRequest):
        _, token_ids = await state.run_in_thread(render_prompt, state, body)
    else:
        special = body.add_special_tokens is not False
        # All of them, however many: clients count the tokens of texts that are too long.
        token_ids = await state.run_in_thread(state.tokenizer.encode, body.prompt, special)
    texts = None
    if body.return_token_strs:
        texts = await state.run_in_thread(lambda: [state.texts[token_id] for token_id in token_ids])
    return {
        "count": len(token_ids),
        "max_model_len": state.max_model_len,
        "tokens": list(token_ids),
        "token_strs": texts,
    }


async def detokenize(state: AppState, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    state.model_name(body.model)
    token_ids = body.tokens
    size = state.model_config.vocab_size
    if token_ids and max(token_ids) >= size:
        position = next(index for index, token_id in enumerate(token_ids) if token_id >= size)
        raise BodyError(
            f"tokens[{position}] is {token_ids[position]}; allowed: 0 to {size - 1}", param=f"tokens[{position}]"
        )
    return {"prompt": await state.run_in_thread(state.tokenizer.decode, token_ids, False)}
