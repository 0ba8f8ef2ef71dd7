"""Traces small enough to work out on paper; the answer stands beside each."""

from typing import Any

import pytest

from fastload.analysis.levels import level_figures

CONTENT, REASONING = 1, 2


def test_answers_of_one_token(make: Any) -> None:
    # sent 0, token 20 ms, done 25 ms; sent 25, token 35, done 50: TTFT 20 and 10, latency 25 ms each, TPS 1 / 0.025
    rows = [make.request(0, 25, [make.event(20)]), make.request(25, 50, [make.event(10)])]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["p90"], found["ttft_ms"]["p50"]) == (15.0, 20.0, 10.0)
    assert found["itl_ms"] == dict.fromkeys(found["itl_ms"]) | {"n": 0}  # there is none: neither 0 nor infinite
    assert (found["icl_ms"]["n"], found["decode_tps"]["n"]) == (0, 0)
    assert found["tps"]["mean"] == pytest.approx(40.0)
    assert found["checks"]["consistency_error"] is None  # without ITL there is nothing to check
    # window: 0 to 50 ms, two tokens in it
    assert (found["window_s"], found["aggregate_tok_s"]) == (pytest.approx(0.05), pytest.approx(40.0))


def test_reasoning_only(make: Any) -> None:
    # three reasoning tokens at 10, 20, 30 ms, done at 40: TTFT 10, ITL 10, never an answer token
    rows = [make.request(0, 40, [make.event(at, channel=REASONING) for at in (10, 20, 30)], columns={"ttfa_ms": None})]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["ttft_ms"]["mean"], found["itl_ms"]["mean"]) == (10.0, 10.0)
    assert (found["ttfa_ms"]["mean"], found["ttfa_ms"]["n"]) == (None, 0)
    assert found["tps"]["mean"] == pytest.approx(75.0)  # 3 / 0.04
    assert (found["slo_ttft"], found["slo_tps"], found["slo"]) == (True, True, True)


def test_reasoning_then_an_answer(make: Any) -> None:
    # reasoning at 10 and 20, content at 30 and 40 ms
    events = [make.event(at, channel=REASONING if at < 25 else CONTENT) for at in (10, 20, 30, 40)]
    rows = [make.request(0, 50, events, columns={"ttfa_ms": 30.0})]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["ttft_ms"]["mean"], found["ttfa_ms"]["mean"], found["itl_ms"]["mean"]) == (10.0, 30.0, 10.0)
    assert found["icl_ms"]["n"] == 3  # gaps pass from channel to channel


def test_all_failed(make: Any) -> None:
    # two resets after 30 ms each: no distribution, goodput 0 of the one due in the window (0, 60]
    rows = [make.request(0, 30, (), 0, status="reset"), make.request(30, 60, (), 0, status="reset")]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["measured"], found["ok"], found["failed"], found["errors"]) == (2, 0, 2, {"reset": 2})
    assert found["ttft_ms"]["mean"] is None and found["tps"]["p10"] is None
    assert (found["slo_ttft"], found["slo_tps"], found["slo"]) == (
        False,
        False,
        False,
    )  # the worst there is, not unknown
    assert (found["goodput"], found["goodput_due"], found["goodput_rps"]) == (0.0, 1, 0.0)
    assert (found["aggregate_tok_s"], found["system_rps"]) == (0.0, 0.0)
    assert (found["in_flight_mean"], found["checks"]["bookkeeping_error"]) == (1.0, 0.0)
    assert found["rate_edge_error"] is None  # nothing completed, so no wave


def test_one_request(make: Any) -> None:
    # tokens at 100, 110, 120, 130 ms, done at 150
    rows = [make.request(0, 150, [make.event(at) for at in (100, 110, 120, 130)])]
    found = level_figures(*make.tables(rows), make.facts(1))
    for name, value in (("ttft_ms", 100.0), ("itl_ms", 10.0), ("latency_s", 0.15), ("tps", 4 / 0.15)):
        figures = found[name]
        assert [figures[each] for each in ("mean", "p10", "p50", "p90", "p99")] == [pytest.approx(value)] * 5
        assert (figures["n"], figures["p90_ci95"], figures["p50_ci95"]) == (1, None, None)
    assert found["aggregate_tok_s"] == pytest.approx(4 / 0.15)
    assert found["system_rps"] == pytest.approx(1 / 0.15)
    # 100 + 3 x 10 = 130 ms of 150: the end without a token is in no ITL
    assert found["checks"]["consistency_error"] == pytest.approx(130 / 150 - 1)


def test_two_tokens_in_one_event(make: Any) -> None:
    # events of 2 tokens at 10, 20, 30 ms: ITL (30 - 10) / (6 - 2) = 5 ms, gaps of 10 ms, 2 tokens an event
    rows = [make.request(0, 30, [make.event(at, tokens=2) for at in (10, 20, 30)])]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["itl_ms"]["mean"], found["icl_ms"]["mean"], found["icl_ms"]["n"]) == (5.0, 10.0, 2)
    assert (found["tokens_per_event"], found["completion_tokens_mean"]) == (2.0, 6.0)
    assert found["decode_tps"]["mean"] == pytest.approx(200.0)
    # 10 ms + 4 tokens after the first event x 5 ms = 30 ms, the latency
    assert found["checks"]["tokens_after_first"] == pytest.approx(4.0)
    assert found["checks"]["consistency_error"] == pytest.approx(0.0, abs=1e-12)
    assert found["aggregate_tok_s"] == pytest.approx(6 / 0.03)


def test_an_end_token_without_an_event(make: Any) -> None:
    # usage says 4, three events at 10, 20, 30 ms: the end token has none, so ITL is 20 / (4 - 2) and TPS 4 / 0.03
    events = [make.event(at) for at in (10, 20, 30)]
    rows = [
        make.request(
            0, 30, events, columns={"completion_tokens": 4, "itl_ms": 10.0, "tps": 4 / 0.03, "finish_reason": "stop"}
        )
    ]
    found = level_figures(*make.tables(rows), make.facts(1))
    assert (found["itl_ms"]["mean"], found["completion_tokens_mean"]) == (10.0, 4.0)
    assert found["tokens_per_event"] == pytest.approx(4 / 3)
    assert found["tps"]["mean"] == pytest.approx(4 / 0.03)


def test_rows_over_the_edges_of_the_window(make: Any) -> None:
    # Slot 0 sends at 0 (warm-up, over the start) and 30; slot 1 at 10, and at 50 a fill over the end.
    # Window: from 10 ms (both slots out) to 60 ms, where the last measured request ends.
    rows = [
        make.request(0, 30, [make.event(5), make.event(15), make.event(30)], 0, "warmup"),  # at 5, 15, 30: two inside
        make.request(10, 50, [make.event(0), make.event(20), make.event(40)], 1),  # at 10 (the edge: out), 30, 50
        make.request(30, 60, [make.event(10), make.event(30)], 0),  # at 40, 60 (the edge: in)
        make.request(50, 90, [make.event(10), make.event(11), make.event(40)], 1, "fill"),  # at 60 in, 61 and 90 out
    ]
    found = level_figures(*make.tables(rows), make.facts(2))
    assert found["window_s"] == pytest.approx(0.05)
    assert found["aggregate_tok_s"] == pytest.approx((2 + 2 + 2 + 1) / 0.05)
    assert found["system_rps"] == pytest.approx(3 / 0.05)  # done at 30, 50 and 60; the fill at 90 is outside
    # in flight: 10-30 two, 30-50 two, 50-60 two
    assert found["in_flight_mean"] == pytest.approx(2.0)
    assert found["rate_edge_error"] == pytest.approx(2 / 3)
    # due in (10, 60] and measured: the request sent at 30; that of 10 stands on the edge
    assert (found["goodput_due"], found["goodput"]) == (1, 1.0)
    assert found["others"] == {"warmup": 1, "fill": 1, "failed": 0}
