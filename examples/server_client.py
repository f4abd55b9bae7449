"""The official openai client against a Lockstep server.

lockstep serve demo --port 8000            # in another terminal
python examples/server_client.py [BASE_URL]
"""

import sys

from openai import OpenAI


def main() -> None:
    """Complete a prompt, then stream the same completion."""
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    model = client.models.list().data[0].id
    done = client.completions.create(model=model, prompt="The capital of France is", max_tokens=16, temperature=0)
    print(f"completion: {done.choices[0].text!r}")
    stream = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=16, temperature=0, stream=True
    )
    print(f"streamed:   {''.join(chunk.choices[0].text for chunk in stream)!r}")


if __name__ == "__main__":
    main()
