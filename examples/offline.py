"""Offline batch generation: a list of prompts in, a list of outputs back.

python examples/offline.py [MODEL] [TENSOR_PARALLEL_SIZE]
"""

import sys

from lockstep import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two plus two equals", "Once upon a time"]


def main() -> None:
    """Generate with MODEL, by default the demo model on one rank."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    with LLM(model, tensor_parallel_size=size) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.text!r}")


if __name__ == "__main__":
    main()
