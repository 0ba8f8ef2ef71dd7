"""The chart of peers.py's JSON: how far the reported TTFT is from the truth, by concurrency.

    python bench/chart.py peers.json OUT    writes OUT.png and OUT.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

# Okabe and Ito's colours, told apart by the colour-blind; a marker and a dash each, for print in grey
NAMES = {
    "fastload": "fastload",
    "sglang_rust": "SGLang's Rust client",
    "aiohttp_uvloop_orjson": "aiohttp loop, uvloop, orjson",
    "aiohttp": "aiohttp loop",
    "vllm": "vllm bench serve",
    "guidellm": "guidellm",
    "aiperf": "AIPerf",
    "httpx": "httpx loop",
    "openai": "openai SDK loop",
}
STYLES = dict(
    zip(
        NAMES,
        zip(
            ("#000000", "#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#8A8A8A", "#5B4B8A"),
            ("o", "s", "^", "v", "D", "P", "X", "<", ">"),
            ("-", "--", "-.", ":", "--", "-.", ":", "--", "-."),
            strict=True,
        ),
        strict=True,
    )
)


def main() -> None:
    """Read, draw, write twice."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    told = json.loads(source.read_text())
    draw(told, out)


def draw(told: dict[str, object], out: Path) -> None:
    """One line a client: median over the runs of |mean TTFT reported - true|, its range over the runs as a bar."""
    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "fastload", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7.2, 4.8), layout="constrained")
    levels = sorted(map(int, told["data"]))  # type: ignore[call-overload]
    for name, label in NAMES.items():
        points = []
        for c in levels:
            errors = sorted(abs(run["ttft_mean"]) for run in told["data"][str(c)].get(name, []))  # type: ignore[index]
            if errors:
                points.append((c, errors[len(errors) // 2], errors[0], errors[-1]))
        if points:
            x, middle = [point[0] for point in points], [point[1] for point in points]
            spans = [[m - a for _, m, a, _ in points], [b - m for _, m, _, b in points]]
            colour, marker, dash = STYLES[name]
            axes.errorbar(
                x, middle, yerr=spans, label=label, color=colour, marker=marker, linestyle=dash, capsize=2,
                linewidth=2.2 if name == "fastload" else 1.2, markersize=6,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(levels, [str(c) for c in levels])
    axes.set_xlabel("concurrent streams")
    axes.set_ylabel("|mean TTFT reported - true|, ms (log scale)")
    axes.set_title("TTFT error of load generators, simulated server on loopback\n(50 ms, then a token every 20 ms)")
    axes.grid(True, which="major", color="#D0D0D0", linewidth=0.6)
    runs = told["runs"]
    host = told["machine"]
    figure.text(
        0.01, -0.03, f"median of {runs} runs, bars: their range. {host['cpu']}, {host['cores']} cores, "  # type: ignore[index]
        f"Linux {host['kernel']}; client on one core. bench/peers.py", fontsize=7, color="#404040",  # type: ignore[index]
    )
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    for kind in ("png", "svg"):
        meta = {"Date": None} if kind == "svg" else None
        figure.savefig(out.with_suffix(f".{kind}"), dpi=160, metadata=meta, bbox_inches="tight")


if __name__ == "__main__":
    main()
