"""Prompts of exactly the length asked for, whatever the tokenizer: several kinds of it, asked both ways."""

import pickle
import re
import zlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import PlanError
from fastload.plan import Lengths, ensure, fit
from fastload.plan.prompts import SHORT_WORDS, SPELLING_WORDS
from fastload.plan.texts import TEXTS

TEMPLATE = 9
SAMPLE = 300


def by_spaces(text: str) -> int:
    return len(text.split())


def by_letters(text: str) -> int:
    return len(text)


def by_fours(text: str) -> int:
    return -(-len(text) // 4)


def by_pieces(text: str) -> int:
    """Like a large vocabulary: a short word behind its space is one token, a longer one one or two."""
    pieces = re.findall(r" ?\w+| ?[^\w\s]", text)
    return sum(1 if len(p) <= 7 or zlib.crc32(p.encode()) % 3 else 2 for p in pieces)


def by_small_pieces(text: str) -> int:
    """Like a small vocabulary: spelling words are whole, the rest falls into pairs of letters."""
    pieces = re.findall(r" ?\w+| ?[^\w\s]", text)
    return sum(1 if p.strip() in SPELLING_WORDS else -(-len(p) // 2) for p in pieces)


def across_spaces(text: str) -> int:
    """Some neighbours melt into one token, so that costs do not add up."""
    words = re.findall(r"\w+|[^\w\s]", text)
    return len(words) - sum(
        zlib.crc32(f"{a} {b}".encode()) % 7 == 0 for a, b in zip(words, words[1:], strict=False)
    )


ADDITIVE = [by_spaces, by_letters, by_pieces, by_small_pieces]
ALL = [*ADDITIVE, by_fours, across_spaces]


class Server:
    """Counts with its template, and remembers how much and what it was asked."""

    def __init__(self, tokens: Callable[[str], int], template: int = TEMPLATE) -> None:
        self.tokens, self.template = tokens, template
        self.asked: list[str] = []

    def count(self, texts: Sequence[str]) -> list[int | None]:
        self.asked += texts
        return [self.tokens(text) + self.template for text in texts]


def lengths_seen(server: Server, lengths: Lengths, number: int = SAMPLE) -> set[int | None]:
    return set(server.count([lengths.prompt(request) for request in range(number)]))


@pytest.mark.parametrize("isl", [48, 128, 500, 3000])
@pytest.mark.parametrize("tokens", ADDITIVE)
@pytest.mark.parametrize("exact", [True, False])
def test_additive_tokenizers_are_hit_exactly(tokens: Callable[[str], int], exact: bool, isl: int) -> None:
    server = Server(tokens)
    lengths = fit(server.count, isl, 5, exact)
    assert lengths.planned == isl and lengths.notice is None
    assert lengths.probes == len(server.asked)
    if not exact:
        assert len(server.asked) <= 40
    assert lengths_seen(server, lengths) == {isl}


@pytest.mark.parametrize("isl", [48, 128, 500])
@pytest.mark.parametrize("tokens", [by_fours, across_spaces])
def test_the_others_are_hit_exactly_after_ensure(tokens: Callable[[str], int], isl: int) -> None:
    server = Server(tokens)
    lengths = fit(server.count, isl, 5, True)
    if not lengths.additive:
        assert lengths.notice
        lengths = ensure(lengths, range(SAMPLE), server.count)
    assert lengths_seen(server, lengths) == {isl}
    again = ensure(lengths, range(SAMPLE), server.count)
    assert again.corrections == lengths.corrections


@pytest.mark.parametrize("isl", [48, 128])
def test_four_letters_a_token_by_probing(isl: int) -> None:
    server = Server(by_fours)
    lengths = fit(server.count, isl, 5, False)
    assert len(server.asked) <= 40
    assert lengths_seen(server, lengths) == {isl}


def test_a_server_whose_counts_do_not_add_up_says_so_when_probed() -> None:
    server = Server(across_spaces)
    lengths = fit(server.count, 128, 5, False)
    assert len(server.asked) <= 45
    assert not lengths.additive and lengths.notice and "--isl 128" in lengths.notice
    assert ensure(lengths, range(10), server.count) is lengths  # asking would cost generations
    assert all(abs((tokens or 0) - 128) < 30 for tokens in lengths_seen(server, lengths))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from(ADDITIVE),
    exact=st.booleans(),
    isl=st.integers(1, 700),
    template=st.integers(0, 60),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_length_is_hit_or_refused(
    tokens: Callable[[str], int], exact: bool, isl: int, template: int, seed: int
) -> None:
    server = Server(tokens, template)
    try:
        lengths = fit(server.count, isl, seed, exact)
    except PlanError as error:
        smallest = int(str(error).rpartition(" ")[2])
        assert str(error).startswith(f"--isl {isl} ") and smallest > isl
        assert lengths_seen(server, fit(server.count, smallest, seed, exact), 50) == {smallest}
    else:
        assert lengths_seen(server, lengths, 50) == {isl}


def test_a_length_below_the_template_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^--isl 9 is too small: the chat template takes 9 tokens .* 12$"):
        fit(Server(by_spaces).count, 9, 1, True)
    with pytest.raises(PlanError, match="^--isl 0"):
        fit(Server(by_spaces).count, 0, 1, True)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tokens", ALL)
def test_prompts_are_distinct_from_the_first_words(tokens: Callable[[str], int], exact: bool) -> None:
    lengths = fit(Server(tokens).count, 64, 11, exact)
    assert lengths.distinct >= 1 << 17
    openings = {tuple(lengths.prompt(request).split()[: lengths.opening]) for request in range(100_000)}
    assert len(openings) == 100_000
    firsts = [lengths.prompt(request).split()[0] for request in range(1000)]
    assert max(map(firsts.count, set(firsts))) < 1000 / 3  # no word leads most prompts


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    one, same, other = (fit(Server(by_pieces).count, 128, seed, True) for seed in (1, 1, 2))
    prompts = [one.prompt(request) for request in range(500)]
    assert prompts == [same.prompt(request) for request in range(500)]
    assert not set(prompts) & {other.prompt(request) for request in range(500)}
    thawed = pickle.loads(pickle.dumps(one))
    assert thawed == one and [thawed.prompt(request) for request in range(500)] == prompts


@pytest.mark.parametrize("exact", [True, False])
def test_whole_prompts_asked_while_learning_are_not_those_of_the_run(exact: bool) -> None:
    server = Server(by_pieces)
    lengths = fit(server.count, 128, 3, exact)
    assert not set(server.asked) & {lengths.prompt(request) for request in range(20_000)}


def test_a_long_enough_prompt_ends_with_a_request_for_a_long_answer() -> None:
    lengths = fit(Server(by_pieces).count, 128, 3, True)
    sentences = {sentence for text in TEXTS for sentence in text}
    for request in range(100):
        prompt = lengths.prompt(request)
        assert any(text[0] in prompt for text in TEXTS)
        assert any(prompt.endswith(sentence) for sentence in sentences)


def test_a_server_without_counts_gets_estimated_lengths_and_a_notice() -> None:
    lengths = fit(lambda texts: [None] * len(texts), 128, 3, False)
    assert lengths.planned is None and lengths.notice and lengths.method == "estimate"
    assert len({lengths.prompt(request) for request in range(1000)}) == 1000
    assert 60 < len(lengths.prompt(0).split()) <= 128


def test_a_server_that_always_tells_the_same_count_is_refused() -> None:
    for exact in (True, False):
        with pytest.raises(PlanError, match="^--isl 128: no word"):
            fit(lambda texts: [7] * len(texts), 128, 3, exact)


def test_the_texts_are_plain() -> None:
    assert len(TEXTS) >= 30 and len({text[0] for text in TEXTS}) == len(TEXTS)
    for sentence in (sentence for text in TEXTS for sentence in text):
        assert sentence.isascii() and sentence.isprintable() and sentence.endswith(".")
        assert not set("[]<>{}|") & set(sentence) and "  " not in sentence
    assert len(set(SHORT_WORDS)) == len(SHORT_WORDS) and all(len(word) == 3 for word in SHORT_WORDS)
