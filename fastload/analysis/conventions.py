"""The rules by which limits are judged and users counted: ours, and those of the two sources whose figures we check.

A convention is a whole set of rules: they are switched together, never one by one, so that a figure can be named by
the set it follows. Frozen data; what each rule does stands where it is applied (slo.py, speculation.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Convention:
    """One set of rules.

    tps_tail: which tail of TPS a percentile means: "low" is what that share of users gets at least (the one that
    hurts), "upper" the plain percentile. failures_count: failed requests are the worst values of a tail, and a level
    with more than 1 % of them fails. c_max: "unbroken" is the highest level such that it and every lower one pass,
    "last" the highest that passes. users_latency: the latency in N = c_max (1 + think time / latency).
    users_rounding: N to the nearest whole number, or cut. aggregate, rps: keys of a level; what "aggregate output" and
    "RPS" mean. break_even: "crossing" interpolates over log2 of the load, "nearest" takes the level nearest to 1.
    """

    name: str
    tps_tail: Literal["low", "upper"]
    failures_count: bool
    c_max: Literal["unbroken", "last"]
    users_latency: Literal["mean", "p90"]
    users_rounding: Literal["nearest", "down"]
    aggregate: Literal["aggregate_tok_s", "aggregate_tok_s_kimi_report"]
    break_even: Literal["crossing", "nearest"]


FASTLOAD = Convention(
    name="fastload",
    tps_tail="low",
    failures_count=True,
    c_max="unbroken",
    users_latency="mean",
    users_rounding="nearest",
    aggregate="aggregate_tok_s",
    break_even="crossing",
)

KIMI_REPORT = Convention(
    name="kimi-report",
    tps_tail="upper",
    failures_count=False,
    c_max="unbroken",
    users_latency="mean",
    users_rounding="nearest",
    aggregate="aggregate_tok_s_kimi_report",
    break_even="nearest",
)

CORDATUS = Convention(
    name="cordatus",
    tps_tail="upper",
    failures_count=False,
    c_max="last",
    users_latency="p90",
    users_rounding="down",
    aggregate="aggregate_tok_s_kimi_report",
    break_even="nearest",
)

CONVENTIONS: Mapping[str, Convention] = {each.name: each for each in (FASTLOAD, KIMI_REPORT, CORDATUS)}
