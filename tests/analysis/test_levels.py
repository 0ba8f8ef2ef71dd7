"""Figures of a level, each worked out by hand; the M numbers are cases of other tools' bug reports."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.analysis import events, rows, window
from fastload.analysis.levels import level_figures
from fastload.analysis.slo import Slo


def figures(make: Any, requests: list[Any], concurrency: int = 1, **more: Any) -> dict[str, Any]:
    rows_of, tokens = make.tables(requests)
    return level_figures(rows_of, tokens, make.facts(concurrency, **more))


def test_m13_the_way_to_the_first_token_is_no_gap(make: Any) -> None:
    level = figures(make, [make.request(0, 255, [make.event(150), make.event(190), make.event(250)])])
    assert level["ttft_ms"]["mean"] == 150
    assert (level["icl_ms"]["n"], level["icl_ms"]["p10"], level["icl_ms"]["p90"]) == (2, 40, 60)
    assert level["itl_ms"]["mean"] == 50


def test_m14_one_token_has_no_itl(make: Any) -> None:
    level = figures(make, [make.request(0, 80, [make.event(60)])])
    assert (level["ok"], level["ttft_ms"]["mean"]) == (1, 60)
    for name in ("itl_ms", "icl_ms", "decode_tps"):
        assert (level[name]["n"], level[name]["mean"], level[name]["p90"]) == (0, None, None)
    assert level["checks"]["consistency_error"] is None


def test_m14_done_only(make: Any) -> None:
    level = figures(make, [make.request(0, 0, [make.event(0, 0, 16)], status="empty")])
    assert (level["ok"], level["failed"], level["errors"]) == (0, 1, {"empty": 1})
    assert level["latency_s"]["mean"] is None and level["stream_rps"] is None
    assert level["aggregate_tok_s"] is None


def two_speeds(make: Any) -> list[Any]:
    """M29: A has 2 tokens 100 ms apart, B 101 tokens 10 ms apart."""
    a = make.request(0, 200, [make.event(100), make.event(200)])
    b = make.request(200, 1300, [make.event(100 + 10 * at) for at in range(101)])
    return [a, b]


def test_m29_itl_is_per_request_and_icl_is_pooled(make: Any) -> None:
    level = figures(make, two_speeds(make))
    assert level["itl_ms"]["mean"] == pytest.approx(55.0)
    assert level["icl_ms"]["mean"] == pytest.approx(1100 / 101)
    assert (level["itl_ms"]["n"], level["icl_ms"]["n"]) == (2, 101)


def test_m45_itl_stands_in_its_own_row(make: Any) -> None:
    requests, _ = make.tables(two_speeds(make))
    assert requests["itl_ms"].to_pylist() == pytest.approx([100.0, 10.0])


def test_m37_failures_stand_beside_the_percentiles_and_not_in_them(make: Any) -> None:
    good = [
        make.request(1000 * at, 1000 * at + 1000, [make.event(100), make.event(1000)]) for at in range(90)
    ]
    bad = [make.request(90_000 + at, 90_000 + at, status="http_status") for at in range(10)]
    level = figures(make, good + bad)
    assert (level["measured"], level["ok"], level["failed"], level["errors"]) == (
        100,
        90,
        10,
        {"http_status": 10},
    )
    assert (level["latency_s"]["n"], level["latency_s"]["p99"]) == (90, 1.0)
    assert level["slo"] is False  # 10 % failed


def test_slo_counts_failures_as_the_worst(make: Any) -> None:
    good = [
        make.request(1000 * at, 1000 * at + 1000, [make.event(100, 20), make.event(1000, 20)])
        for at in range(8)
    ]
    bad = [make.request(9000 + at, 9000 + at, status="reset") for at in range(2)]
    level = figures(make, good + bad)
    assert (level["slo_ttft"], level["slo_tps"], level["slo"]) == (False, False, False)
    assert level["ttft_ms"]["p90"] == 100
    fine = figures(make, good)
    assert (fine["slo_ttft"], fine["slo_tps"], fine["slo"]) == (True, True, True)
    incomplete = figures(make, good, complete=False)
    assert (incomplete["slo_ttft"], incomplete["slo"]) == (True, False)


def two_slots(make: Any) -> list[Any]:
    """Two slots, the second 5 ms later; 3 requests of 40 ms and 4 tokens each, then a fill in the first."""
    return [
        *make.steady(0, 3, 0),
        *make.steady(1, 3, 5),
        *make.steady(0, 1, 120, role="fill"),
    ]


def test_window_and_rates_by_hand(make: Any) -> None:
    level = figures(make, two_slots(make), 2)
    assert level["window_s"] == pytest.approx(
        0.120
    )  # from the second slot's first send (5) to the last done (125)
    assert level["in_flight_mean"] == pytest.approx(2.0)
    assert level["in_flight_max"] == 2
    assert level["wall_s"] == pytest.approx(0.160)
    # Slot 0: 10, 20 ... 120; slot 1: 15 ... 125; the fill's first token comes at 130, after the window.
    assert level["aggregate_tok_s"] == pytest.approx(24 / 0.120)
    assert level["aggregate_tok_s_kimi_report"] == pytest.approx(100 * 2)
    assert level["system_rps"] == pytest.approx(6 / 0.120)
    assert level["stream_rps"] == pytest.approx(25)
    assert level["rate_edge_error"] == pytest.approx(2 / 6)
    assert (level["measured"], level["others"]) == (6, {"warmup": 0, "fill": 1, "failed": 0})
    assert level["checks"]["bookkeeping_error"] == pytest.approx(0, abs=1e-9)


def test_without_fills_the_load_drops_and_shows(make: Any) -> None:
    level = figures(make, two_slots(make)[:-1], 2)
    assert level["in_flight_mean"] == pytest.approx((115 + 120) / 120)


def test_tokens_of_all_roles_count_in_the_window_and_those_without_text_too(make: Any) -> None:
    warm = make.request(0, 100, [make.event(50), make.event(60, 1, 0, 16)], role="warmup")
    measured = make.request(100, 200, [make.event(10, 3), make.event(99, 2, 2)])
    fill = make.request(20, 400, [make.event(20), make.event(150), make.event(300)], slot=1, role="fill")
    level = figures(make, [warm, measured, fill], 2)
    # (20, 200]: 50 and the end token at 60, 3 at 110, 2 of reasoning at 199, the fill's at 40 and 170.
    assert level["aggregate_tok_s"] == pytest.approx((2 + 3 + 2 + 2) / 0.180)
    assert level["tokens_per_event"] == pytest.approx(2.5)
    assert level["ttft_ms"]["n"] == 1


def test_goodput_is_of_requests_due_in_the_window(make: Any) -> None:
    requests, tokens = make.tables(two_slots(make))
    # Due in (5, 125]: two in each slot (the first wave is due before the window begins).
    level = level_figures(requests, tokens, make.facts(2), Slo(ttft_ms=10, tps=100))
    assert (level["goodput"], level["goodput_rps"]) == (1.0, pytest.approx(4 / 0.120))
    assert level_figures(requests, tokens, make.facts(2), Slo(ttft_ms=9.9))["goodput"] == 0.0


def test_no_window_when_slots_never_overlap(make: Any) -> None:
    level = figures(
        make,
        [make.request(0, 10, [make.event(5)]), make.request(20, 30, [make.event(5)], slot=1, role="fill")],
    )
    for name in ("window_s", "aggregate_tok_s", "system_rps", "in_flight_mean", "rate_edge_error", "goodput"):
        assert level[name] is None


def test_lengths_and_early_stops(make: Any) -> None:
    def one(at: int, tokens: int) -> Any:
        columns = {"max_tokens": 64, "prompt_tokens": 31, "prompt_tokens_planned": 32, "cached_tokens": 16}
        return make.request(at, at + 1, [make.event(0.5, tokens)], columns=columns)

    level = figures(make, [one(0, 64), one(1, 5), one(2, 64)])
    assert (level["early_stops"], level["max_tokens_mean"]) == (1, 64)
    assert level["completion_tokens_mean"] == pytest.approx(133 / 3)
    assert (level["prompt_tokens_mean"], level["prompt_tokens_planned_mean"]) == (31, 32)
    assert level["cached_tokens_mean"] == 16
    assert level["token_sources"] == {"usage": 3}


def test_the_instrument_speaks(make: Any) -> None:
    request = make.request(
        0,
        100,
        [make.event(10), make.event(20, 1, 1, 1), make.event(30, 1, 1, 2), make.event(31, 0, 16, 1)],
        columns={"rtt_us": 40, "retransmits": 2},
    )
    told = {
        "client_delay_us": {"p50": 12, "p99": 40.5, "max": 900},
        "cpu_share": 0.3,
        "loop_lag_max_ms": float("nan"),
    }
    level = figures(make, [request], instrument=told)
    assert level["client_delay_us"] == {"p50": 12, "p99": 40.5, "max": 900}
    assert (level["instrument"]["cpu_share"], level["instrument"]["loop_lag_max_ms"]) == (0.3, None)
    assert (level["coalesced_share"], level["clamped_share"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (level["stamp_source"], level["rtt_us"], level["retransmits"]) == ("kernel", 40, 2)


def test_client_delay_from_the_rows_where_the_level_never_ended(make: Any) -> None:
    columns = [{"client_delay_p50_us": p50, "client_delay_max_us": p50 * 10} for p50 in (5.0, 7.0, 9.0)]
    requests = [make.request(at, at + 1, [make.event(0.5)], columns=each) for at, each in enumerate(columns)]
    level = figures(make, requests, complete=False)
    assert level["client_delay_us"] == {"p50": 7.0, "p99": None, "max": 90.0}


def test_turnaround_leaves_out_connecting_and_backoff(make: Any) -> None:
    requests = [
        make.request(0, 10, [make.event(5)]),
        make.request(12, 20, [make.event(5)], columns={"connect_ns": 1_500_000}),
        make.request(50, 60, [make.event(5)], columns={"backoff_ms": 30}),
        make.request(61, 70, [make.event(5)]),
    ]
    level = figures(make, requests)
    assert level["turnaround_us"]["mean"] == pytest.approx((500 + 1000) / 2)


def test_a_number_that_first_failed_to_connect_keeps_its_events(make: Any) -> None:
    lost = make.request(0, 0, status="connect", columns={"request": 7, "sent_ns": None, "done_ns": None})
    sent = make.request(100, 200, [make.event(50), make.event(100)], columns={"request": 7})
    level = figures(make, [lost, sent])
    assert (level["measured"], level["ok"], level["icl_ms"]["n"]) == (2, 1, 1)
    assert level["checks"]["repeated_requests"] == 0
    assert level["checks"]["rows_without_events"] == 0


def test_checks_find_what_is_missing_or_doubled(make: Any) -> None:
    requests, tokens = make.tables([make.request(at, at + 1, [make.event(0.5)]) for at in range(4)])
    whole = level_figures(requests, tokens, make.facts(1))["checks"]
    assert {
        name: whole[name]
        for name in whole
        if name not in ("bookkeeping_error", "consistency_error", "tokens_after_first")
    } == {
        "repeated_requests": 0,
        "rows_without_events": 0,
        "events_without_row": 0,
        "rows_out_of_order": 0,
        "ok_without_ttft": 0,
    }
    assert level_figures(requests.slice(1), tokens, make.facts(1))["checks"]["events_without_row"] == 1
    assert level_figures(requests, tokens.slice(1), make.facts(1))["checks"]["rows_without_events"] == 1
    doubled = requests.set_column(requests.column_names.index("request"), "request", [[0, 0, 1, 2]])
    assert level_figures(doubled, tokens, make.facts(1))["checks"]["repeated_requests"] == 1
    stamped = make.request(0, 10, [make.event(5)], columns={"first_token_ns": 1})
    assert figures(make, [stamped])["checks"]["rows_out_of_order"] == 1


def test_a_latency_that_is_not_of_its_stamps_breaks_the_books(make: Any) -> None:
    requests = [make.request(at, at + 1, [make.event(0.5)]) for at in range(4)]
    wrong = make.request(4, 5, [make.event(0.5)], columns={"latency_s": 0.0009})
    level = figures(make, [*requests, wrong])
    assert level["checks"]["bookkeeping_error"] == pytest.approx(0.0001 / 0.0049)


def test_rows_whose_role_was_never_known_are_others(make: Any) -> None:
    given_up = make.request(10, 10, status="cancelled", role=None, columns={"done_ns": None})
    level = figures(make, [make.request(0, 10, [make.event(5)]), given_up])
    assert (level["measured"], level["failed"], level["others"]["failed"]) == (1, 0, 1)


def test_a_level_without_rows(make: Any) -> None:
    level = figures(make, [], 8)
    assert (level["level"], level["measured"], level["ttft_ms"]["n"], level["slo"]) == (8, 0, 0, None)


@given(st.data())
def test_any_closed_loop_keeps_its_books(data: st.DataObject) -> None:
    sent, end, slot = [], [], []
    slots = data.draw(st.integers(1, 4))
    for each in range(slots):
        clock = data.draw(st.integers(0, 50))
        for _ in range(data.draw(st.integers(1, 6))):
            length = data.draw(st.integers(0, 1000))
            sent.append(clock)
            end.append(clock + length)
            slot.append(each)
            clock += length + data.draw(st.integers(0, 20))
    sent_ns, end_ns, slots_of = (np.array(each, dtype=np.int64) for each in (sent, end, slot))
    most, integral = window.in_flight_steps(sent_ns, end_ns)
    assert most <= slots
    assert integral * 1e9 == pytest.approx((end_ns - sent_ns).sum())
    span = window.closed_loop(slots_of, sent_ns, end_ns, np.ones(len(sent), dtype=np.bool_))
    if span is None:
        return
    mean = window.in_flight_mean(sent_ns, end_ns, span)
    assert 0 <= mean <= slots
    busy = sum(((sent_ns < at) & (at <= end_ns)).sum() for at in range(span.start_ns + 1, span.end_ns + 1))
    assert mean == pytest.approx(busy / (span.end_ns - span.start_ns))


def test_pieces_change_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, tokens = make.tables(two_slots(make))
    counted = rows.equals(requests, "role", "measured")
    span = window.Window(int(requests["sent_ns"][3].as_py()), int(requests["done_ns"][5].as_py()))
    whole = events.fold(requests, tokens, counted, span)
    monkeypatch.setattr(events, "PIECE_EVENTS", 5)
    cut = events.fold(requests, tokens, counted, span)
    assert whole.gaps_ms.tolist() == cut.gaps_ms.tolist()
    assert (whole.window_tokens, whole.text_events, whole.rows) == (
        cut.window_tokens,
        cut.text_events,
        cut.rows,
    )
    assert whole.window_tokens == 24
