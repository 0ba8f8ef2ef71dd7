"""A server that closes idle connections just when the next request comes: bug report W58, ten times as fast."""

import random
import sys
from pathlib import Path

from fastload import _timing as t

sys.path.insert(0, str(Path(__file__).with_name("load")))

from rig import Rig  # noqa: E402
from scripted import Call, quick, serve  # noqa: E402

IDLE_S = 0.030
REQUESTS = 120


def test_no_request_is_lost_to_a_connection_that_was_just_closed() -> None:
    def script(call: Call) -> None:
        quick(call)
        call.sock.settimeout(IDLE_S)

    rng = random.Random(58)
    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, REQUESTS)
        due_ns = t.now_ns()
        for _ in range(REQUESTS):
            rig.arm(1, due_ns=due_ns)
            due_ns += int(rng.uniform(IDLE_S - 0.001, IDLE_S + 0.001) * 1e9)
        rig.finish()
        answered = len(server.requests)
    rows = sorted(rig.rows, key=lambda row: row["request"])
    assert [row["request"] for row in rows] == list(range(REQUESTS))
    assert {(row["end"], row["http_status"]) for row in rows} == {(t.END_COMPLETE, 200)}
    retried = [row for row in rows if row["row_flags"] & t.RF_RETRIED]
    assert len(retried) == rig.count("stale_retries") and rig.count("failed") == 0
    assert {row["attempt"] for row in retried} <= {2}
    # the clock of a request sent again starts with its second sending
    assert all(row["sent_ns"] == rig.events[row["request"]][-1 - row["events"]]["stamp_ns"] for row in retried)
    # no answer was asked for twice: what is sent again had not been taken
    assert answered == REQUESTS
    print(f"{len(retried)} of {REQUESTS} were sent again, {rig.count('idle_closed')} connections were seen closing")
