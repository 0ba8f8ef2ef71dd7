"""Do the simulated engines give the source report's tables back? One command, real time or simulated.

    python bench/twin.py [--profile vllm-spec] [--sim-speed 1] [--levels 1,2,4] [--in-simulated-time]

Each profile is swept as the report was (levels 1 to 64, 10 rounds, no minimum), by the real client through real
sockets, about half an hour in all; with --in-simulated-time by the pure model, in seconds. Then, against Appendix A:
means of TTFT, ITL, TPS and latency within 5 %, their P90 within 10 %; speculative speed-up within 0.05, break-even,
SLO cells, C_max and users by the report's own conventions. What is known to be off, because the source is at odds with
itself or the model has one parameter for all levels, is named with the reason (ODD) and is no failure. In real time the
engine's own /metrics are compared with what the client saw. Exit code 1 where something else is off.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fit_sim import LEVELS, Found, measure

from fastload import sim
from fastload.analysis.slo import Mark, Slo, capacity, judge
from fastload.sim import profiles

REFERENCE = Path(__file__).parent / "reference"
PROFILES = ("vllm-direct", "vllm-spec", "sglang-direct", "sglang-spec")
TOLERANCE = {"mean": 5.0, "p90": 10.0}
NEAR = 0.10  # an SLO cell may differ where the source lies so near to the limit

_TEN = "ten requests of ten prompts: their P90 is the ninth of ten values, and they differ less than the hundred do"
_OUTLIER = "the report's P90 lies below its own mean: one outlier in ten"
_TWO_SLOW = "two of ten took 630 ms: P90 / mean is 1.40 with one request, 1.02 with two"
_TWO_SPEEDS = "mean TPS x mean latency is 189 tokens where answers have 128: the level ran at more than one speed"
_SPREAD = "requests differ more here (TPS x latency is 143 tokens) than at the other levels; the model has one spread"
_PEAK = "P90 / mean of ITL is 1.52, against 1.3 at 4 and 16: the model has one spread for all levels"
_UNEVEN = "P90 / mean of ITL is 1.16, 1.51, 1.61, 1.36 at 1, 2, 4, 8: the model has one spread for all levels"
_DRAIN = "the report's level runs empty at its end and its last requests are fast; fastload keeps the load up"
_FIRST_WAVE = "the report's slowest wave is cold (P90 of latency is off as much as that of TTFT); ours are alike"
_EARLY = "in the report over a tenth of a wave is prefilled early, in the model the first of 16"
# (profile, level, figure) -> why it is known to be off: the source at odds with itself, or a limit of the model
ODD: dict[tuple[str, int, str], str] = {
    ("vllm-direct", 16, "itl_p90"): _EARLY,
    ("vllm-spec", 1, "itl_p90"): _TEN,
    ("vllm-spec", 1, "tps_p90"): _TEN,
    ("vllm-spec", 1, "lat_p90"): _TEN,
    ("vllm-spec", 8, "itl_p90"): _PEAK,
    ("vllm-spec", 8, "lat_p90"): _PEAK,
    ("vllm-spec", 64, "tps_p90"): _DRAIN,
    ("sglang-direct", 1, "ttft_p90"): _OUTLIER,
    ("sglang-direct", 32, "ttft_p90"): _FIRST_WAVE,
    ("sglang-direct", 64, "ttft_p90"): _FIRST_WAVE,
    ("sglang-spec", 1, "ttft_p90"): _TWO_SLOW,
    ("sglang-spec", 4, "itl_p90"): _UNEVEN,
    ("sglang-spec", 8, "tps_p90"): _UNEVEN,
    ("sglang-spec", 16, "tps_mean"): _TWO_SPEEDS,
    ("sglang-spec", 16, "tps_p90"): _TWO_SPEEDS,
    ("sglang-spec", 32, "tps_mean"): _SPREAD,
    ("sglang-spec", 32, "tps_p90"): _SPREAD,
}


def odd(profile: str, level: int, figure: str) -> str | None:
    """Why this figure is known to be off; None if it must be met."""
    return ODD.get((profile, level, figure))


def compare(profile: str, found: Found, table: Mapping[str, Any]) -> list[str]:
    """Print a profile's table; returns what is off and not odd."""
    misses = []
    reasons: dict[str, str] = {}
    print(f"\n{profile}: ours (percent off the report); ! beyond tolerance, ~ beyond it for a known reason")
    print("   c" + "".join(f"{name:>16}" for name in next(iter(found.values()))))
    for level, figures in found.items():
        cells = []
        for name, ours in figures.items():
            theirs = table[str(level)][name]
            percent = 100 * (ours / theirs - 1)
            mark = " "
            if abs(percent) > TOLERANCE[name[-4:].lstrip("_")]:
                reason = odd(profile, level, name)
                mark = "~" if reason else "!"
                if reason:
                    reasons[f"c={level} {name}"] = reason
                else:
                    misses.append(f"{profile} c={level}: {name} {ours:.4g}, the report {theirs:.4g} ({percent:+.1f} %)")
            cells.append(f"{ours:9.4g} {percent:+5.1f}{mark}")
        print(f"{level:4}" + "".join(f"{cell:>16}" for cell in cells))
    for where, reason in reasons.items():
        print(f"  ~ {where}: {reason}")
    return misses


def compare_service(profile: str, found: Found, table: Mapping[str, Any], derived: Mapping[str, Any]) -> list[str]:
    """SLO cells, C_max and users at P90, as the report reads them (upper P90 of TPS)."""
    misses = []
    slo = Slo(convention="kimi-report")
    marks, cells, theirs = [], [], derived["slo_matrix_p90"][profile]
    for level, figures in found.items():
        judged = judge(slo, figures["ttft_p90"], figures["tps_p90"], 0.0, True)
        marks.append(Mark(level, judged.both, figures["lat_mean"]))
        cell = "NY"[bool(judged.ttft)] + "NY"[bool(judged.tps)]
        cells.append(cell)
        wanted = theirs[derived["slo_matrix_p90"]["levels"].index(level)]
        if cell != wanted:
            source = table[str(level)]
            near = [
                name
                for name, value, limit, place in (
                    ("TTFT", source["ttft_p90"], slo.ttft_ms, 0),
                    ("TPS", source["tps_p90"], slo.tps, 1),
                )
                if cell[place] != wanted[place] and round(abs(value / limit - 1), 2) <= NEAR
            ]
            if len(near) == sum(ours != its for ours, its in zip(cell, wanted, strict=True)):
                print(f"  SLO c={level}: {cell}, the report {wanted}: within 10 % of the limit ({', '.join(near)})")
            else:
                misses.append(f"{profile} c={level}: SLO {cell}, the report {wanted}")
    ours, its = capacity(marks), derived["capacity_p90"][profile]
    print(f"  SLO {' '.join(cells)}; C_max {ours.c_max} ({its['c_max']}), users {ours.users} ({its['users']})")
    if tuple(found) == LEVELS:
        if ours.c_max != its["c_max"]:
            misses.append(f"{profile}: C_max {ours.c_max}, the report {its['c_max']}")
        elif ours.users is None or abs(ours.users / its["users"] - 1) > 0.05:
            misses.append(f"{profile}: users {ours.users}, the report {its['users']}")
    return misses


def compare_speculation(engine: str, direct: Found, spec: Found, derived: Mapping[str, Any]) -> list[str]:
    """TPS of speculation over TPS without, level by level."""
    misses, ratios = [], {}
    for level in spec:
        ratio = ratios[level] = spec[level]["tps_mean"] / direct[level]["tps_mean"]
        wanted = derived["spec_over_direct"][engine][str(level)]
        if abs(ratio - wanted) > 0.05 and not odd(f"{engine}-spec", level, "tps_mean"):
            misses.append(f"{engine} c={level}: speed-up {ratio:.2f}, the report {wanted:.2f}")
    even = min(ratios, key=lambda level: abs(ratios[level] - 1))
    print(f"{engine} speed-up " + " ".join(f"c={level} {ratio:.2f}" for level, ratio in ratios.items()), end="")
    print(f"; break-even at {even} ({derived['break_even_level'][engine]})")
    if tuple(spec) == LEVELS and even != derived["break_even_level"][engine]:
        misses.append(f"{engine}: break-even at {even}, the report {derived['break_even_level'][engine]}")
    return misses


def sweep(profile: str, levels: Sequence[int], speed: float, output: str) -> tuple[Found, list[str]]:
    """A real sweep over sockets; its figures (in the engine's time), and where the engine's /metrics disagree."""
    with sim.start(sim.Options(profile=profile, speed=speed)) as url:
        start = "import sys; from fastload.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "sweep", "--url", url, "--levels", ",".join(map(str, levels))]
        command += ["--rounds", "10", "--min-requests", "0", "--output", output, "--name", profile, "--json", "--quiet"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"fastload sweep ended with code {done.returncode}")
        summary = json.loads(done.stdout)
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            metrics = page.read().decode()
    found: Found = {}
    for level in summary["levels"]:
        figures = found[level["level"]] = {}
        for name, key, scale in (
            ("ttft", "ttft_ms", speed),
            ("itl", "itl_ms", speed),
            ("tps", "tps", 1 / speed),
            ("lat", "latency_s", speed),
        ):
            for statistic in ("mean", "p90"):
                figures[f"{name}_{statistic}"] = level[key][statistic] * scale
    print(f"  {summary['run_id']}: {summary['verdict']['status']}")
    return found, compare_metrics(profile, metrics, Path(output, summary["run_id"]))


def compare_metrics(profile: str, page: str, run_path: Path) -> list[str]:
    """What the engine counted against the client's rows, warm-up and fill included."""
    from fastload import open_run

    told: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if "_bucket" not in name:
                told[name] = told.get(name, 0.0) + float(value)
    run = open_run(run_path, repair=False)
    rows: list[dict[str, Any]] = []
    names = ["status", "prompt_tokens", "completion_tokens", "ttft_ms", "n_first", "events"]
    for level in run.manifest["levels"]:  # type: ignore[attr-defined]
        rows += run.requests(level["dir"]).select(names).to_pylist()
    rows = [row for row in rows if row["status"] == "ok"]
    requests, tokens = len(rows), sum(row["completion_tokens"] for row in rows)
    # Before its first row the client may ask for a single token, to see whether the endpoint answers.
    looks = int(told["vllm:request_success_total"]) - requests
    prompts = sum(row["prompt_tokens"] for row in rows)
    pairs = [
        ("requests (but for a first look)", told["vllm:request_success_total"], requests, 1.0),
        ("prompt tokens", told["vllm:prompt_tokens_total"], prompts, 64.0 * looks),
        ("generated tokens", told["vllm:generation_tokens_total"] - looks, tokens, 0.0),
        (
            "mean TTFT, ms",
            1000 * told["vllm:time_to_first_token_seconds_sum"] / told["vllm:time_to_first_token_seconds_count"],
            sum(row["ttft_ms"] for row in rows) / requests,
            1.0,
        ),
    ]
    outputs = told["vllm:time_to_first_token_seconds_count"] + told["vllm:inter_token_latency_seconds_count"]
    events = _text_events(run)
    each = told["vllm:generation_tokens_total"] / outputs
    pairs.append(("tokens an event", each, tokens / events, 0.01 if looks else 1e-9))
    if "vllm:spec_decode_num_drafts_total" in told:
        # the last step of an answer is cut to what was asked for, so the client sees a little less
        drafted = 1 + told["vllm:spec_decode_num_accepted_tokens_total"] / told["vllm:spec_decode_num_drafts_total"]
        pairs.append(("tokens a draft", drafted, (tokens - requests) / (events - requests), 0.05 * drafted))
    misses = []
    for name, engine, client, allowed in pairs:
        print(f"  /metrics {name}: {engine:.6g}, the client {client:.6g}")
        if abs(engine - client) > allowed:
            misses.append(f"{profile}: /metrics {name} {engine:.6g}, the client {client:.6g}")
    return misses


def _text_events(run: Any) -> int:
    """How many events of the run hold text."""
    return sum(
        1
        for level in run.manifest["levels"]
        for row in run.tokens(level["dir"]).select(["bytes"]).to_pylist()
        for size in row["bytes"]
        if size
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, action="append")
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)))
    parser.add_argument("--sim-speed", type=float, default=1.0, help="real time: run the engine so many times faster")
    parser.add_argument("--in-simulated-time", action="store_true", help="the pure model, no sockets")
    parser.add_argument("--output", help="keep the runs in this directory")
    asked = parser.parse_args()
    levels = [int(level) for level in asked.levels.split(",")]
    tables = json.loads((REFERENCE / "kimi-k3-b300.json").read_text())
    derived = json.loads((REFERENCE / "kimi-k3-derived.json").read_text())
    chosen = asked.profile or PROFILES
    misses: list[str] = []
    measured: dict[str, Found] = {}
    how = "in simulated time" if asked.in_simulated_time else f"simulated x{asked.sim_speed:g}, over sockets"
    print(f"four engines without a GPU, {how}: {', '.join(chosen)}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen:
            if asked.in_simulated_time:
                measured[name] = measure(profiles.load(name), levels=levels)
            else:
                measured[name], wrong = sweep(name, levels, asked.sim_speed, asked.output or scratch)
                misses += wrong
            misses += compare(name, measured[name], tables[name])
            misses += compare_service(name, measured[name], tables[name], derived)
    print()
    for engine in ("vllm", "sglang"):
        if f"{engine}-direct" in measured and f"{engine}-spec" in measured:
            pair = measured[f"{engine}-direct"], measured[f"{engine}-spec"]
            misses += compare_speculation(engine, *pair, derived)
    print(f"\n{len(misses)} off" + (":" if misses else ": the tables come back"))
    for miss in misses:
        print(f"  {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
