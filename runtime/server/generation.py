"""Runs the prompts of one body through the engine, and counts their tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.engine.request import GenerateRequest, RequestOutput
from runtime.server.app_state import AppState
from runtime.server.errors import GenerationError, shutting_down

MERGED_OUTPUTS = 16
"""Outputs of several prompts of one body that a queue holds for a slow client; the engine merges later ones."""


@dataclass
class Usage:
    """Token counts of one response. A prompt is counted once, whatever its number of samples."""

    _outputs: dict[int, RequestOutput] = field(default_factory=dict[int, RequestOutput])

    def update(self, index: int, output: RequestOutput) -> None:
        """Replace the output of a prompt by a newer one."""
        self._outputs[index] = output

    def to_dict(self, *, completion_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's ``usage``. ``completion_tokens`` overrides the count."""
        outputs = self._outputs.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        if completion_tokens is None:
            completion_tokens = sum(sample.num_tokens for output in outputs for sample in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }


async def generate(
    state: AppState, requests: Sequence[GenerateRequest], *, max_tokens: int | None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yield the outputs of every request with its index, as they arrive.

    Leaving the iterator aborts the requests that have not finished.

    Args:
        state: the engine and its metrics.
        requests: one for each prompt of a body.
        max_tokens: the body's ``max_tokens``, for metrics; None if it has none.

    Raises:
        LockstepError: a request was refused, or failed; all others were aborted.
    """
    if len(requests) == 1:
        async with contextlib.aclosing(_generate_one(state, requests[0], max_tokens)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    async with contextlib.aclosing(_generate_several(state, requests, max_tokens)) as pairs:
        async for pair in pairs:
            yield pair


async def generate_final(
    state: AppState, requests: Sequence[GenerateRequest], *, max_tokens: int | None
) -> list[RequestOutput]:
    """The final output of every request, in order. Raises as :func:`generate` does."""
    final: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(generate(state, requests, max_tokens=max_tokens)) as outputs:
        async for index, output in outputs:
            final[index] = output
    return [final[index] for index in range(len(requests))]


async def _generate_one(
    state: AppState, request: GenerateRequest, max_tokens: int | None
) -> AsyncGenerator[RequestOutput]:
    outputs = state.engine.generate(request)
    metrics = None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if state.metrics is not None:
                metrics = metrics or state.metrics.new_request(request.params, max_tokens)
                metrics.update(output)
            for sample in output.outputs:
                if sample.finish_reason in ("error", "abort"):
                    raise _failure(state, sample.finish_reason, sample.error)
            yield output


def _failure(state: AppState, reason: str, text: str) -> Exception:
    """The error of a request that the engine did not finish."""
    if state.engine.failure is not None:
        return state.engine.failure
    return shutting_down() if reason == "abort" else GenerationError(text)


async def _generate_several(
    state: AppState, requests: Sequence[GenerateRequest], max_tokens: int | None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run a task for each request. All tasks fill one short queue, so a slow reader delays all of them."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(MERGED_OUTPUTS)

    async def put_outputs(index: int, request: GenerateRequest) -> None:
        try:
            async with contextlib.aclosing(_generate_one(state, request, max_tokens)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:  # noqa: BLE001 - raised again where the queue is read
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    tasks = [asyncio.ensure_future(put_outputs(index, request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            index, output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                running -= 1
            else:
                yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
