"""Secrets in texts: every form in which a server or a library may give one back, and nothing else, is replaced."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.load import hiding
from fastload.load.hiding import clean_environment, hidden, hide, hide_start, protect, protected

KEY = "sk-e2e/4f1d0c2b+9a&8e7d="


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """What is protected in a test is so there only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hiding, "_secrets", set())
        patched.setattr(hiding, "_forms", set())
        patched.setattr(hiding, "_pattern", None)
        yield


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "form",
    [
        KEY,
        quote(KEY),
        quote(KEY, safe=""),
        quote_plus(KEY),
        quote(KEY, safe="").replace("%2F", "%2f").replace("%2B", "%2b").replace("%3D", "%3d").replace("%26", "%26"),
        json.dumps(KEY)[1:-1],
        KEY.replace("/", "\\/"),
        html.escape(KEY),
        b64(KEY),
        base64.urlsafe_b64encode(KEY.encode()).decode(),
    ],
)
def test_a_form_of_a_key(form: str) -> None:
    protect(KEY)
    assert hide(f"bad key {form}, sorry") in ("bad key ***, sorry", "bad key ***=, sorry", "bad key ***==, sorry")
    assert hide("nothing of it") == "nothing of it"


@pytest.mark.parametrize("before", ["", "u", "us", "user:", "Bearer "])
def test_a_key_inside_a_longer_base64_text(before: str) -> None:
    """Of the characters at its ends, which hold bits of its neighbours too, one or two are left at most."""
    protect(KEY)
    text = b64(f"{before}{KEY}:and more")
    assert "***" in hide(text)
    assert all(b64(KEY)[at : at + 4] not in hide(text) for at in range(0, 20, 4))


def test_what_is_inside_a_header() -> None:
    protect(f"Basic {b64('joe:hunter22')}")
    assert hide(f"{b64('joe:hunter22')} joe:hunter22 hunter22") == "*** *** ***"
    assert hide("joe") == "joe"
    protect("Token abcdefgh-1")
    assert hide("abcdefgh-1") == "***"
    protect("session=s3ss10n-id; theme=dark-mode")
    assert hide("s3ss10n-id, dark-mode") == "***, ***"
    protect("proxyuser:pr0xy%40word")
    assert hide("pr0xy%40word, pr0xy@word, proxyuser") == "***, ***, proxyuser"


def test_a_short_key_is_hidden_as_a_word_and_a_shorter_one_not_at_all() -> None:
    protect("test")
    assert hide("a test: 'test', testing, latest") == "a ***: '***', testing, latest"
    protect("abc")
    assert hide("abc") == "abc"


def test_the_start_of_a_text() -> None:
    protect(KEY)
    assert hide_start("x" * 1000, 500) == "x" * 500
    assert hide_start("short", 500) == "short"
    for at in range(470, 505):  # across the cut
        shown = hide_start("x" * at + KEY + "y" * 5000, 500)
        assert len(shown) <= 500 and not any(part in shown for part in ("sk-", "4f1d", "e2e"))
    repeated = hide_start(KEY * 1000, 500)
    assert repeated.strip("*") == ""


TYPED = st.text("0123456789abcdefXYZ-_+/=:;.%&<\"' ", min_size=8, max_size=40)


@given(st.text(max_size=60), st.text(max_size=60), TYPED)
def test_whatever_the_key_is(before: str, after: str, key: str) -> None:
    key = key.strip()
    if len(key) < hiding.WORD:
        return
    hiding._forms.clear()
    protect(key)
    for form in (key, quote(key, safe=""), json.dumps(key)[1:-1]):
        assert form not in hide(before + form + after).replace("***", "\0")


def test_a_json_value() -> None:
    protect(KEY)
    value = {"a": [KEY, 1, None, True, (f"x{KEY}",)], KEY: {"b": 1.5}}
    assert hidden(value) == {"a": ["***", 1, None, True, ["x***"]], "***": {"b": 1.5}}


def test_the_environment_of_a_child() -> None:
    environment = {"FASTLOAD_API_KEY": KEY, "OPENAI_API_KEY": KEY, "AUTH": f"Bearer {KEY}", "PATH": "/bin"}
    assert clean_environment(environment) == environment
    protect(KEY)
    assert clean_environment(environment) == {"PATH": "/bin"}
    assert protected() == [KEY]
