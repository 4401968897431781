"""Tests where packages are missing: a machine with a card may bring its own torch and little else."""

import re

import pytest

PACKAGES = {"accelerate", "datasets", "hypothesis", "peft", "pydantic", "rich", "safetensors", "scipy", "typer"}


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """Skip a test module that imports one of PACKAGES where it is not installed; any other failed import stays an error."""
    report = (yield).get_result()
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if missing and missing[1] in PACKAGES:
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, f"Skipped: {missing[1]} is not installed"
