"""The inputs that the coverage-guided fuzz (bench/fuzz.py) found to make a difference, replayed on every build."""

from fuzzed import CORPUS, check, read_corpus


def test_machine_and_twin_agree_on_the_corpus() -> None:
    inputs = read_corpus()
    assert len(inputs) > 300 and CORPUS.stat().st_size < 300_000
    for data in inputs:
        check(data)
