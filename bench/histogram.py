"""What does the histogram cost, and how far off are its quantiles?

The engine records natively. Here only `Histogram.record` can be timed, Python's call included, beside a Python function
that does nothing: what the call leaves over is the record. The quantile error is the largest, relative, over several
shapes of data; the docstring of Histogram promises less than 0.4 %.
"""

import numpy as np
import rig

from fastload import _timing

CALLS = 200_000
VALUES = 1_000_000
POINTS = (0.5, 0.9, 0.99, 0.999, 0.9999)
COLUMNS = ("what", "value", "unit")


def main() -> None:
    """Interleaved: everything once, then again."""
    given = rig.order(__doc__ or "")
    rig.pin(rig.CLIENT_CPU)
    draws = shapes()
    full = {name: filled(values) for name, values in draws.items()}
    runs: list[dict[str, float]] = []
    for _ in range(given.runs):
        histogram = _timing.Histogram()
        values = draws["exponential"][:CALLS].tolist()
        run = {"record, Python call included": per_value(histogram.record, values)}
        run["an empty call with one argument"] = per_value(_nothing, values)
        other = full["lognormal"]
        run["merge"] = per_value(histogram.merge, [other] * 2000)
        run["quantile"] = per_value(other.quantile, [0.99] * 2000)
        start = _timing.now_ns()
        np.percentile(draws["lognormal"], [100 * point for point in POINTS])
        run["numpy's exact quantiles of 1M values, all five"] = _timing.now_ns() - start
        runs.append(run)
    rows: list[list[object]] = [[name, rig.middle([run[name] for run in runs]), "ns"] for name in runs[0]]
    for name, values in draws.items():
        rows.append([f"largest quantile error, {name}", 100 * worst(full[name], values), "%"])
    half = filled(draws["lognormal"][: VALUES // 2])
    half.merge(filled(draws["lognormal"][VALUES // 2 :]))
    alike = half.to_bytes() == full["lognormal"].to_bytes()
    rows.append(["two halves merged equal the whole", "yes" if alike else "NO", ""])
    rows.append(["memory", _timing.Histogram.SIZE, "bytes"])
    rows.append(["as bytes, 1M lognormal values", len(full["lognormal"].to_bytes()), "bytes"])
    rig.answer(
        given, "histogram", f"The histogram: {VALUES:,} values of each shape", "CLOCK_MONOTONIC",
        COLUMNS, rows, packages=rig.versions("numpy"), data=runs,
    )


def shapes() -> dict[str, np.ndarray]:
    """Durations in ns of several shapes, from a fixed seed."""
    random = np.random.default_rng(1)
    return {
        "exponential": random.exponential(2e6, VALUES).astype("i8"),
        "lognormal": np.exp(random.normal(16, 2, VALUES)).astype("i8"),
        "uniform": random.integers(0, 100_000_000, VALUES),
    }


def filled(values: np.ndarray) -> _timing.Histogram:
    """A histogram of all of them."""
    histogram = _timing.Histogram()
    for value in values.tolist():
        histogram.record(value)
    return histogram


def worst(histogram: _timing.Histogram, values: np.ndarray) -> float:
    """The largest relative error over POINTS, against the nearest rank."""
    # nearest rank by hand: numpy's own is one rank off where 100 * q is not exact
    exact = np.sort(values)[[round(point * VALUES) - 1 for point in POINTS]]
    found = np.array([histogram.quantile(point) for point in POINTS], float)
    return float(np.max(np.abs(found - exact) / exact))


def _nothing(_: int) -> None:
    pass


def per_value(call: object, values: list[object]) -> float:
    """ns per call."""
    start = _timing.now_ns()
    for value in values:
        call(value)  # type: ignore[operator]
    return (_timing.now_ns() - start) / len(values)


if __name__ == "__main__":
    main()
