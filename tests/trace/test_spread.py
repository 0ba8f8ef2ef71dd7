"""Tokens per event: facts worked out by hand, and that every spread sums to what was told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.trace.spread import Spread, spread


def of_one(
    sizes: list[int],
    total: int,
    *,
    told: list[int] | None = None,
    finish: int | None = None,
    stopped: bool = False,
    estimated: bool = False,
) -> Spread:
    """One request: bytes of text per event (0 = no text), counts told per event, the event that finishes."""
    n = len(sizes)
    return spread(
        np.zeros(n, np.int64),
        1,
        np.array(sizes) > 0,
        np.array(sizes, np.int64),
        np.array(told or [-1] * n, np.int64),
        np.array([i == finish for i in range(n)]),
        np.array([total]),
        np.array([told is not None]),
        np.array([estimated]),
        np.array([stopped]),
    )


@pytest.mark.parametrize(
    ("case", "events", "divisor", "exact"),
    [
        # one token an event; the end token of a stop has no event: it stands at the finish
        (dict(sizes=[0, 5, 5, 5, 0, 0], total=3, finish=4, stopped=True), [0, 1, 1, 1, 0, 0], 2, True),
        (dict(sizes=[0, 5, 5, 5, 0, 0], total=4, finish=4, stopped=True), [0, 1, 1, 1, 1, 0], 2, True),
        # the same without `stop`: n - 1, and it is an estimate
        (dict(sizes=[0, 5, 5, 5, 0, 0], total=4, finish=4), [0, 2, 1, 1, 0, 0], 3, False),
        # bundled: one each, the rest by bytes
        (dict(sizes=[2, 6], total=6), [2, 4], 5, False),
        (dict(sizes=[1, 1, 1], total=5), [2, 2, 1], 4, False),
        # more events than tokens
        (dict(sizes=[1, 1, 1, 1], total=2), [1, 1, 0, 0], 1, False),
        # M09: continuous usage says 1, 4, 6
        (dict(sizes=[1, 6, 4, 0], total=6, told=[1, 4, 6, 6]), [1, 3, 2, 0], 5, True),
        # continuous usage with a hole: the three tokens of two events go by bytes
        (dict(sizes=[1, 3, 3, 4], total=6, told=[1, -1, 4, 6]), [1, 2, 1, 2], 5, True),
        # the end token after the last told count stands where the answer ended
        (dict(sizes=[1, 4, 0, 0], total=4, told=[1, 3, -1, -1], finish=2), [1, 2, 1, 0], 2, True),
        # a server whose counts go back
        (dict(sizes=[1, 1, 1], total=3, told=[2, 1, 3]), [2, 0, 1], 1, True),
        # told beyond the final count
        (dict(sizes=[1, 1], total=3, told=[1, 9]), [1, 2], 2, True),
        # only an end token
        (dict(sizes=[0, 0], total=1, finish=0, stopped=True), [1, 0], 0, False),
        # one text event: no interval
        (dict(sizes=[9], total=9), [9], 0, False),
        (dict(sizes=[9, 9], total=2, estimated=True), [1, 1], 1, False),
        # nothing known
        (dict(sizes=[0, 0], total=-1), [0, 0], 0, True),
    ],
)
def test_known(case: dict[str, Any], events: list[int], divisor: int, exact: bool) -> None:
    found = of_one(**case)
    assert found.events.tolist() == events
    assert (found.divisor.tolist(), found.exact.tolist()) == ([divisor], [exact])


def test_a_hundred_megabytes_in_one_event_do_not_overflow() -> None:
    found = of_one([2**31 - 1, 1, 2**31 - 1], 2**31 - 1)
    assert found.events.sum() == 2**31 - 1
    assert found.events.min() >= 1


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=0, max_size=12),  # bytes
        st.integers(-1, 40),  # n
        st.booleans(),  # told
        st.booleans(),  # stop
        st.data(),
    ),
    max_size=5,
)


@given(requests)
def test_every_request_sums_exactly(cases: list[Any]) -> None:
    group, size, told, finish = [], [], [], []
    for i, (sizes, _, _, _, data) in enumerate(cases):
        group += [i] * len(sizes)
        size += sizes
        told += [data.draw(st.integers(-1, 45)) for _ in sizes]
        finish += [data.draw(st.booleans()) for _ in sizes]
    total = np.array([n for _, n, _, _, _ in cases], np.int64)
    by_told = np.array([flag for _, _, flag, _, _ in cases], np.bool_)
    stopped = np.array([flag for _, _, _, flag, _ in cases], np.bool_)
    found = spread(
        np.array(group, np.int64),
        len(cases),
        np.array(size, np.int64) > 0,
        np.array(size, np.int64),
        np.array(told, np.int64),
        np.array(finish, np.bool_),
        total,
        by_told,
        np.zeros(len(cases), np.bool_),
        stopped,
    )
    assert (found.events >= 0).all()
    for i, (sizes, n, _, _, _) in enumerate(cases):
        mine = found.events[np.array(group, np.int64) == i]
        assert mine.sum() == (max(n, 0) if sizes else 0)
        texts = [tokens for tokens, one in zip(mine, sizes, strict=True) if one]
        if not by_told[i] and n > len(texts):
            assert all(tokens >= 1 for tokens in texts)
