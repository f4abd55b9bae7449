"""Chat templates in their helper process: hostile ones, broken ones, and the process itself.

That good ones render as with transformers is in ``test_tokenizer.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.common.errors import CheckpointError, RequestError
from runtime.text.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "Hello"}]


def test_the_date_is_known_to_templates(tmp_path: Path) -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", tmp_path, {})
    assert template.render(CHAT) in (str(datetime.now().year - 1), str(datetime.now().year))
    template.close()


@pytest.fixture
def template_path(tmp_path: Path) -> Path:
    return tmp_path / "chat_template.jinja"


def rendering_error(source: str, path: Path, messages: Sequence[Any] = CHAT) -> RequestError | CheckpointError:
    template = ChatTemplate(source, path, {}, seconds=1.0)
    with pytest.raises((RequestError, CheckpointError)) as caught:
        template.render(messages)
    template.close()
    assert isinstance(caught.value, (RequestError, CheckpointError))
    return caught.value


DOUBLED = "{% set s = s ~ s %}" * 60
NESTED = "{% set t = [t, t] %}{% set u = [u, u] %}" * 60


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 'a'.ljust(10 ** 11) }}",
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{% set s = 'a' * 999 %}" + DOUBLED + "{{ s }}",
        "{% set t = [1] %}{% set u = [1] %}" + NESTED + "{{ t == u }}",
        "{% macro m(n) %}{{ m(n - 1) }}{{ m(n - 1) }}{% endmacro %}{{ m(3) }}",
    ],
    ids=["range", "loops", "power", "string", "padding", "output", "doubling", "comparison", "recursion"],
)
def test_a_hostile_template_ends_in_an_error(source: str, template_path: Path) -> None:
    error = rendering_error(source, template_path)
    assert isinstance(error, RequestError)
    assert str(template_path) in str(error)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "not allowed"),
        ("{{ messages.append(1) }}", "not allowed"),
        ("{% set n = namespace() %}{% set n.__init__ = 1 %}", "underscore"),
        ("{{ cycler.__init__.__globals__.os.system('touch canary') }}", "not allowed"),
        ("{% include 'secrets' %}", ""),
        ("one\ntwo {% if %}", "line 2"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
    ],
)
def test_says_what_is_wrong_with_a_template(source: str, message: str, template_path: Path) -> None:
    error = rendering_error(source, template_path)
    assert str(template_path) in str(error) and message in str(error)
    forbidden = message in ("not allowed", "underscore", "line 2")
    assert isinstance(error, CheckpointError) == forbidden


@pytest.mark.parametrize("messages", [[{"role": "user", "content": object()}], [{"content": {1, 2}}]])
def test_messages_have_to_be_json(messages: list[Any], template_path: Path) -> None:
    assert "plain JSON" in str(rendering_error("x", template_path, messages))


def test_an_error_leaves_the_template_usable_and_close_ends_the_helper(template_path: Path) -> None:
    before = psutil.Process().children()
    template = ChatTemplate("{{ messages[0].content + '!' }}", template_path, {})
    with pytest.raises(RequestError):
        template.render([{"role": "user"}])
    assert template.render([{"content": "hi"}]) == "hi!"
    [helper] = [child for child in psutil.Process().children() if child not in before]
    helper.kill()
    with pytest.raises(RequestError, match=r"chat_template.jinja ended with -9"):
        template.render([{"content": "hi"}])
    assert template.render([{"content": "again"}]) == "again!"
    template.close()
    template.close()
    assert psutil.Process().children() == before
