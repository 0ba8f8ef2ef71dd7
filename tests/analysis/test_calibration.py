"""The join of client and log on made-up levels whose every figure can be worked out on paper."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastload import _timing
from fastload.analysis import calibration
from fastload.analysis.calibration import ENDED, RECEIVED, RECORD, Arrivals, Spent
from fastload.sim import _emit
from fastload.trace.schema import requests_schema

MS = 1_000_000
US = 1_000
T0 = 5_000 * 10**9
OSL = 5
STEP = 20 * MS
TTFT = 50 * MS
LENGTH = TTFT + (OSL - 1) * STEP
FIRST = 1000  # number of the level's first request: a run has others before it
SERIAL = 7  # and so has the server


@dataclass
class Made:
    """A level of `slots` x `waves` requests in lockstep: each token stamped `late` ns and read `read` ns late."""

    slots: int = 2
    waves: int = 3
    late: int = 3 * US
    read: int = 200 * US
    way: int = 4 * US  # of the request to the server
    free: int = 0  # between an answer's end and the slot's next request
    log: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[int, int, int, bool]] = field(default_factory=list)  # request, stamp, read, coalesced

    def __post_init__(self) -> None:
        for wave in range(self.waves):
            for slot in range(self.slots):
                self.add(wave * self.slots + slot, T0 + wave * (LENGTH + self.way + self.free), slot)
        self.log.sort(key=lambda record: record[0])

    def add(self, number: int, sent: int, slot: int) -> None:
        serial, request, received = SERIAL + number, FIRST + number, sent + self.way
        sends = [received + TTFT + at * STEP for at in range(OSL)]
        # three records of a request may share an instant: the order in the list is that of the server
        self.log.append((received, serial, RECEIVED))
        self.log += [(send, serial, at) for at, send in enumerate(sends)]
        self.log.append((sends[-1], serial, ENDED))
        stamps = [send + self.late for send in sends]
        self.events += [(request, stamp, stamp + self.read, at == OSL - 1) for at, stamp in enumerate(stamps)]
        self.rows.append(
            {
                "request": request,
                "slot": slot,
                "role": "measured",
                "status": "ok",
                "sent_ns": sent,
                "first_token_ns": stamps[0],
                "last_token_ns": stamps[-1],
                "done_ns": stamps[-1],
                "text_events": OSL,
                "completion_tokens": OSL,
                "prompt_tokens": 300,
                "finish_reason": "length",
                "server_request_id": f"truth-{serial:08d}",
                "ttft_ms": (stamps[0] - sent) / MS,
                "itl_ms": (stamps[-1] - stamps[0]) / (OSL - 1) / MS,
            }
        )

    @property
    def requests(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, schema=requests_schema())

    @property
    def arrivals(self) -> Arrivals:
        columns = np.array([(a, b, c) for a, b, c, _ in self.events], np.int64).reshape(-1, 3)
        at = [sum(one[0] == each[0] for one in self.events[:place]) for place, each in enumerate(self.events)]
        return Arrivals(
            request=columns[:, 0].copy(),
            at=np.array(at, np.int64),
            stamp_ns=columns[:, 1].copy(),
            read_ns=columns[:, 2].copy(),
            coalesced=np.array([one[3] for one in self.events], np.bool_),
        )

    @property
    def records(self) -> Any:
        return np.array(self.log, RECORD)

    def figures(self, stamps: str = "kernel", **spent: Any) -> dict[str, Any]:
        cost = replace(Spent(3 * MS, 2 * MS, 1000 * MS, 1000, 40 * US, 10), **spent)
        return calibration.level_figures(self.requests, self.arrivals, self.records, self.slots, stamps, cost)

    def differences(self) -> list[str]:
        bodies = {row["request"]: 300 for row in self.rows}
        return calibration.differences(self.requests, self.arrivals, self.records, OSL, bodies)


def test_the_log_is_the_one_the_server_writes() -> None:
    assert (RECEIVED, ENDED, RECORD.itemsize) == (_emit.RECEIVED, _emit.ENDED, _emit.RECORD_BYTES)


def test_figures_of_a_level_by_hand() -> None:
    found = Made().figures()
    assert (found["requests"], found["measured"], found["tokens"], found["unmatched"]) == (6, 6, 30, 0)
    assert found["true_ttft_ms"] == {"mean": 50.0, "p90": 50.0} and found["true_itl_ms"] == 20.0
    kernel, read = found["kernel"], found["read"]
    assert kernel["stamp_us"] == {"p50": 3.0, "p99": 3.0, "max": 3.0}
    assert read["stamp_us"] == {"p50": 203.0, "p99": 203.0, "max": 203.0}
    # the way of the request to the server is in the reported TTFT, and so is the stamp's error
    assert kernel["ttft_error_us"] == pytest.approx({"mean": 7.0, "p90": 7.0})
    assert kernel["ttft_error_share"] == pytest.approx({"mean": 7 / 50_000, "p90": 7 / 50_000})
    assert read["ttft_error_us"]["mean"] == pytest.approx(207.0)
    assert kernel["itl_error_us"]["mean"] == pytest.approx(0.0, abs=1e-6)
    # the last token of an answer always comes with its end: it is no fault of the client
    assert (found["coalesced_share"], found["coalesced_with_end_share"]) == (0.0, 0.2)
    assert found["cpu_us_per_event"] == {"measurer": 3.0, "tree": 5.0}
    assert (found["cpu_share"], found["wait_us_per_wake"]) == (0.003, 4.0)


def test_in_flight_is_counted_at_the_server() -> None:
    # of each wave's 130 ms + way, the server has the request 130 ms
    made = Made(free=10 * MS, waves=11)
    found = made.figures()
    wave, window = LENGTH + made.way + made.free, 10 * (LENGTH + made.way + made.free) + LENGTH + made.late
    assert found["in_flight"] == pytest.approx(2 * 11 * LENGTH / window)
    assert found["in_flight_off"] == pytest.approx(11 * LENGTH / window - 1)
    assert any("off the load asked for" in one for one in calibration.shortcomings(found, "kernel"))
    assert found["events_per_s"] == pytest.approx(2 * 11 * OSL / window * 1e9, rel=0.01)
    assert wave > LENGTH


def test_one_late_stamp_is_in_the_tail_and_in_the_itl_of_its_request() -> None:
    made = Made()
    request, stamp, read, _ = made.events[OSL - 1]
    made.events[OSL - 1] = (request, stamp + 80 * US, read, False)
    made.rows[0]["itl_ms"] += 80 * US / (OSL - 1) / MS
    found = made.figures()
    assert found["kernel"]["stamp_us"] == {"p50": 3.0, "p99": 83.0, "max": 83.0}
    assert found["kernel"]["itl_error_us"] == pytest.approx({"mean": 20 / 6, "p90": 20.0})


def test_a_request_without_an_itl_leaves_the_figures_finite() -> None:
    made = Made()
    made.rows[0]["itl_ms"] = None
    assert made.figures()["kernel"]["itl_error_us"]["p90"] == pytest.approx(0.0, abs=1e-6)


def test_read_stamps_alone_are_judged_alone() -> None:
    made = Made(late=203 * US, read=0)
    found = made.figures("read")
    assert found["kernel"] is None and found["read"]["stamp_us"]["p50"] == 203.0
    assert calibration.judge([found])["kernel"] is None
    assert calibration.judge([found])["read"]["concurrency"] == 2


def test_arrivals_come_from_the_blocks_in_order_of_request() -> None:
    def block(events: list[tuple[int, int, int, int, int]]) -> _timing.Block:
        columns = {
            name: np.array([event[at] for event in events], kind).tobytes()
            for at, (name, kind) in enumerate(
                pair for pair in _timing.EVENT_COLUMNS if pair[0] not in ("bytes", "tokens")
            )
        }
        columns |= {name: np.zeros(len(events), "<i4").tobytes() for name in ("bytes", "tokens")}
        return _timing.Block(0, columns, len(events), b"", 0, [], 0)

    sent, none, done = _timing.CH_SENT, _timing.CH_NONE, _timing.CH_DONE
    text = _timing.CH_CONTENT
    found = calibration.arrivals(
        [
            block([(10, 5, 0, sent, 0), (11, 4, 0, sent, 0), (20, 5, 7, text, 0)]),
            block([(21, 4, 3, text, 1), (21, 5, 0, none, 0)]),
            block([(30, 4, 2, text, 0), (31, 5, -1, text, 0), (32, 5, 1, done, 0)]),
        ]
    )
    assert found.request.tolist() == [4, 4, 5, 5] and found.at.tolist() == [0, 1, 0, 1]
    assert found.stamp_ns.tolist() == [21, 30, 20, 31] and found.read_ns.tolist() == [24, 32, 27, 31]
    assert found.coalesced.tolist() == [True, False, False, False]


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_negligible_up_to_the_last_level_that_passes_with_all_below() -> None:
    levels = [replace_level(Made().figures(), concurrency=c, events_per_s=c * 50.0) for c in (1, 2, 4, 8)]
    levels[2]["read"] = Made(read=900 * US).figures()["read"]
    found = calibration.judge(levels[::-1])
    assert found["kernel"] == {"concurrency": 8, "events_per_s": 400.0, "reasons": []}
    assert found["read"]["concurrency"] == 2
    assert found["read"]["reasons"] == ["c=4: TTFT error (mean) 1.8 % of the truth"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"coalesced_share": 0.011}, "read together with a later one"),
        ({"in_flight_off": -0.0101}, "off the load asked for"),
        ({"cpu_share": 0.81}, "of a core used by the measuring process"),
        ({"others_share": 0.97}, "something else used 97 % of the client's core"),
        ({"wait_us_per_wake": 201.0}, "waited 201 us for its core at each wake-up, 1 % of an ITL"),
        ({"unmatched": 1}, "no counterpart"),
        ({"failed": 1}, "1 requests failed"),
    ],
)
def test_each_cause_by_itself_makes_both_stamps_not_negligible(changes: dict[str, Any], words: str) -> None:
    level = Made().figures()
    assert calibration.shortcomings(level, "kernel") == calibration.shortcomings(level, "read") == []
    found = calibration.judge([level | changes])
    for name in ("kernel", "read"):
        assert found[name]["concurrency"] is None and words in found[name]["reasons"][0]


def test_only_where_the_verdict_turns_narrowly_a_level_is_measured_again() -> None:
    def levels(*reads_us: int) -> list[dict[str, Any]]:
        return [
            replace_level(Made(read=read * US).figures(), concurrency=2**at) for at, read in enumerate(reads_us)
        ]

    assert calibration.undecided(levels(100, 100, 100)) == []  # it turns nowhere
    assert calibration.undecided(levels(100, 100, 5000)) == []  # it turns clearly
    assert calibration.undecided(levels(100, 450, 600, 300)) == [2, 4]  # limits are 500 us less the way
    assert calibration.undecided(levels(600, 100)) == [1]
    assert calibration.undecided([level | {"others_share": 0.9} for level in levels(450, 600)]) == []
    assert calibration.undecided([]) == []


def test_the_median_of_measurements_hides_no_fault() -> None:
    one, two, three = Made().figures(), Made(late=5 * US).figures(), Made(late=90 * US).figures() | {"unmatched": 2}
    found = calibration.median([one, three, two])
    assert found["kernel"]["stamp_us"]["p50"] == 5.0 and found["concurrency"] == 2
    assert found["unmatched"] == 2 and found["stamp_source"] == "kernel"
    assert calibration.median([one]) == one
    alone = Made().figures("read")
    assert calibration.median([alone, alone])["kernel"] is None


def test_a_host_that_does_not_tell_the_wait_is_judged_without() -> None:
    level = Made().figures(wait_ns=None, others_share=None)
    assert level["wait_us_per_wake"] is level["others_share"] is None
    assert calibration.shortcomings(level, "kernel") == []


def test_stamps_hold_where_their_p99_is_below_a_hundredth_of_an_itl() -> None:
    assert calibration.stamps_hold(Made(late=199 * US).figures())
    assert not calibration.stamps_hold(Made(late=201 * US).figures())


# --- the self-test ----------------------------------------------------------------------------------------------------


def test_a_right_level_has_no_difference() -> None:
    assert Made().differences() == []


def at(made: Made, serial: int, token: int) -> int:
    """The place in the log of one record."""
    return next(place for place, record in enumerate(made.log) if record[1:] == (serial, token))


def test_a_missing_record_is_named() -> None:
    made = Made()
    made.log.pop(at(made, 8, 2))
    assert "log, request 8: token 2 missing" in made.differences()
    assert made.figures()["unmatched"] == 1


def test_a_doubled_record_is_named() -> None:
    made = Made()
    place = at(made, 8, 2)
    made.log.insert(place, made.log[place])
    assert "log, request 8: token 2 more than once" in made.differences()
    assert "tokens: 1 tokens of the log were not received exactly once" in made.differences()


def test_records_out_of_order_are_named() -> None:
    made = Made()
    one, other = at(made, 8, 2), at(made, 8, 3)
    made.log[one], made.log[other] = made.log[other], made.log[one]
    assert made.differences() == ["log, request 8: records out of order"]


@pytest.mark.parametrize(("token", "words"), [(RECEIVED, "record of its arrival"), (ENDED, "record of its end")])
def test_a_request_without_begin_or_end_is_named(token: int, words: str) -> None:
    made = Made()
    made.log.pop(at(made, 9, token))
    assert [one for one in made.differences() if one.startswith("log, request 9") and words in one]


def test_a_token_received_twice_or_never_is_named() -> None:
    made = Made()
    made.events.insert(1, made.events[1])
    assert "tokens: 1 tokens were received that are not in the log" in made.differences()
    made = Made()
    made.events.pop(1)
    assert "tokens: 1 tokens of the log were not received exactly once" in made.differences()


def test_tokens_in_another_order_are_named() -> None:
    made = Made()
    made.events[1], made.events[2] = made.events[2], made.events[1]
    assert "tokens: the stamps of 1 requests run backwards" in made.differences()
    assert "tokens: 1 are stamped before they were sent" in made.differences()


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("completion_tokens", 4, "completion_tokens is 4, the server's 5"),
        ("prompt_tokens", 299, "prompt_tokens is 299, the server's 300"),
        ("text_events", 6, "text_events is 6, the server's 5"),
        ("finish_reason", "stop", "finish_reason is stop, the server's length"),
        ("status", "truncated", "truncated"),
        ("server_request_id", "truth-00000099", "its answer is not in the log"),
        ("server_request_id", "truth-00000009", "rows: answers 9 in more than one row"),
        ("last_token_ns", T0, "trace: last_token_ns of 1 requests"),
    ],
)
def test_a_wrong_row_is_named(column: str, value: Any, words: str) -> None:
    made = Made()
    made.rows[1][column] = value
    assert [one for one in made.differences() if words in one]


def replace_level(level: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return level | changes
