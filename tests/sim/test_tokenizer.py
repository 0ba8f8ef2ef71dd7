"""The simulated engine's tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.sim.tokenizer import chat_ids, chat_tokens, pieces, text_ids


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("hello world", ["hello", " world"]),
        ("strengthening", ["strength", "ening"]),
        ("in 12345.", ["in", " 123", "45", "."]),
        ("a  b\n", ["a", " ", " b", "\n"]),
        ("naïve 世界", ["naïve", " 世界"]),
        ("snake_case", ["snake", "_", "case"]),
    ],
)
def test_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@given(st.lists(st.text()), st.booleans())
def test_ids_are_as_many_as_counted(contents: list[str], opening: bool) -> None:
    assert len(chat_ids(contents, opening)) == chat_tokens(contents, opening)


def test_same_piece_same_id() -> None:
    assert text_ids("one two one")[0] != text_ids("one two one")[2]  # "one" and " one" are two pieces
    assert text_ids(" one two one")[0] == text_ids(" one two one")[2]
