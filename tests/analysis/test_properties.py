"""What must hold of any trace: order, halves, scale and the stamps themselves change no figure they should not."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.analysis import percentiles, rows
from fastload.analysis.levels import DISTRIBUTIONS, level_figures
from fastload.analysis.percentiles import distribution

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@st.composite
def loops(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A closed loop of one to four slots: each request as slot, sent, gaps between its events, how it ended (ns)."""
    found = []
    for slot in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, 50))
        for _ in range(draw(st.integers(1, 6))):
            gaps = draw(st.lists(st.integers(1, 2_000_000), min_size=1, max_size=8))
            tokens = draw(st.lists(st.integers(1, 4), min_size=len(gaps), max_size=len(gaps)))
            ok = draw(st.sampled_from([True, True, True, False]))
            role = draw(st.sampled_from(["measured", "measured", "warmup", "fill"]))
            tail = draw(st.integers(0, 1000))
            found.append(
                {
                    "slot": slot, "sent": at, "gaps": gaps, "tokens": tokens, "ok": ok,
                    "role": role, "tail": tail,
                }
            )  # fmt: skip
            at += sum(gaps) + tail + draw(st.integers(0, 1000))
    return found


def trace(make: Any, drawn: list[dict[str, Any]], scale: int = 1) -> tuple[pa.Table, pa.Table]:
    """The tables of a drawn loop, all its times multiplied by `scale`; stamps exact to the nanosecond."""
    requests = []
    for each in drawn:
        offsets = (np.cumsum(each["gaps"]) * scale).tolist()
        events = [make.event(at / 1e6, n) for at, n in zip(offsets, each["tokens"], strict=True)]
        sent = each["sent"] * scale
        done = sent + offsets[-1] + each["tail"] * scale
        status = "ok" if each["ok"] else "reset"
        requests.append(make.request(sent / 1e6, done / 1e6, events, each["slot"], each["role"], status))
    return make.tables(requests)


def same(one: Any, other: Any, rel: float = 1e-9) -> None:
    """Assert that two figures, or trees of them, are equal but for the order of additions."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key], rel)
    elif isinstance(one, float) or isinstance(other, float):
        assert (one is None) == (other is None)
        assert one is None or math.isclose(one, other, rel_tol=rel, abs_tol=1e-9), (one, other)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b, rel)
    else:
        assert one == other


@RELAXED
@given(drawn=loops(), random=st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(make: Any, drawn: list[dict[str, Any]], random: Any) -> None:
    requests, tokens = trace(make, drawn)
    facts = make.facts(len({each["slot"] for each in drawn}))
    shuffled = [list(range(requests.num_rows)) for _ in range(2)]
    for order in shuffled:
        random.shuffle(order)
    again = level_figures(requests.take(shuffled[0]), tokens.take(shuffled[1]), facts)
    same(level_figures(requests, tokens, facts), again)


@RELAXED
@given(drawn=loops(), share=st.floats(0, 1), at=st.floats(0, 1))
def test_two_halves_merged_are_the_whole(make: Any, drawn: list[dict[str, Any]], share: float, at: float) -> None:
    """Parts of a level, as a crash or a long run leaves them, put together; the cut of the events is another one."""
    requests, tokens = trace(make, drawn)
    facts = make.facts(4)
    cut, other = int(share * requests.num_rows), int(at * tokens.num_rows)
    merged = pa.concat_tables([requests.slice(cut), requests.slice(0, cut)])
    whole = level_figures(requests, tokens, facts)
    same(whole, level_figures(merged, iter([tokens.slice(other), tokens.slice(0, other)]), facts))
    same(whole, level_figures(merged, iter([tokens.slice(at, 1) for at in range(tokens.num_rows)]), facts))


@pytest.mark.parametrize("n", range(1, 201))
def test_percentiles_against_a_sorted_list(n: int) -> None:
    values = np.random.default_rng(n).permutation(n).astype(float) + 1  # the value is its rank
    found = distribution(values)
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        # the smallest value that at least `percent` of all do not exceed
        smallest = next(value for value in sorted(values) if np.sum(values <= value) * 100 >= percent * n)
        assert found[name] == smallest
    # the largest value that at least 90 % reach
    assert found["p10"] == next(
        value for value in sorted(values, reverse=True) if np.sum(values >= value) * 10 >= 9 * n
    )
    assert found["n"] == n and found["mean"] == pytest.approx((n + 1) / 2)
    for failed in (0, 1, n):
        everyone = [*sorted(values), *[math.inf] * failed]
        assert percentiles.upper_with_failures(np.sort(values), failed, 90) == everyone[-(-9 * len(everyone) // 10) - 1]


@RELAXED
@given(drawn=loops())
def test_ttft_and_itl_lead_to_the_last_token_to_the_nanosecond(make: Any, drawn: list[dict[str, Any]]) -> None:
    requests, _ = trace(make, drawn)
    sent, last = rows.ints(requests, "sent_ns"), rows.ints(requests, "last_token_ns")
    ttft, itl = rows.floats(requests, "ttft_ms"), rows.floats(requests, "itl_ms")
    for at, each in enumerate(drawn):
        if each["ok"] and len(each["tokens"]) > 1:
            divisor = sum(each["tokens"]) - each["tokens"][0]
            assert round((ttft[at] + itl[at] * divisor) * 1e6) == last[at] - sent[at]


TIMES = {"ttft_ms", "response_ttft_ms", "ttfa_ms", "itl_ms", "icl_ms", "latency_s", "response_latency_s"}
SPEEDS = {"tps", "decode_tps"}


@RELAXED
@given(drawn=loops(), scale=st.sampled_from([2, 3, 10, 1000]))
def test_times_scaled_scale_the_figures(make: Any, drawn: list[dict[str, Any]], scale: int) -> None:
    facts = make.facts(len({each["slot"] for each in drawn}))
    one, other = (level_figures(*trace(make, drawn, k), facts) for k in (1, scale))
    for name in DISTRIBUTIONS:
        factor = scale if name in TIMES else 1 / scale
        assert name in TIMES | SPEEDS
        expected = {
            key: value if key == "n" else None if value is None else np.multiply(value, factor).tolist()
            for key, value in one[name].items()
        }
        same(expected, other[name], rel=1e-6)
    for name, factor in (
        ("aggregate_tok_s", 1 / scale), ("system_rps", 1 / scale), ("stream_rps", 1 / scale), ("window_s", scale),
        ("wall_s", scale), ("in_flight_mean", 1), ("rate_edge_error", 1), ("tokens_per_event", 1),
    ):  # fmt: skip
        same(None if one[name] is None else one[name] * factor, other[name], rel=1e-6)


@RELAXED
@given(drawn=loops())
def test_the_books_balance(make: Any, drawn: list[dict[str, Any]]) -> None:
    error = level_figures(*trace(make, drawn), make.facts(4))["checks"]["bookkeeping_error"]
    assert error is None or error < 1e-3
