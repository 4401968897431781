"""The command line in processes of its own, without the seconds that each would spend on importing torch: one process imports, then forks for each command.

It computes nothing itself: a fork of a process whose threads have run would miss them.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import gc, json, os, signal, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import pydantic.fields, torch, transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from tilepress.cli import app
import tilepress.compress.run.api

get_checkpoint_conversion_mapping("llama")  # it keeps what it makes, for every family
gc.collect()
gc.freeze()  # else each fork looks through all that was imported, and so copies it

def start(folder, is_leader, words, env):
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(env)
    if is_leader:
        os.setsid()
    answers.close()
    for number, name in enumerate((os.devnull, f"{folder}/out", f"{folder}/err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = words
    app.main()

def poll(pid):
    found, status, used = os.wait4(pid, os.WNOHANG)
    return (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime) if found else (None, None)

for line in sys.stdin:
    name, *words = json.loads(line)
    answers.write(json.dumps({"start": start, "poll": poll}[name](*words)) + "\\n")
    answers.flush()
"""


class Command:
    """A command that runs, as a subprocess.Popen: its exit code is minus the signal that ended it."""

    def __init__(self, commands: "Commands", folder: Path, pid: int):
        self._commands, self._folder, self.pid = commands, folder, pid
        self.returncode: int | None = None
        self.cpu_s: float | None = None  # of its own, when it has ended

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode, self.cpu_s = self._commands.ask("poll", self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Waits; what it wrote to stdout and stderr."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < until, f"{self.pid} still runs after {timeout} s"
            time.sleep(0.005)
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()

    def peak_bytes(self) -> int:
        """Waits for its success; the highest anonymous memory, as far as looks every few milliseconds see it."""
        peak = 0
        while self.poll() is None:
            try:
                with open(f"/proc/{self.pid}/status") as status:
                    found = re.search(r"RssAnon:\s+(\d+) kB", status.read())
                peak = max(peak, int(found[1]) * 1024 if found else 0)
            except OSError:
                pass
            time.sleep(0.005)
        _, err = self.communicate()
        assert self.returncode == 0, err
        return peak


class Commands:
    """Calling it starts a command."""

    def __init__(self, folder: Path):
        # Every large block of memory is a mapping of its own: what glibc keeps of freed memory for itself varies from run to run.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def __call__(self, *words, is_leader: bool = False, env: dict[str, str] | None = None) -> Command:
        """`is_leader`: of a session of its own, which signals from a terminal do not reach; `env` is set beside what is."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        return Command(
            self, folder, self.ask("start", str(folder), is_leader, [str(word) for word in words], env or {})
        )

    def ask(self, *words):
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()
