"""Our tokenizer against transformers' on the same folder; streamed text against text decoded at once."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from launch.demo_model import ensure_demo_model
from launch.environment import read_environment
from launch.progress import Progress
from runtime.common.errors import CheckpointError, RequestError
from runtime.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer

TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces \n\n\tand tabs ",
    "def f(x):\n    return x ** 2  # power",
    "¿Dónde está la biblioteca? Straße, naïve, ΑΒΓ αβγ",
    "日本語のテキスト、中文 한국어 ทดสอบ",
    "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "<s>[user]</s> and <tool>not special</tool> <|extra|>",
    "a\x00b\x1f\ufffd\u200b",
)

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ["user", "assistant", "system"] %}
    {{- raise_exception("no role " + message.role) }}
{%- endif %}
[{{ message.role|upper }}] {{ message["content"] | trim }}
{% if message.extra is defined %}{{ message.extra | tojson }}{% endif %}
{% if message.role == "assistant" %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}"""

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True},
    "unk_token": "<unk>",
    "additional_special_tokens": ["<|extra|>"],
    "chat_template": TEMPLATE,
}


def byte_level() -> Backend:
    """As GPT-2, Llama 3 and Qwen have it: tokens are chunks of UTF-8."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS[:5], trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_fallback() -> Backend:
    """As Llama 2, Mistral and Gemma have it: spaces are letters, and bytes stand for what has no token."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS[:5], trainer)
    # Training made the bytes special tokens; in a real vocabulary they are plain ones.
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Backend.from_str(json.dumps(data))


BACKENDS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@functools.cache
def root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tokenizers-")


@functools.cache
def folder_of(kind: str, **changes: Any) -> Path:
    """A folder with a tokenizer of that kind; ``changes`` are made to its tokenizer_config.json."""
    folder = Path(tempfile.mkdtemp(dir=root().name))
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module", params=[*BACKENDS, "demo"])
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "demo":
        return ensure_demo_model(read_environment().cache_dir, Progress(enabled=False))
    return folder_of(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_folder(folder)
    yield tokenizer
    tokenizer.close()


@functools.cache
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# ---- encode and decode


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_and_decodes_as_transformers(
    folder: Path, loaded: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    expected = reference(folder)
    ids = loaded.encode(text, add_special_tokens=add_special_tokens)
    assert ids == expected.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert loaded.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


def test_decodes_any_ids_as_transformers(folder: Path, loaded: Tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(200):
        ids = [generator.randrange(loaded.vocab_size + 5) for _ in range(generator.randrange(20))]
        for skip in (True, False):
            assert loaded.decode(ids, skip) == reference(folder).decode(ids, skip_special_tokens=skip)


def test_knows_sizes_and_special_tokens(folder: Path, loaded: Tokenizer) -> None:
    expected = reference(folder)
    assert loaded.vocab_size == len(expected)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (expected.bos_token_id, expected.eos_token_id)


@pytest.mark.parametrize("kind", list(BACKENDS))
@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"pad_token": "<pad>"},
        {"extra_special_tokens": ["<more>", "<|extra|>"]},
        {"added_tokens_decoder": {"700": {"content": "<late>", "special": False, "normalized": False}}},
        {"bos_token": None},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_follows_tokenizer_config_as_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "x<late>y <pad> <more>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_follows_the_special_tokens_of_old_checkpoints(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    old = {"bos_token": "<s>", "eos_token": {"content": "</s>", "normalized": False}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, len(theirs))
    assert ours.encode("a<pad></s>") == theirs.encode("a<pad></s>")


def test_a_file_that_cuts_and_pads_does_neither(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("Hello, world! " * 3)) > 4
    assert len(Tokenizer.from_folder(tmp_path).encode("H")) == 2


def test_only_tokenizer_json_is_needed(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert tokenizer.eos_token_id is None and not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template .*chat_template.jinja"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["half a pair \ud83d", 5, None])
def test_refuses_what_is_no_text(loaded: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match=r"Unicode|has to be text"):
        loaded.encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_refuses_what_are_no_ids(loaded: Tokenizer, ids: Any) -> None:
    with pytest.raises(RequestError, match="token ids"):
        loaded.decode(ids)


# ---- bytes


@pytest.mark.parametrize("text", [*TEXTS, "".join(map(chr, range(32, 1000))), "<tool>né\u00a0🙂</tool>\ufffd"])
def test_the_bytes_of_tokens_joined_are_those_of_the_text(loaded: Tokenizer, text: str) -> None:
    ids = loaded.encode(text, add_special_tokens=False)
    joined = b"".join(map(loaded.token_bytes, ids))
    if loaded.byte_fallback:  # Its decoder drops the space that begins a text, of single tokens, too.
        joined, text = joined.replace(b" ", b""), text.replace(" ", "")
    assert joined == text.encode()


# ---- broken folders


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"tokenizer.json does not exist; copy it there.*save_pretrained"),
        ({"tokenizer.model": b"\x0a\x0e"}, r"tokenizer.json does not exist; it has tokenizer.model.*save_pretrained"),
        ({"tokenizer.json": b"version https://git-lfs.github.com/spec/v1\noid sha256:0"}, r"tokenizer.json.*LFS"),
        ({"tokenizer.json": b"{ not json"}, r"tokenizer.json is not valid JSON"),
        ({"tokenizer.json": b'{"model": {"type": "Nothing"}}'}, r"tokenizer.json is not a tokenizer"),
        ({"tokenizer_config.json": b"[]"}, r"tokenizer_config.json is not a JSON object"),
        ({"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'}, r"config.json has auto_map"),
        ({"tokenizer_config.json": b'{"added_tokens_decoder": {"a": 1}}'}, r"added_tokens_decoder"),
        ({"tokenizer_config.json": b'{"chat_template": 5}'}, r"tokenizer_config.json: chat_template is a int"),
        ({"chat_template.jinja": b"\xff\xfe"}, r"chat_template.jinja cannot be read"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_names_the_file_that_is_broken(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    if files and not {"tokenizer.json", "tokenizer.model"} & files.keys():
        byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


# ---- chat templates

CHAT = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "<b>¿Qué?</b> & 'so'", "extra": {"ü": [1, None, "<>"]}},
    {"role": "assistant", "content": "Nada.", "tool_calls": None},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(folder: Path, loaded: Tokenizer, add_generation_prompt: bool) -> None:
    for messages in (CHAT, CHAT[:1], CHAT + CHAT):
        for tools in (None, [{"type": "function", "function": {"name": "ä"}}]):
            expected = reference(folder).apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools
            )
            assert loaded.apply_chat_template(messages, add_generation_prompt, tools) == expected


def test_its_own_file_goes_before_tokenizer_config(tmp_path: Path) -> None:
    shutil.copytree(folder_of("byte-level"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}|")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(CHAT[3:]) == "Bye|"
    tokenizer.close()


def test_of_several_templates_the_default_is_taken() -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].role }}"}]
    folder = Path(tempfile.mkdtemp(dir=root().name))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(CHAT) == "system"
    tokenizer.close()


@pytest.mark.parametrize("messages", [[], ["hi"], [["role", "user"]]])
def test_conversations_have_to_be_objects(loaded: Tokenizer, messages: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"message"):
        loaded.apply_chat_template(messages)


# ---- one token at a time


def settled(text: str, tokenizer: Tokenizer) -> str:
    return text.rstrip("\ufffd") if tokenizer.byte_fallback else text.removesuffix("\ufffd")


def whole_text(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """What decoding at once adds to the prompt's text; a character cut by the border counts to the output."""
    before, both = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    return both[len(before) :] if both.startswith(before) else both[len(settled(before, tokenizer)) :]


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.append([token_id]) for token_id in output), detokenizer.finish()]


def test_streamed_text_is_the_whole_text(loaded: Tokenizer) -> None:
    for text in TEXTS:
        ids = loaded.encode(text)
        for border in range(len(ids) + 1):
            chunks = streamed(loaded, ids[:border], ids[border:])
            assert "".join(chunks) == whole_text(loaded, ids[:border], ids[border:])


def test_streamed_garbage_is_the_whole_text(loaded: Tokenizer) -> None:
    """Random ids: cut and invalid characters, special and unknown tokens, everywhere."""
    generator = random.Random(1)
    bytes_only = [i for i in range(loaded.vocab_size) if len(loaded.decode([i])) == 1 or loaded.is_byte(i)]
    for _ in range(300):
        ids = range(loaded.vocab_size + 3) if generator.random() < 0.5 else bytes_only
        prompt = [generator.choice(ids) for _ in range(generator.randrange(10))]
        output = [generator.choice(ids) for _ in range(generator.randrange(1, 60))]
        assert "".join(streamed(loaded, prompt, output)) == whole_text(loaded, prompt, output)


def test_characters_come_out_whole(loaded: Tokenizer) -> None:
    text = "日🙂é한"
    chunks = streamed(loaded, loaded.encode("x"), loaded.encode(text, add_special_tokens=False))
    assert "".join(chunks).strip() == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_text_does_not_wait_longer_than_it_has_to() -> None:
    tokenizer = Tokenizer.from_folder(folder_of("byte-level"))
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    for text in ("Hello", ",", " wor", "ld", "é", "🙂"):
        chunks = [detokenizer.append([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
        assert "".join(chunks) == text


def test_the_first_space_is_kept_after_a_prompt_and_not_without() -> None:
    tokenizer = Tokenizer.from_folder(folder_of("byte-fallback"))
    prompt, output = tokenizer.encode("Hello"), tokenizer.encode("world", add_special_tokens=False)
    assert "".join(streamed(tokenizer, prompt, output)) == " world"
    assert "".join(streamed(tokenizer, [], output)) == "world"
    assert "".join(streamed(tokenizer, [1], output)) == "world"


def test_a_token_costs_the_same_however_many_came_before(loaded: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = loaded.decode
    monkeypatch.setattr(loaded, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    detokenizer = IncrementalDetokenizer(loaded, loaded.encode("Hello, world! " * 300))
    generator = random.Random(2)
    for _ in range(2000):
        detokenizer.append([generator.randrange(3, loaded.vocab_size)])
    assert sum(decoded) / 2000 < 20


# ---- stop strings


def stream(tokenizer: Tokenizer, text: str, stop: tuple[str, ...], may_stop_from: int = 0) -> tuple[list[str], bool]:
    detokenizer, checker = IncrementalDetokenizer(tokenizer, tokenizer.encode("x")), StopChecker(stop)
    texts: list[str] = []
    for position, token_id in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        texts.append(checker.append(detokenizer.append((token_id,)), may_stop=position >= may_stop_from))
        if checker.stopped:
            break
    return [*texts, checker.finish(detokenizer.finish())], checker.stopped


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("world",), "Hello, "),
        (("lo, wo",), "Hel"),
        (("H",), ""),
        (("!", "w"), "Hello, "),
        (("w", "!"), "Hello, "),
        (("é",), "Hello, world! caf"),
        (("🙂",), "Hello, world! café "),
        (("nothing", "Hello, world!?"), None),
        (("ld!!", "🙂🙂"), None),
    ],
)
def test_stops_before_the_first_stop_string(stop: tuple[str, ...], expected: str | None) -> None:
    tokenizer = Tokenizer.from_folder(folder_of("byte-level"))
    text = "Hello, world! café 🙂"
    chunks, stopped = stream(tokenizer, text, stop)
    assert stopped == (expected is not None)
    assert "".join(chunks) == (text if expected is None else expected)


def test_nothing_of_a_stop_string_is_given_out_early() -> None:
    tokenizer = Tokenizer.from_folder(folder_of("byte-level"))
    generator = random.Random(3)
    for _ in range(300):
        text = "".join(generator.choice("ab") for _ in range(40))
        stop = tuple("".join(generator.choice("ab") for _ in range(generator.randrange(3, 9))) for _ in range(2))
        chunks, stopped = stream(tokenizer, text, stop)
        ends = [text.find(s) for s in stop if s in text]
        if not stopped:
            assert not ends and "".join(chunks) == text
        else:
            given = "".join(chunks)
            assert text.startswith(given) and any(text.startswith(s, len(given)) for s in stop)


def test_stop_strings_before_min_tokens_are_text() -> None:
    tokenizer = Tokenizer.from_folder(folder_of("byte-level"))
    text = "zzQzzQzzQ"
    per_token = [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
    second = len("".join(per_token).split("Q")[0]) + 1
    assert stream(tokenizer, text, ("Q",), may_stop_from=second)[0] != stream(tokenizer, text, ("Q",))[0]
    chunks, stopped = stream(tokenizer, text, ("Q",), may_stop_from=second)
    assert stopped and "".join(chunks) == "zzQzz"
