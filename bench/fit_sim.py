"""Fit the simulated engine's profiles to the tables of the source report, in simulated time.

    python bench/fit_sim.py REFERENCE.json [--profile vllm-spec] [--write] [--leave-one-out]

REFERENCE.json holds, for each deployment and concurrency, the figures of the report's Appendix A (ttft_mean, itl_p90
...). About ten seconds a profile; --write puts the knots into fastload/sim/profiles.

What is fit, and what is a mechanism
    Two knots a level: the prefill time and the decode time (with speculation: what drafting and verifying add) at that
    batch, until closed loops of 10 rounds return the level's mean TTFT and mean ITL (see `aim`). Everything else (P90,
    TPS, latency, the queue at the cap, those who decode standing still while others prefill) follows from MECHANISMS,
    whose few parameters hold for all levels of a deployment and were chosen by hand and by random search on the P90s.
    The source's own TTFT is not smooth in concurrency, and so the prefill knots are not: they are a fit.
    --leave-one-out leaves out one inner level, takes its knots from its neighbours, and prints how far off the level's
    means then are: information, for the source's levels do differ by more than its noise.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fastload.sim import simulate
from fastload.sim.profiles import Decode, Knots, Prefill, Profile, Scheduler, Speculation
from fastload.sim.speculation import mean_tokens

LEVELS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = (0,)  # the seed that sweeps use
ITERATIONS = 60
MEAN_GIVES = 0.025
MEANS = ("ttft_mean", "itl_mean")
CLOSE = 0.003  # of the mean asked for
Table = Mapping[str, Mapping[str, float]]  # concurrency -> figure -> value
Found = dict[int, dict[str, float]]

SOURCE = (
    "Kimi K3 on a DGX-B300 (TP 8), 128 tokens in and out: {what}. Fit by bench/fit_sim.py to Appendix A of Openzeka's "
    "report of July 2026 (measured with CordatusAI/llm-benchmark)."
)
# Beyond 128 tokens the report has nothing: 20 us a token (50k tokens/s) is an assumption, as are the chances of
# acceptance; only decode time / tokens a step is in the figures.
TOKEN_US = 20.0


def chances(first: float) -> tuple[float, ...]:
    """Seven positions, each a little less likely than the one before."""
    return tuple(round(first - 0.03 * position, 2) for position in range(7))


MECHANISMS: dict[str, tuple[str, Scheduler, float, Speculation | None]] = {
    # profile: what it is, scheduler, prefill jitter, speculation (its knots are fitted)
    "vllm-direct": ("vLLM", Scheduler(front_ms=2.5, max_batched_tokens=4096), 0.2, None),
    "vllm-spec": (
        "vLLM with DSpark",
        Scheduler(front_ms=0.5, prefill_gap_ms=70.0),
        0.1,
        Speculation(chances(0.80), Knots((1,), (0.0,)), spread=0.5),
    ),
    "sglang-direct": (
        "SGLang",
        Scheduler(front_ms=1.0, max_batched_tokens=3072, mixed=False, late_results=True),
        0.18,
        None,
    ),
    "sglang-spec": (
        "SGLang with DSpark",
        Scheduler(max_num_seqs=34, front_ms=10.0, mixed=False, refill=5, prefill_gap_ms=80.0),
        0.05,
        Speculation(chances(0.80), Knots((1,), (0.0,)), spread=0.4),
    ),
}
BASE = {"vllm-spec": "vllm-direct", "sglang-spec": "sglang-direct"}  # whose decode times they add to


def figures(times: Sequence[simulate.Times]) -> dict[str, float]:
    """The figures of one level under the names of the reference; percentiles by nearest rank."""
    found = {}
    columns = {
        "ttft": [one.ttft_ms for one in times],
        "itl": [one.itl_ms or 0.0 for one in times],
        "tps": [one.tps for one in times],
        "lat": [one.latency_s for one in times],
    }
    for name, values in columns.items():
        found[f"{name}_mean"] = math.fsum(values) / len(values)
        found[f"{name}_p90"] = sorted(values)[-(-9 * len(values) // 10) - 1]
    return found


def measure(profile: Profile, seeds: Sequence[int] = (0,), levels: Sequence[int] = LEVELS) -> Found:
    """Each level's figures, the mean over seeds."""
    runs = [simulate.sweep(profile, levels, seed=seed) for seed in seeds]
    found: Found = {}
    for level in levels:
        each = [figures(run[level]) for run in runs]
        found[level] = {name: math.fsum(one[name] for one in each) / len(each) for name in each[0]}
    return found


def fit(name: str, table: Table, base: Profile | None, levels: Sequence[int] = LEVELS) -> Profile:
    """The profile whose closed loops return the table's mean TTFT and ITL at these levels.

    A level above the cap has no batch of its own, hence no knots: it must follow from the queue.
    """
    what, scheduler, jitter, speculation = MECHANISMS[name]
    fitted = [level for level in levels if level <= scheduler.max_num_seqs]
    wanted = [table[str(level)] for level in fitted]
    prefill = [0.8 * one["ttft_mean"] for one in wanted]
    decode = [one["itl_mean"] for one in wanted]
    tokens = 1.0
    if speculation is not None and base is not None:
        tokens = mean_tokens(speculation)
        pairs = zip(wanted, fitted, strict=True)
        decode = [max(one["itl_mean"] * tokens * 0.7 - base.decode.knots.at(level), 0.1) for one, level in pairs]
    profile = Profile(name, SOURCE.format(what=what), Prefill(Knots((1,), (0.0,))), Decode(Knots((1,), (0.0,))))
    best = (math.inf, profile)
    for round_number in range(ITERATIONS):
        knots = Knots(tuple(fitted), tuple(round(ms, 3) for ms in decode))
        profile = replace(
            profile,
            prefill=Prefill(Knots(tuple(fitted), tuple(round(ms, 2) for ms in prefill)), TOKEN_US, jitter),
            decode=Decode(knots) if speculation is None or base is None else base.decode,
            scheduler=scheduler,
            speculation=None if speculation is None else replace(speculation, knots=knots),
        )
        found = measure(profile, SEEDS, levels)
        step = 0.7 if round_number < ITERATIONS // 2 else 0.35
        off = 0.0
        for place, (level, one) in enumerate(zip(fitted, wanted, strict=True)):
            ratio = one["ttft_mean"] * aim_ttft(one, found[level]) / found[level]["ttft_mean"]
            lacking = one["itl_mean"] * aim(one, found[level]) - found[level]["itl_mean"]
            prefill[place] = max(prefill[place] * ratio**step, 1.0)
            decode[place] = max(decode[place] + lacking * tokens * step, 0.0 if tokens > 1 else 0.5)
            off = max(off, abs(ratio - 1), abs(lacking) / one["itl_mean"])
        # who is prefilled together changes in jumps, and so do the figures: the last round need not be the best
        worst = max(abs(found[level][name] / table[str(level)][name] - 1) for level in levels for name in MEANS)
        best = min(best, (off + worst, profile), key=lambda each: each[0])
        if off < CLOSE:
            break
    return best[1]


def aim(wanted: Mapping[str, float], found: Mapping[str, float]) -> float:
    """The share of the report's mean ITL to aim at: halfway between meeting mean ITL and meeting mean TPS.

    Both hang on one knot, and on how much requests differ (a mean of 1 / latency). Where the report's TPS and latency
    do not belong together (its answers have 128 tokens), ITL alone.
    """
    if wanted["tps_mean"] * wanted["lat_mean"] / 128 > 1.3:
        return 1.0
    lost = (found["tps_mean"] * found["lat_mean"]) / (wanted["tps_mean"] * wanted["lat_mean"])
    return min(max(lost**0.5, 1 - MEAN_GIVES), 1 + MEAN_GIVES)


def aim_ttft(wanted: Mapping[str, float], found: Mapping[str, float]) -> float:
    """The share of the report's mean TTFT to aim at: towards its P90 too, by a few percent of the mean at most."""
    lost = (wanted["ttft_p90"] / wanted["ttft_mean"]) / (found["ttft_p90"] / found["ttft_mean"])
    return min(max(lost**0.5, 1 - MEAN_GIVES), 1 + MEAN_GIVES)


def off_by(found: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    """How far each figure is from the report's, in percent; ! beyond 5 % (means) or 10 % (P90)."""
    words = []
    for name in found:
        percent = 100 * (found[name] / wanted[name] - 1)
        words.append(f"{name} {percent:+.1f}{'!' if abs(percent) > (5 if name.endswith('mean') else 10) else ''}")
    return "  ".join(words)


def toml(profile: Profile) -> str:
    """The profile as the text of its file."""
    scheduler, speculation = profile.scheduler, profile.speculation
    lines = [
        f'name = "{profile.name}"',
        f'source = "{profile.source}"',
        "",
        "[scheduler]",
        f"max_num_seqs = {scheduler.max_num_seqs}",
        f"max_batched_tokens = {scheduler.max_batched_tokens}",
        f"mixed = {str(scheduler.mixed).lower()}",
        f"late_results = {str(scheduler.late_results).lower()}",
        f"front_ms = {scheduler.front_ms}",
        f"refill = {scheduler.refill}",
        f"prefill_gap_ms = {scheduler.prefill_gap_ms}",
        "",
        "[prefill] # knots: fitted to mean TTFT. token_us: assumed, the report has no other length than 128",
        *_knots(profile.prefill.knots),
        f"token_us = {profile.prefill.token_us}",
        f"jitter = {profile.prefill.jitter}",
        "",
        "[decode] # knots: fitted to mean ITL" + (" of the engine without speculation" if speculation else ""),
        *_knots(profile.decode.knots),
    ]
    if speculation is not None:
        lines += [
            "",
            "[speculation] # knots, what drafting and verifying add: fitted to mean ITL. acceptance: assumed",
            f"acceptance = {list(speculation.acceptance)}",
            f"spread = {speculation.spread}",
            *_knots(speculation.knots),
        ]
    return "\n".join([*lines, ""])


def _knots(knots: Knots) -> list[str]:
    return [f"batch = {list(knots.batch)}", f"ms = {list(knots.ms)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--profile", choices=MECHANISMS, action="append")
    parser.add_argument("--write", action="store_true", help="put the fitted profiles into the package")
    parser.add_argument("--leave-one-out", action="store_true")
    asked = parser.parse_args()
    tables = json.loads(asked.reference.read_text())
    folder = Path(__file__).resolve().parent.parent / "fastload" / "sim" / "profiles"
    for name in asked.profile or MECHANISMS:
        base = fit(BASE[name], tables[BASE[name]], None) if name in BASE else None
        profile = fit(name, tables[name], base)
        print(f"== {name}: off by %, mean over seeds {SEEDS}")
        for level, found in measure(profile, SEEDS).items():
            print(f"c={level:<3} {off_by(found, tables[name][str(level)])}")
        if asked.write:
            (folder / f"{name}.toml").write_text(toml(profile))
        if asked.leave_one_out:
            print("   left out: its means, by the knots of its neighbours")
            for level in LEVELS[1:-1]:
                others = [one for one in LEVELS if one != level]
                guessed = fit(name, tables[name], base, others)
                found = measure(guessed, SEEDS, [level])[level]
                means = {figure: value for figure, value in found.items() if figure.endswith("mean")}
                print(f"   c={level:<3} {off_by(means, tables[name][str(level)])}")


if __name__ == "__main__":
    main()
