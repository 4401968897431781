"""Threads of the CPU: those that are asked for, else as many as a process may use."""

import os

import pytest
import torch

from tilepress import device
from tilepress.device import usable_cores, use_threads


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of so many cores, of which others use some and a control group allows some."""

    def make(cores: int, load: float = 0.0, **files: str):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(device, "_CGROUP", tmp_path)
        for name in device._ASKED:
            monkeypatch.delenv(name, raising=False)
        for name, content in files.items():
            path = (
                tmp_path / {"v2": "cpu.max", "quota": "cpu/cpu.cfs_quota_us", "period": "cpu/cpu.cfs_period_us"}[name]
            )
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    return make


@pytest.mark.parametrize(
    "files,expected",
    [
        ({}, 8), ({"v2": "max 100000\n"}, 8), ({"v2": "250000 100000\n"}, 3), ({"v2": "10000 100000\n"}, 1),
        ({"v2": "9900000 100000\n"}, 8), ({"v2": "nonsense"}, 8), ({"quota": "-1\n", "period": "100000\n"}, 8),
        ({"quota": "150000\n", "period": "100000\n"}, 2),
    ],
)  # fmt: skip
def test_cores_are_those_that_may_be_used(machine, files, expected):
    machine(8, **files)
    assert usable_cores() == expected


def test_threads_are_set(machine):
    machine(8)
    torch.set_num_threads(4)
    assert use_threads(None) is None and torch.get_num_threads() == 4
    machine(2)
    assert use_threads(None) is None and torch.get_num_threads() == 2
    assert use_threads(1) is None and torch.get_num_threads() == 1
    assert "--threads 2" in use_threads(3) and torch.get_num_threads() == 3


def test_what_users_have_set_stays(machine, monkeypatch):
    machine(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    assert "--threads 1" in use_threads(None) and torch.get_num_threads() == 3


def test_a_busy_machine_gets_a_hint_and_no_other_threads(machine):
    machine(2, load=5.2)
    torch.set_num_threads(2)
    assert "5 of 2 cores" in use_threads(None) and "--threads 1" in use_threads(None) and torch.get_num_threads() == 2
    assert use_threads(1) is None
    machine(16, load=3.0)
    assert use_threads(2) is None


def test_the_flag(tiny, tmp_path, cli):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "out", "--sparsity", "0.5", "--threads", "1", "-q")
    assert ran.code == 0 and ran.err == "" and torch.get_num_threads() == 1
    assert cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.6", "--threads", "0").code == 2
