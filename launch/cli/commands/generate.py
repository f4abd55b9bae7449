"""``lockstep generate``: continue prompts, or answer them as a chat, and print the texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.cli.args import (
    CLI_MAX_TOKENS,
    Parser,
    Settings,
    add_engine_flags,
    add_model,
    add_sampling_flags,
    add_structured_flags,
    read_settings,
    read_structured,
)
from launch.cli.output import write_json, write_line
from runtime.common.errors import InputError, RequestError

if TYPE_CHECKING:
    from runtime.engine.request import CompletionOutput, RequestOutput


def build_parser() -> Parser:
    """The arguments of ``generate``."""
    parser = Parser(
        "lockstep generate",
        "MODEL (--prompt TEXT ... | --prompts-file FILE) [--chat] [--json] [flags]",
        "Continue prompts with MODEL. Texts go to stdout in the order of the prompts, everything else to stderr.",
        f"--max-tokens is {CLI_MAX_TOKENS} here, 16 in the Python API. --seed is the engine's and every request's: "
        "the same seed gives a prompt the same answer.",
    )
    add_model(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", nargs="+", action="extend", help="prompts; may be repeated")
    prompts.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a prompt a line, blank lines skipped; JSON strings if every line is one; '-': standard input",
    )
    parser.add_argument("--chat", action="store_true", help="give each prompt as a user's message to the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_structured_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def check(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The arguments in ``argv``, found good without starting anything. Raises :class:`InputError` if they are not."""
    parser = build_parser()
    arguments = parser.parse(argv)
    settings = read_settings(arguments, parser)
    if (wanted := read_structured(arguments)) is not None:
        from runtime.text.grammar_check import (
            check_structured,  # It needs llguidance, which comes with the serve extra.
        )

        check_structured(wanted)
        sampling = dataclasses.replace(settings.sampling, structured_outputs=wanted)
        settings = dataclasses.replace(settings, sampling=sampling)
    if arguments.prompt is None and arguments.prompts_file is None:
        parser.error("nothing to generate from: give --prompt TEXT or --prompts-file FILE")
    return arguments, settings


def run(argv: Sequence[str]) -> int:
    """Generate and print; 1 if a prompt failed. Raises :class:`~runtime.common.errors.LockstepError`."""
    arguments, settings = check(argv)
    prompts = _prompts(arguments)

    from launch.llm import LLM

    with LLM(settings.model, **settings.engine) as llm:
        if arguments.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, settings.sampling, progress=True)
        else:
            outputs = llm.generate(prompts, settings.sampling, progress=True)
        return _print_all(outputs, prompts, as_json=arguments.json)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts in order, each of them text that can be encoded."""
    prompts: list[str] = arguments.prompt or read_prompts(arguments.prompts_file)
    for number, prompt in enumerate(prompts):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestError(f"prompt {number} is not valid UTF-8: {prompt!r}; give it in UTF-8") from None
    return prompts


def read_prompts(file: str) -> list[str]:
    """The prompts in ``file`` ("-": stdin). Raises :class:`InputError` if there are none or they cannot be read."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        lines = [line for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    except OSError as error:
        raise InputError(f"--prompts-file {file}: {error.strerror}; give a text file that can be read") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts-file {file} is not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    if not lines:
        raise InputError(f"--prompts-file {file} holds no prompt; write one on each line")
    try:
        parsed: list[Any] = [json.loads(line) for line in lines]
    except ValueError:
        parsed = []
    if parsed and all(isinstance(prompt, str) for prompt in parsed):
        return parsed
    return [line.removesuffix("\r") for line in lines]


def _print_all(outputs: Sequence[RequestOutput], prompts: list[str], *, as_json: bool) -> int:
    """Print every sample of every prompt; 1 if one of them failed, else 0."""
    lines = [(output, sample) for output in outputs for sample in output.outputs]
    failed = False
    for output, sample in lines:
        if as_json:
            write_json(_as_json(output, sample, prompts[output.index]))
        else:
            if len(lines) > 1:
                write_line(f"--- prompt {output.index}: {prompts[output.index]!r}")
            write_line(sample.text)
        if sample.finish_reason == "error":
            failed = True
            print(f"lockstep generate: prompt {output.index} failed: {sample.error}", file=sys.stderr)
    return 1 if failed else 0


def _as_json(output: RequestOutput, sample: CompletionOutput, prompt: str) -> dict[str, Any]:
    """One line of --json. What was not asked for (samples, logprobs, errors) adds no key."""
    line: dict[str, Any] = {
        "index": output.index,
        "prompt": prompt,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sample.num_tokens,
    }
    if len(output.outputs) > 1:
        line["sample"] = sample.index
    if sample.logprobs is not None:
        line["logprobs"] = [{"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in sample.logprobs]
    if sample.error:
        line["error"] = sample.error
    return line
