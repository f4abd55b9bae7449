"""Command-line arguments: flags made from the config dataclasses, the --config file, and errors of one line.

A field of :class:`~runtime.common.config.EngineConfig` or :class:`~runtime.common.config.SamplingParams` is a flag
because it was declared with ``setting(...)``; nothing here knows their names. What the commands do with the values
lives in ``launch/cli/commands/``. Imports nothing heavy: ``--help`` passes through here.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from runtime.common.config import EngineConfig, checked_fields
from runtime.common.errors import ConfigError, InputError
from runtime.common.sampling_params import SamplingParams, StructuredOutputs

CLI_MAX_TOKENS = 128
"""``--max-tokens`` unless told otherwise: the API's 16 would cut most answers that a person asks for."""


class UsageError(InputError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises :class:`UsageError` with one line instead of printing its usage and exiting."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments in ``argv``. Raises :class:`UsageError`, which suggests the nearest flag to an unknown one."""
        namespace, unknown = self.parse_known_args(list(argv))
        if unknown:
            self.error(self._explain(unknown))
        return namespace

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as a :class:`UsageError`."""
        message = " ".join(message.split()).removeprefix("argument ")
        message = message.replace("expected one argument", "a value is missing")
        message = message.replace("expected at least one argument", "a value is missing")
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _explain(self, unknown: list[str]) -> str:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {unknown[0]!r}; quote a text of several words"
        name = flag.split("=")[0]
        flags = [option for action in self._actions for option in action.option_strings]
        return f"unknown flag {name}{suggest(name, flags)}"


def suggest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the known name most like ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


@dataclass(frozen=True)
class Settings:
    """What a command line and its --config file say about engine and requests: only what was given.

    Attributes:
        model: a checkpoint folder, or ``demo``.
        engine: fields of EngineConfig other than ``model``, as keyword arguments for ``LLM``.
        sampling: the parameters of every request.
    """

    model: str
    engine: dict[str, Any]
    sampling: SamplingParams


def add_model(parser: Parser) -> None:
    """MODEL and --config."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="checkpoint folder, ORG/NAME[@REVISION] on the Hugging Face hub, or 'demo': a small chat model",
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        type=Path,
        help="take settings from this file; its keys are the flags' names with _ for -; flags win over it",
    )


def add_engine_flags(parser: Parser) -> None:
    """A flag for every field of EngineConfig that has one."""
    _add_flags(parser.add_argument_group("engine"), EngineConfig, {})


def add_sampling_flags(parser: Parser, *, max_tokens: int = CLI_MAX_TOKENS) -> None:
    """A flag for every field of SamplingParams that has one; ``--seed`` comes with the engine's and serves both."""
    _add_flags(parser.add_argument_group("sampling"), SamplingParams, {"max_tokens": max_tokens})


def read_settings(
    namespace: argparse.Namespace, parser: Parser, *, sampling: bool = True, max_tokens: int = CLI_MAX_TOKENS
) -> Settings:
    """Merge flags over the --config file and check every value.

    Args:
        namespace: what ``parser`` gave.
        parser: for its errors.
        sampling: whether this command has sampling flags; if not, such keys of the file are unknown.
        max_tokens: of a request, unless flag or file say otherwise.

    Raises:
        InputError: no MODEL, an unreadable file, an unknown key, a value out of range.
    """
    given = _read_file(namespace.config, sampling) if namespace.config else {}
    given |= {name: value for name, value in vars(namespace).items() if name in _names(sampling)}
    model = given.pop("model", None)
    if not model:
        parser.error("MODEL is missing: a folder with a checkpoint, or demo; give it before the flags")
    engine = {name: value for name, value in given.items() if name in _field_names(EngineConfig)}
    EngineConfig(model=str(model), **engine)  # raises ConfigError here, before anything is started
    request: dict[str, Any] = {"max_tokens": max_tokens} if sampling else {}
    request |= {name: value for name, value in given.items() if name in _field_names(SamplingParams)}
    if sampling and "seed" in engine:
        request["seed"] = engine["seed"]
    return Settings(model=str(model), engine=engine, sampling=SamplingParams(**request))


def add_structured_flags(parser: Parser) -> None:
    """``--json-schema`` and ``--regex``: what the output has to match."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="SCHEMA", help="the output is JSON of this schema: its text, or the file that holds it"
    )
    group.add_argument("--regex", metavar="PATTERN", help="this regular expression matches the whole output")


def read_structured(namespace: argparse.Namespace) -> StructuredOutputs | None:
    """What the flags of :func:`add_structured_flags` ask for, None if nothing.

    Raises:
        InputError: the schema is neither JSON nor a file that holds some.
    """
    if namespace.regex is not None:
        return StructuredOutputs(regex=namespace.regex)
    given: str | None = namespace.json_schema
    if given is None:
        return None
    text, source = given, "--json-schema"
    if not given.lstrip().startswith(("{", "true", "false")):
        source = f"--json-schema {given}"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{source}: {error.strerror}; give a JSON schema, or a file that holds one") from None
        except UnicodeDecodeError:
            raise InputError(f"{source} is not UTF-8; give a file of JSON") from None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InputError(f"{source} is a JSON {type(schema).__name__}; a schema is an object such as {{}}")
    return StructuredOutputs(json=text)


def engine_arguments(engine: Mapping[str, Any]) -> list[str]:
    """The flags that say what ``engine`` says, for a command line of ours: :func:`read_settings` backwards."""
    words: list[str] = []
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [flag, ",".join(str(part) for part in cast("tuple[Any, ...]", value))]
        elif value is not None:  # None is every such field's default, so leaving it out says it.
            words.append(f"{flag}={value}")
    return words


def whole_number(text: str) -> int:
    """An argparse type: a whole number. Raises ArgumentTypeError that says so."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers separated by commas."""
    return tuple(whole_number(part) for part in text.split(",") if part.strip())


class Gather(argparse.Action):
    """Put the values of all uses of a flag into one tuple; a value that is a tuple itself is joined."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Called by argparse for each use of the flag."""
        gathered: tuple[Any, ...] = getattr(namespace, self.dest, None) or ()
        for value in values:
            gathered += value if isinstance(value, tuple) else (value,)
        setattr(namespace, self.dest, gathered)


class _HelpFormatter(argparse.HelpFormatter):
    """Flags in a column wide enough for ours."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=118)


def _add_flags(group: Any, cls: type[Any], defaults: dict[str, Any]) -> None:
    for field in dataclasses.fields(cls):
        if not field.metadata.get("flag"):
            continue
        default = defaults.get(field.name, field.default)
        text = str(field.metadata["help"]).replace("%", "%%")
        if default not in (None, (), False) and "default" not in text:
            text += f" (default: {default})"
        names = [f"--{field.name.replace('_', '-')}"]
        short: str = field.metadata["short"]
        if short and short.strip("-") != field.name:
            names.insert(0, short)
        if field.name == "n":
            names = ["-n"]
        # Absent flags leave no trace, so that a value from the --config file is not overwritten by a default.
        group.add_argument(*names, dest=field.name, default=argparse.SUPPRESS, help=text, **_kind_of_flag(field))


def _kind_of_flag(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """argparse's keywords for a field, by its declared type."""
    declared = str(field.type)
    choices: tuple[str, ...] = field.metadata["choices"]
    if declared == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if declared.startswith("tuple[int"):
        return {"action": Gather, "nargs": "+", "type": whole_numbers, "metavar": "N"}
    if declared.startswith("tuple[str"):  # a comma may be part of such a value
        return {"action": Gather, "nargs": "+", "metavar": "TEXT"}
    if choices:
        return {"type": _choice(choices), "metavar": "{" + ",".join(choices) + "}"}
    if declared.startswith("int"):
        return {"type": whole_number, "metavar": "N"}
    if declared.startswith("float"):
        return {"type": _number, "metavar": "X"}
    return {"metavar": "TEXT"}


def _choice(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for choice in allowed:
            if choice.casefold() == text.casefold():
                return choice
        hint = suggest(text, allowed)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(allowed)}{hint}")

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _field_names(cls: type[Any]) -> set[str]:
    """Fields of ``cls`` that a user may set: those with a flag."""
    return {field.name for field in dataclasses.fields(cls) if field.metadata.get("flag")}


def _names(sampling: bool) -> set[str]:
    names = {"model"} | _field_names(EngineConfig)
    return names | _field_names(SamplingParams) if sampling else names


def _read_file(path: Path, sampling: bool) -> dict[str, Any]:
    """The settings in a YAML file: a mapping from field names to values of their types."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a YAML file that can be read") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds a {type(content).__name__}; it should map names to values")
    known = _names(sampling)
    for key in content:
        if key not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r}{suggest(str(key), known)}")
    try:
        checked: dict[str, Any] = {}
        for cls in (SamplingParams, EngineConfig) if sampling else (EngineConfig,):
            mine = {key: value for key, value in content.items() if key in {"model", *_field_names(cls)}}
            if cls is SamplingParams:
                mine.pop("model", None)
            checked |= checked_fields(cls, mine)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    return checked
