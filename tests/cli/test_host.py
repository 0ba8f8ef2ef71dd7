"""Host facts: always there, always plain JSON."""

from __future__ import annotations

import json
import os

from fastload.cli import host


def test_facts_are_plain_json_and_say_the_cores() -> None:
    facts = host.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] == os.cpu_count()
    assert facts["kernel"] == os.uname().release


def test_packages_name_versions_or_none() -> None:
    found = host.packages()
    assert found["click"] is not None
    assert set(found) == set(host.PACKAGES)
    assert host.python_version().split()[1].count(".") == 2
