"""What transformers answers to twenty prompts with the demo model, greedily, in float32: the judge of every launcher.

``tests/data/demo_greedy.json`` holds the answers, since computing them takes a minute; a slow test computes them again.
Run this file to write it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

GOLDEN = Path(__file__).parent / "data" / "demo_greedy.json"
MAX_TOKENS = 64

PROMPTS = (
    "What is the capital of France?",
    "Hi",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "What is 7 times 8?",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' to Spanish.",
    "List the planets of the solar system in order from the sun.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes with at most five ingredients.",
    "Summarize the following text in one sentence: The steam engine, developed in the eighteenth century, turned heat "
    "into motion and changed how goods were made. Factories no longer had to stand beside rivers, railways joined "
    "towns that had been days apart, and work moved from the home to the mill. Historians still argue about whether "
    "the engine caused the change or whether the change called for the engine.",
    "What does the Python expression sorted([3, 1, 2]) return?",
    "Schreibe einen kurzen Satz auf Deutsch.",
    "Is water wet? Answer yes or no and say why.",
    "¿Dónde está la biblioteca?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle. " * 6,
    "Complete the sequence: 2, 4, 8, 16,",
    "🙂🙃 What do these two emoji mean?",
    "Describe a rainy afternoon without using the word rain.",
    "What is the difference between a list and a tuple in Python? " + "Be precise. " * 40,
)


def transformers_answers(folder: Path, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    """Greedy token ids of each prompt alone, chat template applied, end token included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(
            **ids, max_new_tokens=MAX_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None
        )
        answers.append(output[0, ids["input_ids"].shape[1] :].tolist())
    return answers


def golden_answers() -> list[list[int]]:
    """The answers as they were written down."""
    return [entry["token_ids"] for entry in json.loads(GOLDEN.read_text())]


if __name__ == "__main__":
    from launch.demo_model import ensure_demo_model
    from launch.environment import read_environment

    answers = transformers_answers(ensure_demo_model(read_environment().cache_dir))
    entries = [{"prompt": p, "token_ids": a} for p, a in zip(PROMPTS, answers, strict=True)]
    GOLDEN.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n")
