"""Streaming with asyncio: two concurrent requests, printed as their text arrives.

python examples/async_generate.py [MODEL]
"""

import asyncio
import sys

from lockstep import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Print every new chunk of text of one request."""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16)):
        print(f"{name}: {output.outputs[0].new_text!r}")


async def main(llm: AsyncLLM) -> None:
    """Run both requests in one engine and close it."""
    async with llm:
        await asyncio.gather(
            stream(llm, "first", "The capital of France is"), stream(llm, "second", "The capital of Italy is")
        )


if __name__ == "__main__":
    # The constructor starts the ranks and blocks, so it runs before the event loop.
    asyncio.run(main(AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else "demo")))
