"""The report's lines: a golden of the Kimi tables, plain where the output holds no signs, and every mark explained."""

from pathlib import Path
from typing import Any

import pytest

from fastload.analysis.configuration import configurations
from fastload.analysis.overview import overview
from fastload.analysis.slo import Slo
from fastload.report.overview import ASCII, grid, plain
from fastload.report.tables import SIMULATED
from fastload.trace import open_run
from fastload.trace.formats.readers import read
from fastload.trace.imported import write_imported

HERE = Path(__file__).parent
TABLES = HERE.parent / "analysis" / "data" / "kimi-k3-b300.json"


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """The tables by their source's convention; the ids of the runs without their date."""
    limits = Slo(convention="kimi-report")
    runs = [open_run(write_imported(tmp_path, each.name, each.told, each.labels)) for each in read(TABLES)]
    found = overview(configurations(runs, limits), limits)
    for one in found["configurations"]:
        one["run_id"] = f"20260701T000000Z-{one['name']}"
    return found


@pytest.mark.parametrize("width", [120, 80])
def test_golden(report: dict[str, Any], width: int) -> None:
    text = plain(report, width)
    golden = HERE / "golden" / f"report-kimi-{width}.txt"
    assert text == golden.read_text()


def test_signs_an_output_cannot_hold_are_letters(report: dict[str, Any]) -> None:
    text = plain(report, signs=ASCII)
    assert text.isascii()
    assert "YY both  nY only TPS  Yn only TTFT  nn neither" in text


def test_marks_are_explained(report: dict[str, Any]) -> None:
    one = report["configurations"][0]
    one["levels"][1] |= {"complete": False}
    one["levels"][2] |= {"measured": 40, "ok": 30, "failed": 10, "errors": {"reset\x1b": 10}}
    one |= {"levels_not_run": [128], "simulated": True, "status": "crashed"}
    report["slo"]["rows"][0]["cells"][1] |= {"obstacle": "incomplete"}
    report["slo"]["rows"][0]["cells"][2] |= {"obstacle": "failures"}
    report["slo"]["rows"][0]["cells"][3] |= {"tps": None}
    report["capacity"]["rows"][0] |= {"passed_above": [64], "users": None, "c_max": None}
    report["simulated"] = True
    text = plain(report)
    for says in (
        "vllm-direct [CRASHED] [SIMULATED]: Kimi K3",
        "* incomplete level",
        "failed at c=4: 10 of 40 (25 %): reset? 10",
        "not run: c=128",
        "~ low n: fewer than 29 requests",
        "  ? no such figure  * incomplete: does not pass  ! more than 1 % failed: does not pass",
        "vllm-direct passes at c=64 too, above a level that fails: not used",
    ):
        assert says in text, says
    assert text.rstrip().replace("\n    ", " ").endswith(SIMULATED)
    assert "\x1b" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "vllm-direct 0 3.65 0" in lines  # judged, and no level passes


def test_a_run_without_rows(report: dict[str, Any]) -> None:
    report["configurations"][0]["levels"] = []
    report["speculation"], report["anomalies"] = [], []
    text = plain(report)
    assert "no level has a row" in text and "peaks and anomalies, by rule\nnone\n" in text


def test_grid() -> None:
    assert list(grid([["", "a", "bb"], ["xx", "1", ""]])) == ["    a  bb", "xx  1"]
