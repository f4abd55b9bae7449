"""Structured output: the answer is JSON that matches a schema.

python examples/structured_output.py [MODEL]
"""

import json
import sys

from lockstep import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Berlin"]}, "in_europe": {"type": "boolean"}},
    "required": ["city", "in_europe"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask MODEL, by default the demo model, for one JSON object."""
    params = SamplingParams(
        temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputs(json=json.dumps(SCHEMA))
    )
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        (output,) = llm.generate("Describe the capital of France as JSON: ", params)
    print(json.dumps(json.loads(output.text)))


if __name__ == "__main__":
    main()
