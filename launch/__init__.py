"""Entry points and launchers: the command line, LLM and AsyncLLM, and the code that makes the ranks' processes."""
