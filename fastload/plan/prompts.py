"""Composing the prompt of each request from pieces whose cost in tokens is known.

A prompt is: an opening of a few words that no other request of the run has (so that no prefix cache can
help), then padding words, then sentences of one or more texts. The padding stands before the sentences, so
that what the model reads last is the question and not a heap of words. Everything is a function of (seed,
request): no state, no randomness, the same on every machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

# Short plain words. With every vocabulary of 30k tokens or more these cost one token each behind a space.
SHORT_WORDS: tuple[str, ...] = tuple(
    "sun map sea air ice oil tea dog cat cow fox egg arm leg eye ear hat cap bag box cup pan pot pen key bed "
    "bus jet law tax job art bar bay bow bug day dry end fan far fit fly fun gap gas hot ink joy kit lab "
    "lot low mix net new old one own pay pin raw red row run set sky ten tip top toy two war way web "
    "win yet".split()
)
# Words of the spelling alphabet: whole tokens in some very small vocabularies.
SPELLING_WORDS: tuple[str, ...] = tuple(
    "alpha bravo charlie delta echo foxtrot golf hotel india kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu juliet".split()
)
# The last resort, for vocabularies that are little more than an alphabet.
TINY_WORDS: tuple[str, ...] = tuple(
    "a b c d e f g h i j k l m n o p q r s t u v w x y z to of in is it at on by 1 7".split()
)

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def mix(seed: int, number: int) -> int:
    """A well spread 64-bit integer from (seed, number): one round of splitmix64."""
    z = (seed * 0xD1342543DE82EF95 + (number + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Piece(NamedTuple):
    """A word or a sentence and what it adds to a prompt, in tokens as the server counts them."""

    text: str
    cost: int


class Text(NamedTuple):
    """Sentences to be taken in order, and all of them joined (long prompts take whole texts at once)."""

    sentences: tuple[Piece, ...]
    whole: Piece


@dataclass(frozen=True, slots=True)
class Lengths:
    """What was learned about how a server counts, and with it the prompts: plain data, picklable.

    `planned` is the number of tokens each prompt has (None: the server tells no counts, so nothing is
    promised). `exact` says that counting is cheap at this server (it has a tokenizer to ask), `additive` that
    a sample of whole prompts had exactly `isl` tokens. `corrections` maps a request to (tokens of padding to
    add or leave out, places by which the padding words are moved on); `fastload.plan.lengths.ensure` fills
    it where costs do not simply add up. `notice` is one sentence for the user.
    """

    isl: int
    seed: int
    planned: int | None
    exact: bool
    additive: bool
    method: str  # "tokenizer", "probes" or "estimate"
    overhead: int  # tokens of the chat template, start token included
    probes: int  # texts counted to learn all this
    heads: tuple[Piece, ...]  # first words; their cost includes the overhead
    words: tuple[Piece, ...]  # the other words of an opening
    opening: int  # words in an opening, the first included
    distinct: int  # openings there are; request numbers wrap around after so many
    stride: int  # coprime to `distinct`: the step from one request's opening to the next one's
    pads: tuple[str, ...]  # padding words, each of the cost `pad_cost`
    pad_cost: int
    fill: tuple[str | None, ...]  # fill[r]: words that cost exactly r tokens; None where there are none
    floor: int  # every remainder from here on can be filled exactly
    slack: int  # padding always left for corrections, in tokens
    texts: tuple[Text, ...]
    most_units: int  # sentences a prompt may hold
    corrections: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    notice: str | None = None

    def prompt(self, request: int) -> str:
        """The prompt of request number `request` (0 ..); deterministic in (seed, request)."""
        return compose(self, request)


def compose(lengths: Lengths, request: int) -> str:
    """Opening, padding, sentences; together `isl` tokens by the learned costs."""
    heads, words = lengths.heads, lengths.words
    # An affine walk over all openings: a bijection, so no two of `distinct` requests share one, and
    # neighbours already differ in the first word.
    place = (request * lengths.stride + mix(lengths.seed, -1)) % lengths.distinct
    place, digit = divmod(place, len(heads))
    head, room = heads[digit]
    room = lengths.isl - room
    parts = [head]
    for _ in range(lengths.opening - 1):
        place, digit = divmod(place, len(words))
        word, cost = words[digit]
        parts.append(word)
        room -= cost
    room -= lengths.slack
    draw = mix(lengths.seed, request)
    asked: list[str] = []
    if lengths.texts:
        room = _take_sentences(lengths, draw, room, asked)
    more, turn = lengths.corrections.get(request, (0, 0))
    _pad(lengths, (draw >> 16) + turn, room + lengths.slack + more, parts)
    parts += asked
    return " ".join(parts)


def _take_sentences(lengths: Lengths, draw: int, room: int, into: list[str]) -> int:
    """Whole texts while they fit, then the first sentences of the next; returns the tokens left."""
    texts, floor, fill = lengths.texts, lengths.floor, lengths.fill
    units_left = lengths.most_units
    at = draw % len(texts)
    while units_left > 0:
        sentences, whole = texts[at]
        left = room - whole.cost
        if len(sentences) <= units_left and (left >= floor or (left >= 0 and fill[left] is not None)):
            into.append(whole.text)
            room = left
            units_left -= len(sentences)
            at = (at + 1) % len(texts)
            continue
        for text, cost in sentences[:units_left]:
            left = room - cost
            if left < floor and (left < 0 or fill[left] is None):
                break
            into.append(text)
            room = left
        break
    return room


def _pad(lengths: Lengths, draw: int, room: int, into: list[str]) -> None:
    """Words that cost `room` tokens together (the nearest below where no sum of words hits it)."""
    if room <= 0:
        return
    many = max(0, (room - lengths.floor) // lengths.pad_cost)
    rest = room - many * lengths.pad_cost
    pads = lengths.pads
    if many:
        at = draw % len(pads)
        into += (pads * (2 + many // len(pads)))[at : at + many]
    if rest:
        while rest and lengths.fill[rest] is None:
            rest -= 1
        words = lengths.fill[rest]
        if words:
            into.append(words)


def stride(seed: int, distinct: int) -> int:
    """A step coprime to `distinct`, near the golden section of it, so that neighbours land far apart."""
    step = int(distinct * 0.6180339887) + mix(seed, -2) % max(1, distinct // 8)
    step = max(step % distinct, 1)
    while gcd(step, distinct) != 1:
        step += 1
    return step
