"""When a slot waits, how long, and when a level is given up: the rules alone, without a clock."""

from typing import Any

import pytest

from fastload import _client, _timing
from fastload.load import patience


def counters(**given: int) -> dict[str, int]:
    return dict.fromkeys(_client.GAUGES, 0) | {"last_status": -1, "last_errno": -1} | given


def head(status: int, *lines: str) -> dict[str, Any]:
    return {"status": status, "head": "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode()}


def test_one_failure_costs_no_wait_and_more_cost_twice_as_much_each_up_to_2_s() -> None:
    waits = [patience.wait_ms(failed) for failed in range(9)]
    assert waits == [0, 0, 100, 200, 400, 800, 1600, 2000, 2000]
    assert patience.wait_ms(10_000) == 2000


@pytest.mark.parametrize(
    ("failed", "answer", "wait_ms"),
    [
        (1, head(429, "Retry-After: 7"), 7000),
        (1, head(503, "retry-after: 1.5"), 1500),
        (1, head(429, "Retry-After-Ms: 250", "Retry-After: 7"), 250),
        (1, head(429, "Retry-After: 86400"), 300_000),  # a server may not stop a run for good
        (1, head(429), 0),
        (1, head(500, "Retry-After: 7"), 0),
        (1, head(429, "Retry-After: soon"), 0),
        (4, head(429, "Retry-After: 0"), 400),  # one that says 0 and fails again is backed off from all the same
        (4, head(429, "Retry-After: 7"), 7000),
        (0, head(429, "Retry-After: 7"), 0),  # the slot succeeded since
    ],
)
def test_what_a_server_asks_for(failed: int, answer: dict[str, Any], wait_ms: int) -> None:
    assert patience.wait_ms(failed, **answer) == wait_ms


def test_a_date_to_come_back_at_counts_from_the_heads_own() -> None:
    dates = ("Date: Mon, 30 Nov 2026 22:00:00 GMT", "Retry-After: Mon, 30 Nov 2026 22:00:09 GMT")
    assert patience.wait_ms(1, **head(503, *dates)) == 9000


@pytest.mark.parametrize(
    ("streams", "failed", "seconds", "over"),
    [
        (1, 10, 30.0, True),
        (1, 9, 3000.0, False),  # ten timeouts of a minute prove something, nine do not
        (1, 1000, 29.9, False),  # a server that restarts within half a minute is waited for
        (64, 63, 60.0, False),
        (64, 64, 60.0, True),
    ],
)
def test_a_level_is_hopeless_after_a_while_of_nothing_but_failures(
    streams: int, failed: int, seconds: float, over: bool
) -> None:
    given = counters(failed_in_row=failed, last_end=_timing.END_CONNECT, last_errno=111)
    why = patience.hopeless(given, streams, seconds)
    assert bool(why) == over
    if over:
        assert why == (
            f"{failed} requests failed in a row in {seconds:.0f} s and none succeeded (--max-failures N bears N); "
            "the last: connect: Connection refused"
        )


def test_a_number_that_was_given_is_the_only_rule() -> None:
    given = counters(failed_in_row=8, last_status=429)
    assert patience.too_many(given, 9) == ""
    assert patience.too_many(given, 8) == "8 requests failed in a row (--max-failures 8); the last: HTTP 429"


def test_a_few_failures_in_a_row_may_be_chance() -> None:
    given = counters(last_end=_timing.END_RESET)
    assert patience.failing(given | {"failed_in_row": 2}) is None
    told = "3 requests failed in a row so far; the last: reset by the server"
    assert patience.failing(given | {"failed_in_row": 3}) == told


def test_a_level_in_which_nothing_succeeded() -> None:
    given = counters(measured_failed=5, last_status=500)
    assert patience.all_failed(given) == "all 5 measured requests failed; the last: HTTP 500"
    assert patience.all_failed(given | {"measured_done": 1}) == ""
    assert patience.all_failed(counters()) == ""


@pytest.mark.parametrize(
    ("end", "status", "error", "words"),
    [
        (_timing.END_CONNECT, -1, 111, "connect: Connection refused"),
        (_timing.END_CONNECT, -1, 0, "connect: no connection"),
        (_timing.END_PORTS, -1, 99, "client_ports: no local port or file descriptor was free on this host"),
        (_timing.END_COMPLETE, 503, -1, "HTTP 503"),
        (_timing.END_EOF, 503, -1, "HTTP 503"),
        (_timing.END_EOF, 200, -1, "closed by the server before the answer was complete"),
        (_timing.END_RESET, -1, 104, "reset by the server"),
        (_timing.END_TIMEOUT, 200, -1, "a time limit"),
        (_timing.END_COMPLETE, 200, -1, "an answer with an error, without text or without an end"),
    ],
)
def test_a_word_for_each_failure(end: int, status: int, error: int, words: str) -> None:
    assert patience.words(end, status, error).startswith(words)


def test_limits_are_looked_at_four_times_within_the_shortest() -> None:
    long = {"connect_s": 10.0, "first_byte_s": 600.0, "idle_s": 60.0, "total_s": 3600.0}
    assert patience.sweep_s(long) == 0.1
    assert patience.sweep_s(long | {"idle_s": 0.2}) == 0.05
    assert patience.sweep_s(long | {"connect_s": 0.000001}) == 0.005
