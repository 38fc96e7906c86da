"""Programs that try to get out, to hurt, or to pass without solving; and what the sandbox says about each."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from evaluation.sandbox import Limits, SandboxError, _verdict, run_program

# 20 s: only programs that never end may run out of time, however busy the machine is.
QUICK = Limits(seconds=20, memory_bytes=512 << 20)


@pytest.fixture(autouse=True, scope="module")
def _confinable() -> None:
    try:
        run_program("", "", QUICK)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return 2 * x",
        "import math, re, random, datetime, collections, itertools, heapq\ndef f(x): return 2 * x",
        "import numpy\ndef f(x): return int(numpy.add(x, x))",
        "open('notes.txt', 'w').write('4')\ndef f(x): return int(open('notes.txt').read())",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\ndef f(x): return 4",
        "def f(x): return 4\nif __name__ == '__main__':\n    raise SystemExit('only when run as a script')",
    ],
)
def test_honest_programs_pass(program: str) -> None:
    assert run_program(program, "assert f(2) == 4", QUICK).passed


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("def f(x): return x", "AssertionError"),
        ("def f(x) return x", "SyntaxError"),
        ("f = '\ud800'", "UnicodeEncodeError"),
        ("def f(x): return f(x)", "RecursionError"),
        ("x = ' ' * (4 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
        ("open('big', 'wb').write(bytes(8 << 20))", "File too large"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "can't be printed"),
        ("import os\nwhile True: os.fork()", "not permitted"),
        ("import subprocess\nsubprocess.run(['true'])", "not permitted"),
        ("import os\nos.execv('/bin/true', ['true'])", "not permitted"),
        ("import os\nos.system('true') and exit('refused')", "refused"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "not permitted"),
        ("import os\nos.setsid()\nos.killpg(os.getpgid(os.getppid()), 9)", "not permitted"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "not permitted"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1')", "not permitted"),
        ("import os\nos.chmod('/tmp', 0o777)", "not permitted"),
        ("import socket\nsocket.sethostname(socket.gethostname())", "not permitted"),
        ("import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())", "not permitted"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,) * 2)", "not allowed"),
        ("import resource as r\nr.prlimit(0, r.RLIMIT_AS, (1 << 40,) * 2)", "PermissionError"),
        ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "Permission denied"),
        ("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "Permission denied"),
        ("open('/etc/passwd').read()", "Permission denied"),
        ("open('/dev/shm/left-behind', 'w')", "Permission denied"),
        ("import os\nos.symlink('/etc/passwd', 'link')\nopen('link').read()", "Permission denied"),
        ("import os\nos.rename('/etc/hostname', 'hostname')", "ermission"),
        ("import os\nos.listdir('/')", "Permission denied"),
    ],
)
def test_misbehaviour_fails_and_says_how(program: str, detail: str) -> None:
    outcome = run_program(program, "assert f(2) == 4", QUICK)
    assert outcome.status == "failed"
    assert detail in outcome.detail


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import os, atexit\natexit.register(os._exit, 0)\ndef f(x): os._exit(0)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.abort()",
    ],
)
def test_leaving_early_is_no_pass(program: str) -> None:
    outcome = run_program(program, "assert f(2) == 4", QUICK)
    assert outcome.status == "died"
    assert "before its test did" in outcome.detail


@pytest.mark.parametrize(
    "program",
    [
        "print('passed'); print('token passed '); import sys; sys.stderr.write('passed')",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0123 passed ')\n    except OSError: pass",
        "import builtins, json, os\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n"
        "os.write = os._exit = json.dumps = lambda *a, **k: None",
        "import sys\nsys.modules['__main__'].main = sys.modules['__main__']._describe = lambda *a: b'passed'",
        "def check(f): pass\nimport sys\nsys.modules['candidate'].check = lambda f: None",
        "import sys\nsys.excepthook = lambda *a: None\nAssertionError = KeyError",
        "class AssertionError(Exception): pass\n__debug__",
        "import unittest, typing\nunittest.TestCase.assertEqual = lambda *a: None",
    ],
)
def test_faking_the_verdict_is_no_pass(program: str) -> None:
    test = "def check(f):\n    assert f(2) == 4\ncheck(f)"
    assert not run_program(program + "\ndef f(x): return 5", test, QUICK).passed


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(1000)", "input()\nwhile True: pass"])
def test_what_never_ends_is_ended(program: str) -> None:
    expected = "failed" if "input" in program else "timeout"  # nobody types: input() is at its end
    assert run_program(program, "", Limits(seconds=1)).status == expected


def test_secrets_of_the_parent_stay_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "sesame")
    private = tmp_path / "private.txt"
    private.write_text("sesame")
    outcome = run_program("import os\nassert 'SECRET_KEY' not in os.environ", f"open({str(private)!r}).read()", QUICK)
    assert "Permission denied" in outcome.detail
    assert "sesame" not in outcome.detail


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    run_program("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos._exit(3)", "", QUICK)
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_listener_on_this_machine_hears_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        outcome = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", "", QUICK)
        assert outcome.status == "failed"
        with pytest.raises(TimeoutError):
            server.accept()


def test_programs_run_side_by_side() -> None:
    outcomes: dict[int, bool] = {}

    def run(value: int) -> None:
        outcomes[value] = run_program(f"x = {value}", "assert x % 2 == 0", QUICK).passed

    threads = [threading.Thread(target=run, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {0: True, 1: False, 2: True, 3: False}


def test_a_kernel_without_the_limits_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"no Landlock.*allow_unconfined"):
        _verdict(b"token unconfined files: no Landlock", "token", 0)
    assert _verdict(b"guess passed ", "token", 0).status == "died"


@pytest.mark.parametrize(
    "program",
    [
        "class Same:\n    def __eq__(self, other): return True\ndef f(x): return Same()",
        "import sys, os\nframe = sys._getframe()\nwhile 'head' not in frame.f_locals: frame = frame.f_back\n"
        "os.write(frame.f_locals['pipe'], frame.f_locals['head']['passed'])\nos._exit(0)",
    ],
)
def test_the_gaps_that_the_documentation_admits(program: str) -> None:
    """One that closes is good news: then say so in evaluation/sandbox and delete it here."""
    assert run_program(program, "assert f(2) == 4", QUICK).passed
