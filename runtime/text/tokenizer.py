"""Text to token ids and back, from a checkpoint's own files, over the ``tokenizers`` library.

:class:`Tokenizer` encodes and decodes as transformers' ``AutoTokenizer`` does for the same folder.
:class:`IncrementalDetokenizer` decodes tokens that arrive one by one, and :class:`StopChecker` finds stop strings in
their text. Chat templates are rendered by ``chat_template.py``. No code from a checkpoint is run here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from runtime.common.checkpoint import MAX_JSON_BYTES, checked_folder, read_json_object
from runtime.common.errors import CheckpointError, RequestError
from runtime.text.chat_template import ChatTemplate, plain_messages

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that tokenizer_config.json can name, and that a chat template can read."""

REPLACEMENT = "\ufffd"
"""What stands for bytes that are not (or not yet) a character."""

CONTEXT_TOKENS = 6
"""Tokens that new ones are decoded with. A UTF-8 character has at most 4 bytes, so these hold all of a cut one, and
something before it that decides about a space."""


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], template: ChatTemplate | None) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._template = template
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_letters = _byte_letters() if _decodes_by(backend, "ByteLevel") else {}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens it knows, added ones included. A model's own vocabulary may be padded to more."""
        self.byte_fallback: bool = _decodes_by(backend, "ByteFallback")
        """Whether characters outside the vocabulary become tokens like ``<0xE2>``, one for each byte."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; only the first has to exist.

        Raises:
            CheckpointError: a file is missing or broken; it is named.
        """
        folder = checked_folder(folder)
        config_path, map_path = folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE
        config = read_json_object(config_path) if config_path.exists() else {}
        if map_path.exists() and "added_tokens_decoder" not in config:
            config = config | read_json_object(map_path)  # Where old checkpoints keep them.
        special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}
        backend = _read_backend(folder)
        _apply_config(backend, config, special_tokens, config_path)
        return cls(backend, special_tokens, _read_template(folder, config, special_tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
            text: special tokens written out in it become those tokens.
            add_special_tokens: whether to add what the tokenizer puts around a text, e.g. a begin-of-sequence token.

        Raises:
            RequestError: it is not text, or not valid Unicode.
        """
        if not isinstance(cast("Any", text), str):
            raise RequestError(f"a prompt has to be text, or a list of token ids; got {type(text).__name__}")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            # What is left of half a character pair, e.g. from JSON's "\ud83d": no tokenizer can take it.
            raise RequestError(f"text is not valid Unicode (a lone surrogate?): {text!r:.80}") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids the tokenizer does not know give none.

        Raises:
            RequestError: an id is negative or no 32-bit number.
        """
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"not a list of token ids: {error}") from None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt of a conversation. It has its special tokens, so encode it with ``add_special_tokens=False``.

        Raises:
            RequestError: the checkpoint has no template, or its template refuses these messages.
            CheckpointError: the template is broken or tries something forbidden.
        """
        if self._template is None:
            raise RequestError(
                f"this checkpoint has no chat template ({CHAT_TEMPLATE_FILE}, or chat_template in "
                f"{TOKENIZER_CONFIG_FILE}); give a plain prompt, or add a template to the folder"
            )
        return self._template.render(plain_messages(messages), add_generation_prompt=add_generation_prompt, tools=tools)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`apply_chat_template` can work."""
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer calls end of sequence; a model may stop at others, too."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The token that the tokenizer calls begin of sequence."""
        return self._special_id("bos_token")

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def has_text(self, token_id: int) -> bool:
        """Whether the token shows in a text: it is known and not special."""
        return token_id not in self._special_ids and bool(self._backend.id_to_token(token_id))

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte, which only its neighbours make a character of (see ``byte_fallback``)."""
        if not self.byte_fallback:
            return False
        token = self._backend.id_to_token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def token_bytes(self, token_id: int) -> bytes:
        """The token's part of a text's UTF-8, which may begin or end within a character; special ones as written."""
        token = self._backend.id_to_token(token_id) or ""
        if self.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        if self._byte_letters and token_id not in self._added_ids and set(token) <= self._byte_letters.keys():
            return bytes(self._byte_letters[letter] for letter in token)
        return self.decode((token_id,), skip_special_tokens=False).encode()

    def close(self) -> None:
        """End the helper process of the chat template, if one runs."""
        if self._template is not None:
            self._template.close()


def _read_backend(folder: Path) -> Backend:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        others = sorted(p.name for p in folder.glob("*.model")) + sorted(p.name for p in folder.glob("*.tiktoken"))
        found = f"it has {', '.join(others)}, which has to be converted first" if others else "copy it there"
        raise CheckpointError(
            f"{path} does not exist; {found}. With transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    read_json_object(path)  # For its messages: the library's own name neither the file nor what is wrong with it.
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise CheckpointError(f"{path} is not a tokenizer of the tokenizers library: {error}") from error
    # A file can ask for cut and padded prompts; transformers ignores that unless told, and we always.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _apply_config(backend: Backend, config: dict[str, Any], special_tokens: dict[str, str], path: Path) -> None:
    """Add the tokens that tokenizer_config.json names.

    What is put around a text is tokenizer.json's alone: as in transformers 5, ``add_bos_token`` and ``add_eos_token``
    are for building one.
    """
    if config.get("auto_map"):
        raise CheckpointError(
            f"{path} has auto_map: code from a checkpoint is never run; remove it if {TOKENIZER_FILE} is enough"
        )
    declared = cast("dict[str, Any]", config.get("added_tokens_decoder") or {})
    try:
        for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
            if backend.token_to_id(token["content"]) is None:
                flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
                backend.add_tokens([AddedToken(token["content"], normalized=bool(token.get("normalized")), **flags)])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is not a table of tokens: {error!r}") from error
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    values = cast("Iterable[Any]", more.values() if isinstance(more, dict) else more)
    extra = [text for token in values if (text := _content(token)) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (*special_tokens.values(), *extra)])


def _read_template(folder: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The chat template, from its own file or else from tokenizer_config.json; of several there the default one."""
    path = folder / CHAT_TEMPLATE_FILE
    if path.exists():
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
            return ChatTemplate(path.read_text(encoding="utf-8"), path, special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    source = config.get("chat_template")
    path = folder / TOKENIZER_CONFIG_FILE
    if isinstance(source, list):
        entries = [cast("dict[str, Any]", e) for e in cast("list[Any]", source) if isinstance(e, dict)]
        source = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{path}: chat_template is a {type(source).__name__}; it has to be text")
    return None if source is None else ChatTemplate(source, path, special_tokens)


def _content(token: Any) -> str | None:
    """A special token's text: tokenizer_config.json writes it plainly or as an object."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _decodes_by(backend: Backend, decoder: str) -> bool:
    """Whether one of that kind is the decoder, or a part of it."""
    return decoder in repr(backend.decoder)


def _byte_letters() -> dict[str, int]:
    """The bytes that the letters of byte-level tokens stand for (GPT-2's ``bytes_to_unicode``).

    Printable bytes of Latin-1 are letters themselves; the others have the letters after those, in order.
    """
    letters = sorted(ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(map(ord, own)))
    return {letter: ord(letter) for letter in own} | dict(zip(letters[len(own) :], others, strict=True))


class IncrementalDetokenizer:
    """Text of a growing list of tokens: the chunks joined are what decoding prompt and output at once would add.

    Only a window of the last tokens is decoded each time, so the cost of a token does not grow with the text. What may
    still change is held back: an incomplete character, and a run of single-byte tokens, which the decoder turns into
    characters or into replacement characters only as a whole.

    The library's ``DecodeStream`` is not used: it raises "Invalid prefix encountered" for byte-fallback tokens that
    form no character, which a model can sample, and it never returns an incomplete character at the end.

    Args:
        tokenizer: the one that made the prompt.
        prompt_ids: the prompt, since its end decides how the output begins (a space, the rest of a character).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _end_of_prompt(tokenizer, prompt_ids)
        text = tokenizer.decode(self._window)
        settled = text.rstrip(REPLACEMENT) if tokenizer.byte_fallback else self._settled(text)
        self._given = len(settled)  # Characters of the window's text that are the prompt's, or were given out.
        self._doubtful = len(text) - len(settled)  # Marks at the prompt's end that the output may yet complete.

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._window.extend(token_id for token_id in token_ids if self._tokenizer.has_text(token_id))
        if not self._window or self._tokenizer.is_byte(self._window[-1]):
            return ""
        chunk = self._give(self._settled(self._tokenizer.decode(self._window)))
        if len(self._window) >= 2 * CONTEXT_TOKENS:
            # Safe even if the last character is cut: the tokens that stay hold all of it.
            self._window = self._window[-CONTEXT_TOKENS:]
            self._given = len(self._settled(self._tokenizer.decode(self._window)))
        return chunk

    def finish(self) -> str:
        """The rest as it is, since nothing follows that could complete it."""
        return self._give(self._tokenizer.decode(self._window))

    def _settled(self, text: str) -> str:
        """The text without its last character if that may be a cut one. Of several marks only the last may change."""
        return text if self._tokenizer.byte_fallback else text.removesuffix(REPLACEMENT)

    def _give(self, text: str) -> str:
        chunk = text[self._given :]
        self._given = max(self._given, len(text))
        if chunk and self._doubtful:
            # Marks that are still there now that something follows are the prompt's own, not the output's.
            own = len(chunk) - len(chunk.lstrip(REPLACEMENT))
            chunk = chunk[min(own, self._doubtful) :]
            self._doubtful = 0
        return chunk


def _end_of_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt that have text: a few, and a run of byte tokens only as a whole."""
    tokens: list[int] = []
    for token_id in reversed(prompt_ids):
        if tokenizer.has_text(token_id):
            if len(tokens) >= CONTEXT_TOKENS and not tokenizer.is_byte(tokens[-1]):
                break
            tokens.append(token_id)
    return tokens[::-1]


class StopChecker:
    """Finds the first stop string in a growing text, wherever token borders lie.

    No part of a stop string is ever returned: an end of the text that may become one is held back.

    Args:
        stop: the stop strings, at least one.

    Attributes:
        stopped: whether one was found. Text after it is dropped.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._may_stop = False
        self.stopped = False

    def append(self, text: str, *, may_stop: bool) -> str:
        """The text that became certain. ``may_stop``: whether a stop string that ends in ``text`` counts."""
        self._may_stop = may_stop
        return self._search(text)

    def finish(self, text: str) -> str:
        """The last ``text`` and what was held back, when the sequence finishes for another reason."""
        if self.stopped:
            return ""
        text = self._search(text)
        rest, self._held = self._held, ""
        return text + rest

    def _search(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0] if self._may_stop else []
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = _longest_prefix(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _longest_prefix(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` are a proper prefix of a stop string."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
