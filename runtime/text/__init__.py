"""Text: tokenizer, chat template, and the check of grammars for structured output."""
