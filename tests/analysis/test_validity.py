"""The verdict: each cause by itself turns a valid run, and says so with its figures."""

from typing import Any

import pytest

from fastload.analysis.levels import level_figures
from fastload.analysis.validity import verdict


@pytest.fixture
def level(make: Any) -> dict[str, Any]:
    """A sound level: 2 slots, 60 requests of 40 ms each, lengths as asked, 1 ns between them."""
    columns = {
        "max_tokens": 4,
        "prompt_tokens": 32,
        "prompt_tokens_planned": 32,
        "rtt_us": 40,
        "cached_tokens": 0,
    }
    requests = [*make.steady(0, 30, 0, columns=columns), *make.steady(1, 30, 0, columns=columns)]
    told = {
        "client_delay_us": {"p50": 12.0, "p99": 40.0, "max": 900.0},
        "cpu_share": 0.34,
        "loop_lag_max_ms": 0.3,
        "gc_pauses": 0,
        "stalled_ms": 0,
        "lost_events": 0,
        "stray_bytes": 0,
        "stale_retries": 0,
        "events_per_read": 1.02,
    }
    facts = make.facts(2, instrument=told, measured_planned=60, measured_done=60)
    rows, tokens = make.tables(requests)
    return level_figures(rows, tokens, facts)


def change(level: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A level with some figures replaced; a dotted name goes into a nested one."""
    copy = {name: dict(value) if isinstance(value, dict) else value for name, value in level.items()}
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        if inner:
            copy[outer][inner] = value
        else:
            copy[outer] = value
    return copy


def test_a_sound_run_is_valid_and_still_says_everything(level: dict[str, Any]) -> None:
    found = verdict([level])
    assert (found["status"], found["reasons"]) == ("valid", [])
    said = "\n".join(found["notes"])
    for words in (
        "stamp error not calibrated on this host",
        "client delay (read time - kernel stamp), us: P50 12, P99 40, max 900",
        "slot turn-around",
        "coalesced stamps",
        "CPU 34 %",
        "0 GC pauses",
        "RTT (TCP_INFO): 40 us, part of TTFT and never subtracted",
        "in flight 2 of 2",
        "rates: edge error up to 3.3 %, the window being 30 waves long",
        "prompt 32/32, output 4/4",
        "prefix-cache hits: 0 tokens a request",
        "tokens counted by: usage 60",
        "TTFT + (n - 1) x ITL = latency within 0 %",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ok": 0, "failed": 60, "errors": {"connect": 60}}, "all 60 measured requests failed (connect 60)"),
        ({"instrument.lost_events": 7}, "7 events were lost"),
        ({"checks.repeated_requests": 1}, "1 requests were sent in more than one row"),
        ({"checks.rows_without_events": 2}, "2 rows have no entry in tokens"),
        ({"checks.events_without_row": 2}, "2 entries of tokens have no row"),
        ({"measured_done": 61}, "1 measured requests finished but have no row"),
        (
            {"measured": 62, "errors": {"connect": 2}},
            "2 connections could not be had, the server was away: the load was not held",
        ),
        (
            {"measured": 61, "errors": {"client_ports": 1}},
            "1 connections found no local port or file descriptor free on this host: the load was not held",
        ),
        ({"measured_planned": 62}, "2 planned measured requests have no row"),
        ({"checks.bookkeeping_error": 0.0011}, "differ by 0.11 %"),
        ({"in_flight_mean": 1.89}, "in flight 1.89 of 2 (-5.5 %)"),
        ({"in_flight_mean": 2.11}, "(+5.5 %)"),
        ({"window_s": None, "in_flight_mean": None}, "never busy at once"),
        ({"checks.rows_out_of_order": 1}, "1 of 60 successful requests have stamps that run backwards"),
        ({"checks.ok_without_ttft": 1}, "have no first token"),
    ],
)
def test_invalid(level: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    found = verdict([level, change(level, changes)])
    assert found["status"] == "invalid"
    assert [reason for reason in found["reasons"] if reason.startswith("c=2: ") and words in reason]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_flight_mean": 1.97}, "in flight 1.97 of 2 (-1.5 %)"),
        ({"prompt_tokens_mean": 32.7}, "prompts have 32.7 tokens on average, 32 were asked for"),
        (
            {"completion_tokens_mean": 3.9, "early_stops": 6},
            "outputs have 3.9 tokens on average, 4 were asked for (6 of 60",
        ),
        ({"instrument.cpu_share": 0.81}, "used 81 % of its CPU"),
        ({"instrument.loop_lag_max_ms": 3210.0}, "held up for 3,210 ms at once"),
        ({"instrument.suspended_ms": 60_000.0}, "the machine was suspended for 60,000 ms"),
        ({"clamped_share": 0.011}, "of ITL"),
        ({"instrument.stalled_ms": 13.0, "wall_s": 1.2}, "stood still for 13 ms, 1.1 % of the level"),
        ({"coalesced_share": 0.5, "client_delay_us.p99": 300.0}, "stamp error 150 us is 1.5 % of TTFT"),
        ({"client_delay_us.p99": 5100.0}, "client delay P99 5,100 us is 51 % of an ITL"),
        ({"turnaround_us.mean": 500.0}, "slots stood free 500 us between requests"),
    ],
)
def test_suspect(level: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    found = verdict([change(level, changes)])
    assert found["status"] == "suspect"
    assert [reason for reason in found["reasons"] if words in reason]


def test_a_clock_that_was_set_is_said(level: dict[str, Any]) -> None:
    assert "system clock" not in "\n".join(verdict([level])["notes"])
    notes = "\n".join(verdict([level, change(level, {"level": 8, "instrument.rebracketed": 4})])["notes"])
    assert "WARNING: c=8: the system clock was set while it ran (0 times by notice, seen in 4 stamps)" in notes
    assert "c=2: the system clock" not in notes
    notes = "\n".join(verdict([change(level, {"instrument.clock_steps": 1})])["notes"])
    assert "WARNING: c=2: the system clock was set while it ran (1 times by notice" in notes


def calibrated(*levels: tuple[int, float | None, float]) -> dict[str, Any]:
    """A calibration: (concurrency, P99 of kernel stamps, of read stamps) a level, negligible up to 64 and 8."""
    entries = [{"concurrency": at, "kernel": kernel, "read": read} for at, kernel, read in levels]
    return {"levels": entries, "negligible": {"kernel": 64, "read": 8}}


def test_calibration_counts_for_the_stamp_that_was_used(level: dict[str, Any]) -> None:
    assert verdict([level], calibration=calibrated((4, 90.0, 500.0)))["status"] == "valid"
    found = verdict([level], calibration=calibrated((4, 110.0, 500.0)))
    assert found["reasons"] == [
        "c=2: stamp error 110 us is 1.1 % of TTFT",
        "c=2: stamp error 110 us is 1.1 % of ITL",
    ]


def test_the_nearest_calibrated_level_at_or_above_counts(level: dict[str, Any]) -> None:
    steps = calibrated((1, 5.0, 300.0), (2, 10.0, 400.0), (8, 500.0, 900.0))
    told = "\n".join(verdict([level], calibration=steps)["notes"])
    assert "calibrated on this host: stamp error P99 10 us at c=2; calibrate: client negligible up to c=64" in told
    above = verdict([change(level, {"level": 3, "in_flight_mean": 3.0})], calibration=steps)
    assert [one for one in above["reasons"] if "stamp error 500 us" in one]
    beyond = verdict([level], calibration=calibrated((1, 5.0, 300.0)))
    assert any("P99 5 us at c=1" in one and "c=2 is beyond what was calibrated" in one for one in beyond["notes"])


def test_a_calibration_without_the_stamp_that_was_used_is_none(level: dict[str, Any]) -> None:
    found = verdict([level], calibration=calibrated((4, None, 500.0)))
    assert found["status"] == "valid"
    assert any("not calibrated on this host" in one for one in found["notes"])


def test_client_delay_alone_is_no_doubt_with_kernel_stamps(level: dict[str, Any]) -> None:
    assert verdict([change(level, {"client_delay_us.p99": 4900.0})])["status"] == "valid"


def test_connect_failures_do_not_use_up_the_plan(level: dict[str, Any]) -> None:
    plan = {"measured_planned": 60, "measured": 61, "failed": 1, "errors": {"connect": 1}}
    assert verdict([change(level, plan)])["status"] == "valid"
    lost = {"measured_planned": 60, "measured": 60, "ok": 59, "failed": 1, "errors": {"connect": 1}}
    assert verdict([change(level, lost)])["status"] == "invalid"


def test_a_level_that_was_given_up_says_why(level: dict[str, Any]) -> None:
    cut = {"complete": False, "gave_up": "9 requests failed in a row", "measured": 12, "measured_planned": 60}
    assert "c=2 is incomplete: 12 of 60 measured requests; 9 requests failed in a row" in (
        verdict([change(level, cut)], status="failed")["notes"]
    )


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"coalesced_share": 0.98, "instrument.events_per_read": 50.0}, True),
        ({"coalesced_share": 0.98, "instrument.events_per_read": 3.0}, False),
        ({"coalesced_share": 0.2, "instrument.events_per_read": 50.0}, False),
        # the client itself is late: that is said elsewhere
        ({"coalesced_share": 0.98, "instrument.events_per_read": 50.0, "client_delay_us.p50": 400_000.0}, False),
    ],
)
def test_a_gateway_that_collects_events_is_named(level: dict[str, Any], changes: dict[str, Any], warned: bool) -> None:
    notes = verdict([change(level, changes)])["notes"]
    assert any(note.startswith("WARNING: events come in bursts, 50 at a time (c=2)") for note in notes) == warned


def test_nothing_measured_is_invalid() -> None:
    assert verdict([]) == {"status": "invalid", "reasons": ["no measured request finished"], "notes": []}


def test_an_interrupted_run_says_what_it_lacks(level: dict[str, Any]) -> None:
    cut = change(
        level, {"complete": False, "level": 4, "measured": 12, "measured_planned": 40, "in_flight_mean": 4.0}
    )
    found = verdict([level, cut], status="interrupted")
    assert found["notes"][:2] == [
        "the run is interrupted: these are its rows so far",
        "c=4 is incomplete: 12 of 40 measured requests",
    ]


def test_a_level_cut_off_at_once_did_not_fail(level: dict[str, Any]) -> None:
    cut = {
        "complete": False,
        "measured": 2,
        "ok": 0,
        "failed": 2,
        "errors": {"cancelled": 2},
        "measured_done": 2,
    }
    assert verdict([level, change(level, cut)], status="interrupted")["status"] == "valid"


def test_estimates_early_stops_and_low_n_are_said(level: dict[str, Any]) -> None:
    doubtful = {
        "token_sources": {"events": 60},
        "itl_estimated": 60,
        "early_stops": 3,
        "ok": 28,
        "tokens_per_event": 2.0,
        "others": {"warmup": 1, "fill": 2, "failed": 3},
    }
    said = "\n".join(verdict([change(level, doubtful)])["notes"])
    assert "WARNING: token counts taken from events are ESTIMATES" in said
    assert "WARNING: 3 of 28 answers stopped early" in said
    assert "low n: P90 of c=2 rests on fewer than 29 requests" in said
    assert "ITL of 60 requests is estimated" in said
    assert "events hold 2 tokens (c=2): ITL is per token, ICL is the gap between events" in said
    assert "3 warm-up or fill requests failed too" in said


def test_a_trace_without_latencies_has_a_verdict_all_the_same(level: dict[str, Any]) -> None:
    """As one whose derived columns are not there: what cannot be set against them is not said."""
    nothing = dict.fromkeys(level["latency_s"]) | {"n": 0}
    found = verdict([change(level, {"latency_s": nothing, "ttft_ms": nothing, "itl_ms": nothing})])
    assert not any(note.startswith("slot turn-around") for note in found["notes"])
