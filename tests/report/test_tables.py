"""The table: goldens of the source report's own figures at both widths, and what must be seen in any case."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastload.report.tables import SIMULATED, number, plain, printable, sweep_table

HERE = Path(__file__).parent
KIMI = HERE.parent / "analysis" / "data" / "kimi-k3.json"


def distribution(
    mean: float, p90: float, p50: float | None = None, p10: float | None = None
) -> dict[str, Any]:
    return {
        "mean": mean,
        "p10": p10,
        "p50": p50,
        "p90": p90,
        "p99": None,
        "n": 10,
        "p90_ci95": None,
        "p10_ci95": None,
    }


def level(row: dict[str, Any]) -> dict[str, Any]:
    """A level as the source's table has it; what it does not say is null."""
    return {
        "level": row["c"],
        "complete": True,
        "measured": max(10 * row["c"], 30),
        "ok": max(10 * row["c"], 30),
        "failed": 0,
        "errors": {},
        "ttft_ms": distribution(row["ttft_mean"], row["ttft_p90"], row["ttft_mean"]),
        "itl_ms": distribution(row["itl_mean"], row["itl_p90"], row["itl_mean"]),
        "tps": distribution(row["tps_mean"], row["tps_p90"], row["tps_mean"], row["tps_mean"] * 0.9),
        "latency_s": distribution(row["lat_mean"], row["lat_p90"], row["lat_mean"]),
        "system_rps": row["c"] / row["lat_mean"],
        "stream_rps": row["rps"],
        "aggregate_tok_s": 128 * row["c"] / row["lat_mean"],
        "in_flight_mean": row["c"] * 0.999,
        "slo": row["ttft_p90"] <= 1000,
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    """A sweep with the figures of the source's vLLM direct rows."""
    rows = json.loads(KIMI.read_text())["levels"]["vllm-direct"]
    return {
        "schema": 1,
        "definitions": 1,
        "run_id": "20261130T221801Z-kimi",
        "status": "complete",
        "interrupted": False,
        "simulated": False,
        "target": {"url": "http://127.0.0.1:8000", "model": "moonshotai/Kimi-K3", "labels": {}},
        "rules": {"percentiles": "percentiles: nearest rank", "itl": "ITL is per request (TPOT)"},
        "verdict": {
            "status": "valid",
            "reasons": [],
            "notes": ["stamps: kernel (stamp error not calibrated on this host)"],
        },
        "slo": {"ttft_ms": 1000.0, "tps": 15.0, "percentile": "p90", "convention": "fastload"},
        "levels_not_run": [],
        "levels": [level(row) for row in rows],
        "capacity": {"c_max": 32, "l_mean_s": 3.65, "users": 427, "think_time_s": 45.0},
    }


def troubled(summary: dict[str, Any]) -> dict[str, Any]:
    """The same run simulated, interrupted in its third level, with failures and nulls."""
    run = copy.deepcopy(summary)
    run |= {
        "simulated": True,
        "status": "interrupted",
        "interrupted": True,
        "levels_not_run": [8, 16, 32, 64],
    }
    run["levels"] = run["levels"][:3]
    last = run["levels"][-1]
    last |= {"complete": False, "measured": 12, "ok": 8, "failed": 4, "errors": {"reset": 3, "cancelled": 1}}
    last |= {"itl_ms": distribution(None, None), "system_rps": None, "aggregate_tok_s": None}  # type: ignore[arg-type]
    run["verdict"] = {
        "status": "suspect",
        "reasons": ["c=2: in flight 1.97 of 2 (-1.5 %)"],
        "notes": ["WARNING: 12 of 40 answers stopped early: 100.3 of 128 tokens on average"],
    }
    return run


@pytest.mark.parametrize("width", [120, 80])
@pytest.mark.parametrize("case", ["sound", "troubled"])
def test_plain_golden(summary: dict[str, Any], case: str, width: int, update: bool) -> None:
    text = plain(summary if case == "sound" else troubled(summary), width)
    golden = HERE / "golden" / f"sweep-{case}-{width}.txt"
    if update:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [120, 80])
def test_rich_shows_the_figures_of_plain(summary: dict[str, Any], width: int) -> None:
    run = troubled(summary)
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(sweep_table(run))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.split() == plain(run, width).split()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


def test_markup_and_control_characters_of_the_server_are_only_text(summary: dict[str, Any]) -> None:
    summary["target"]["model"] = "evil[bold]\x1b[31m/model\n"
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(sweep_table(summary))
    assert isinstance(console.file, io.StringIO)
    assert "evil[bold]?[31m/model? at" in console.file.getvalue()
    assert "\x1b" not in plain(summary)


def test_simulated_is_said_above_and_below(summary: dict[str, Any]) -> None:
    assert SIMULATED not in plain(summary)
    assert plain(troubled(summary)).count("SIMULATED") == 2


def test_large_figures_are_dealt_to_two_tables(summary: dict[str, Any]) -> None:
    for each in summary["levels"]:
        for name in ("ttft_ms", "itl_ms", "latency_s"):
            each[name] = distribution(123456.0, 123456.0, 123456.0)
    lines = plain(summary, 120).splitlines()
    assert len([line for line in lines if line.split()[:1] == ["64"]]) == 2
    assert max(map(len, lines)) <= 120


def test_no_levels(summary: dict[str, Any]) -> None:
    summary |= {
        "levels": [],
        "verdict": {"status": "invalid", "reasons": ["no measured request finished"], "notes": []},
    }
    assert "verdict: INVALID\n  - no measured request finished" in plain(summary)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (66.5, "66.50"),
        (9.46, "9.46"),
        (99.996, "100.0"),
        (731.7, "731.7"),
        (999.96, "1000"),
        (4752.6, "4753"),
        (99999.4, "99999"),
        (0.21, "0.210"),
        (0.99951, "1.00"),
        (0.0004, "0.0004"),
    ],
)
def test_numbers_fit_five_characters(value: float | None, text: str) -> None:
    assert number(value) == text


def test_printable_keeps_letters_of_all_scripts() -> None:
    assert printable("Türkçe 模型\t\x00") == "Türkçe 模型??"
