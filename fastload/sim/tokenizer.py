"""A small real tokenizer: words, numbers and punctuation in pieces; joined again, the pieces are the text.

It stands in for a model's own. Like a BPE vocabulary it keeps a word's leading space with the word and cuts
long words, so a client that wants a prompt of N tokens has to ask or to probe, as with a real server.
"""

import re
import zlib
from collections.abc import Sequence

LONGEST = 8  # letters in one piece; a longer word becomes several

_PIECE = re.compile(
    rf" ?[^\W\d_]{{1,{LONGEST}}}"  # letters, the space before them included
    r"| ?\d{1,3}"  # digits by threes
    r"| ?[^\w\s]"  # one mark of punctuation
    r"|_|\s"  # an underscore; whatever white space is left, one by one
)

# The chat template: a message is <start> role <separator> content <end>; an answer opens with three of these.
MESSAGE_TOKENS = 4
OPENING_TOKENS = 3

_VOCABULARY = 50_000


def pieces(text: str) -> list[str]:
    """The text cut into tokens. `"".join(pieces(text)) == text`."""
    return _PIECE.findall(text)


def chat_tokens(contents: Sequence[str], opening: bool = True) -> int:
    """Tokens of a conversation (one string a message) with its template, and with the answer's opening."""
    total = sum(len(pieces(content)) + MESSAGE_TOKENS for content in contents)
    return total + OPENING_TOKENS if opening else total


def chat_pieces(contents: Sequence[str]) -> list[str]:
    """The tokens of a conversation as texts, template and opening included: `len` of it is `chat_tokens`."""
    tokens: list[str] = []
    for content in contents:
        tokens += ["<start>", "<role>", "<separator>", *pieces(content), "<end>"]
    return [*tokens, "<start>", "<role>", "<separator>"]


def chat_ids(contents: Sequence[str], opening: bool = True) -> list[int]:
    """Token ids of a conversation with its template: `len(chat_ids(x)) == chat_tokens(x)`."""
    ids: list[int] = []
    for content in contents:
        ids += [0, 1, 2, *text_ids(content), 3]
    return ids + [0, 1, 2] if opening else ids


def text_ids(text: str) -> list[int]:
    """Token ids of plain text, without a template; the same piece has the same id everywhere."""
    return [16 + zlib.crc32(piece.encode()) % (_VOCABULARY - 16) for piece in pieces(text)]
