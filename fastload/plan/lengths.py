"""Learning how a server counts tokens, so that prompts have exactly the length asked for.

Goal. `fit` is given a function that counts whole prompts as the server does, and finds words and sentences
whose costs add up. Prompts are then sums, and no tokenizer is needed here.

Plan. Nearly every tokenizer splits at spaces before it looks for tokens, so behind a space a word costs the
same wherever it stands. That is assumed and tested. A server with a tokenizer to ask (`exact`) is asked about
each word and sentence; one that must generate a token per question gets at most about 40, so words are tested
in groups (n words that add n tokens cost one each) and texts as a whole. A sample of whole prompts is checked
at the end.

Warning. The checked sample uses request numbers from the far end of the opening's range: a prompt that was
counted by generating lies in the server's prefix cache, and a run must not meet it again.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fastload.errors import PlanError
from fastload.plan.prompts import (
    SHORT_WORDS,
    SPELLING_WORDS,
    TINY_WORDS,
    Lengths,
    Piece,
    Text,
    compose,
    mix,
    stride,
)
from fastload.plan.texts import TEXTS

__all__ = ["Count", "Lengths", "ensure", "fit"]

Count = Callable[[Sequence[str]], list[int | None]]
"""Counts prompts as the server does, template included: one number per text, None where it told none."""

MOST_PROBES = 40  # questions to a server that answers each by generating
FEWEST_DISTINCT = 1 << 17  # openings a run must have at least
ENOUGH_DISTINCT = 1 << 24  # no longer opening is sought beyond this
LONGEST_OPENING = 12
MOST_ROUNDS = 24  # of correcting a prompt, before its nearest length is kept
SLACK = 6  # tokens of padding kept for corrections where costs do not add up
FRAME = ("sun", "map")  # the words around a piece while it is measured
_BATCH = 256


def fit(count: Count, isl: int, seed: int, exact: bool) -> Lengths:
    """Learn the costs behind `count` and return the prompts of `isl` tokens each (template included).

    `exact`: a question costs about a millisecond (the server has a tokenizer), else each costs a generation
    and about 40 are asked. Where the server tells no counts, lengths are estimated, `planned` is None and
    `notice` says so. Raises PlanError when `isl` is too small for the template and an opening of its own for
    every request.
    """
    if isl < 1:
        raise PlanError(f"--isl {isl}: a prompt needs at least 1 token")
    asked = _Asked(count)
    base = asked.one(" ".join(FRAME))
    if base is None:
        guess = fit(_rough_count, isl, seed, exact=True)
        notice = (
            "the server tells no prompt_tokens and has no tokenizer to ask: "
            f"prompts of about {isl} tokens, estimated from their words"
        )
        return replace(
            guess,
            planned=None,
            exact=False,
            additive=False,
            method="estimate",
            overhead=0,
            probes=asked.number,
            notice=notice,
        )
    words = _words_one_by_one(asked, base) if exact else _words_in_groups(asked, base)
    if not words:
        raise PlanError(
            f"--isl {isl}: no word was found with a steady cost in tokens at this server; "
            "its counts of prompt tokens do not grow with the prompt"
        )
    lengths = _opening_and_padding(asked, words, isl, seed, exact)
    if exact:
        lengths = replace(lengths, texts=_texts_by_sentence(asked, base, lengths))
        lengths = _checked(asked, lengths, sample=32)
        if not lengths.additive:
            texts = lengths.texts
            lengths = _opening_and_padding(asked, words, isl, seed, exact, slack=SLACK)
            lengths = replace(lengths, texts=_that_fit(texts, lengths))
    else:
        lengths = replace(lengths, texts=_texts_whole(asked, base, lengths))
        lengths = _checked(asked, lengths, sample=2)
        for fewer in (1, 0):  # then one text a prompt, where it was measured; then words alone
            if lengths.additive or not lengths.texts:
                break
            texts = lengths.texts if fewer else ()
            lengths = _checked(asked, replace(lengths, most_units=fewer, texts=texts), sample=2)
    if not lengths.additive:
        said = (
            "each planned prompt is counted and corrected"
            if exact
            else f"prompts may miss --isl {isl} by a few tokens; see prompt_tokens in the rows"
        )
        lengths = replace(lengths, notice=f"this server's token counts do not add up word by word: {said}")
    return replace(lengths, probes=asked.number)


def ensure(lengths: Lengths, requests: Iterable[int], count: Count) -> Lengths:
    """Count the prompts of `requests` and correct those that miss `isl`; returns the corrected Lengths.

    Needed only where `lengths.exact and not lengths.additive`; does nothing where each question costs a
    generation. Prompts that cannot be hit keep their nearest length, and `notice` says how many.
    """
    if not lengths.exact:
        return lengths
    wanted = list(requests)
    corrections = dict(lengths.corrections)
    nearest: dict[int, tuple[int, tuple[int, int]]] = {}  # request -> (tokens off, correction)
    tried: dict[int, set[tuple[int, int]]] = {request: set() for request in wanted}
    missed = wanted
    for _ in range(MOST_ROUNDS):
        trial = replace(lengths, corrections=corrections)
        counts = _in_batches(count, [compose(trial, request) for request in missed])
        asked, missed = missed, []
        for request, tokens in zip(asked, counts, strict=True):
            if tokens is None:
                continue
            off = tokens - lengths.isl
            now = corrections.get(request, (0, 0))
            if request not in nearest or abs(off) < abs(nearest[request][0]):
                nearest[request] = (off, now)
            if off:
                tried[request].add(now)
                corrections[request] = _next_correction(now, off, tried[request], lengths.slack)
                missed.append(request)
        if not missed:
            break
    for request, (_, correction) in nearest.items():
        corrections[request] = correction
    kept = {request: correction for request, correction in corrections.items() if correction != (0, 0)}
    still_off = sum(1 for off, _ in nearest.values() if off)
    notice = lengths.notice
    if still_off:
        notice = f"{still_off} of {len(wanted)} prompts could not be given exactly {lengths.isl} tokens"
    return replace(lengths, corrections=kept, notice=notice)


def _next_correction(
    now: tuple[int, int], off: int, tried: set[tuple[int, int]], slack: int
) -> tuple[int, int]:
    """The untried correction nearest to what `off` asks for: other numbers of words, then other words."""
    wish = now[0] - off
    turn = now[1]
    while True:
        for away in (0, -1, 1, -2, 2):
            tokens = max(-slack, wish + away)
            if (tokens, turn) not in tried:
                return tokens, turn
        turn += 1


class _Asked:
    """A count function that knows how often it was asked."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self.number = 0

    def many(self, texts: Sequence[str]) -> list[int | None]:
        self.number += len(texts)
        return _in_batches(self._count, texts)

    def one(self, text: str) -> int | None:
        return self.many([text])[0]


def _in_batches(count: Count, texts: Sequence[str]) -> list[int | None]:
    counts: list[int | None] = []
    for at in range(0, len(texts), _BATCH):
        counts += count(texts[at : at + _BATCH])
    return counts


# ---- words ----


def _words_one_by_one(asked: _Asked, base: int) -> list[Piece]:
    """Every candidate word measured four times in a row; those whose cost divides by four are steady."""
    candidates = list(dict.fromkeys(SHORT_WORDS + SPELLING_WORDS + TINY_WORDS))
    before, after = FRAME
    four = asked.many([f"{before} {word} {word} {word} {word} {after}" for word in candidates])
    return [
        Piece(word, (tokens - base) // 4)
        for word, tokens in zip(candidates, four, strict=True)
        if tokens is not None and tokens > base and (tokens - base) % 4 == 0
    ]


def _words_in_groups(asked: _Asked, base: int) -> list[Piece]:
    """Words of one token, found by groups; a few words measured singly where there are none."""
    before, after = FRAME
    ones: list[str] = []
    for group in (SHORT_WORDS, SPELLING_WORDS, TINY_WORDS):
        halves: list[tuple[str, ...]] = [group]
        while halves and asked.number < MOST_PROBES // 3 and len(ones) < 24:
            words = halves.pop()
            total = asked.one(f"{before} {' '.join(words)} {after}")
            if total is None:
                continue
            # Each word costs at least one token, so a sum of n means that each costs exactly one.
            if total - base == len(words):
                ones += words
            elif len(words) > 4 and total - base < 1.5 * len(words):
                middle = len(words) // 2
                halves += [words[middle:], words[:middle]]
        if len(ones) >= 24:
            break
    if len(ones) >= 8:
        return [Piece(word, 1) for word in ones]
    # No large vocabulary: single letters and pairs have different costs, so their sums reach every length.
    single = [word for word in ("a", "b", "c", "d", "e", "to", "of", "in", "is") if word not in ones]
    costs = asked.many([f"{before} {word} {word} {after}" for word in single])
    measured = [
        Piece(word, (twice - base) // 2)
        for word, twice in zip(single, costs, strict=True)
        if twice is not None and twice - base >= 2 and (twice - base) % 2 == 0
    ]
    return [Piece(word, 1) for word in ones] + measured


def _opening_and_padding(
    asked: _Asked,
    words: list[Piece],
    isl: int,
    seed: int,
    exact: bool,
    slack: int = 0,
) -> Lengths:
    """Choose words for openings and padding, and measure first words, which have no space before them."""
    words = sorted(words, key=lambda piece: (piece.cost, mix(seed, hash_of(piece.text))))
    cheapest = [piece for piece in words if piece.cost == words[0].cost]
    opening_words = cheapest if len(cheapest) >= 16 else words[:32]
    heads, overhead = _heads(asked, opening_words, words, exact)
    pads, pad_cost, fill, floor = _padding(words)
    head_cost = max(piece.cost for piece in heads)
    word_cost = max(piece.cost for piece in opening_words)
    smallest = 0
    opening = 0
    for number in range(1, LONGEST_OPENING + 1):
        distinct = len(heads) * len(opening_words) ** (number - 1)
        needed = head_cost + (number - 1) * word_cost + floor
        if distinct >= FEWEST_DISTINCT:
            smallest = smallest or needed
            if needed + slack > isl:
                break
            opening = number
            if distinct >= ENOUGH_DISTINCT:
                break
    if not opening and slack and smallest <= isl:  # better a prompt that may be off than none
        return _opening_and_padding(asked, words, isl, seed, exact, slack=max(0, isl - smallest))
    if not opening:
        template = f"the chat template takes {overhead} tokens here and " if overhead > 1 else ""
        raise PlanError(
            f"--isl {isl} is too small: {template}every prompt needs an opening of its own; "
            f"the smallest possible is {smallest}"
        )
    distinct = len(heads) * len(opening_words) ** (opening - 1)
    return Lengths(
        isl=isl,
        seed=seed,
        planned=isl,
        exact=exact,
        additive=False,
        method="tokenizer" if exact else "probes",
        overhead=overhead,
        probes=asked.number,
        heads=tuple(heads),
        words=tuple(opening_words),
        opening=opening,
        distinct=distinct,
        stride=stride(seed, distinct),
        pads=pads,
        pad_cost=pad_cost,
        fill=fill,
        floor=floor,
        slack=slack,
        texts=(),
        most_units=1 << 30,
    )


def hash_of(text: str) -> int:
    """A number from a text, the same in every process (Python's own hash is salted)."""
    return int.from_bytes(text.encode()[:8], "little")


def _heads(
    asked: _Asked, opening_words: list[Piece], words: list[Piece], exact: bool
) -> tuple[list[Piece], int]:
    """First words with their cost, template included, and the template's own tokens."""
    known = words[0]
    some = opening_words if exact else opening_words[:8]
    totals = asked.many([f"{piece.text} {known.text}" for piece in some])
    heads = [Piece(p.text, t - known.cost) for p, t in zip(some, totals, strict=True) if t is not None]
    if not heads:
        raise PlanError("--isl: the server stopped telling prompt_tokens while prompts were measured")
    lowest = min(piece.cost for piece in heads)
    cheapest = [piece for piece in heads if piece.cost == lowest]
    overhead = max(0, lowest - min(piece.cost for piece in some))
    return (cheapest if len(cheapest) >= 4 else heads), overhead


def _padding(words: list[Piece]) -> tuple[tuple[str, ...], int, tuple[str | None, ...], int]:
    """(padding words of one cost, that cost, fill table, floor): see Lengths."""
    cost = words[0].cost
    pads = tuple(piece.text for piece in words if piece.cost == cost)
    if cost == 1:
        return pads, 1, ("", pads[0]), 0
    by_cost = {piece.cost: piece.text for piece in reversed(words)}
    size = 8 * max(by_cost) + 1
    table: list[str | None] = [""] + [None] * size
    for tokens in range(1, size + 1):
        for step, word in by_cost.items():
            rest = table[tokens - step] if step <= tokens else None
            if rest is not None:
                table[tokens] = f"{rest} {word}".strip()
                break
    floor = next(
        (f for f in range(size - cost) if all(text is not None for text in table[f:])),
        0,  # some lengths cannot be hit at all (every cost is even, say): the nearest below is taken
    )
    return pads, cost, tuple(table[: floor + cost + 1]), floor


# ---- sentences ----


def _texts_by_sentence(asked: _Asked, base: int, lengths: Lengths) -> tuple[Text, ...]:
    """Every sentence measured, once inside and once at the end of a prompt; a text ends before the first
    sentence that has no steady cost.
    """
    before, after = FRAME
    flat = [sentence for text in TEXTS for sentence in text]
    twice = asked.many([f"{before} {sentence} {after} {sentence}" for sentence in flat])
    costs = {
        sentence: (tokens - base) // 2
        for sentence, tokens in zip(flat, twice, strict=True)
        if tokens is not None and tokens > base and (tokens - base) % 2 == 0
    }
    texts = []
    for text in TEXTS:
        sentences = []
        for sentence in text:
            if sentence not in costs:
                break
            sentences.append(Piece(sentence, costs[sentence]))
        if sentences:
            texts.append(_text(sentences))
    return _that_fit(texts, lengths)


def _texts_whole(asked: _Asked, base: int, lengths: Lengths) -> tuple[Text, ...]:
    """A seeded dozen of texts, each cut to what the prompt has room for, measured as one piece at the end."""
    room = _room(lengths)
    order = sorted(range(len(TEXTS)), key=lambda at: mix(lengths.seed, at))
    before, after = FRAME
    rate = 1.2  # tokens per word or mark; corrected after every answer
    texts: list[Text] = []
    for at in order:
        if len(texts) == 12 or asked.number >= MOST_PROBES - 6:
            break
        text = _cut(TEXTS[at], room / rate)
        if text is None:
            continue
        total = asked.one(f"{before} {after} {text}")
        if total is None or total <= base:
            continue
        rate = max(rate, (total - base) / _marks(text))
        if total - base <= room:
            texts.append(_text([Piece(text, total - base)]))
    return _that_fit(texts, lengths)


def _cut(text: tuple[str, ...], marks: float) -> str | None:
    """The first sentences of a text, of at most so many words and marks; None if not even one."""
    for number in range(len(text), 0, -1):
        joined = " ".join(text[:number])
        if _marks(joined) <= marks:
            return joined
    return None


def _text(sentences: list[Piece]) -> Text:
    whole = Piece(" ".join(piece.text for piece in sentences), sum(piece.cost for piece in sentences))
    return Text(tuple(sentences), whole)


def _room(lengths: Lengths) -> int:
    """Tokens left for sentences behind the dearest opening."""
    opening = max(p.cost for p in lengths.heads) + (lengths.opening - 1) * max(p.cost for p in lengths.words)
    return lengths.isl - opening - lengths.floor - lengths.slack


def _that_fit(texts: Sequence[Text], lengths: Lengths) -> tuple[Text, ...]:
    room = _room(lengths)
    return tuple(text for text in texts if text.sentences[0].cost <= room)


# ---- checking ----


def _checked(asked: _Asked, lengths: Lengths, sample: int) -> Lengths:
    """Count whole prompts from the far end of the openings; `additive` where all have `isl` tokens."""
    requests = range(lengths.distinct - sample, lengths.distinct)
    counts = asked.many([compose(lengths, request) for request in requests])
    return replace(lengths, additive=all(tokens == lengths.isl for tokens in counts))


def _marks(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def _rough_count(texts: Sequence[str]) -> list[int | None]:
    """Words and punctuation marks: what a large vocabulary gives, about, without a template."""
    return [_marks(text) for text in texts]
