"""A worker that dies, hangs or talks is an outcome with a reason, and whoever comes after it is not disturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from omnisim.errors import OmnisimError
from omnisim.subjects.contract import SURFACE
from omnisim.trace import load
from omnisim.verify import Options, Run, verify
from omnisim.workers import Worker

HELLO = Path(__file__).parents[1] / "traces" / "hello.yaml"
HEAD = "from omnisim.cache import OmniTensorPrefixCache\n\nclass Mine(OmniTensorPrefixCache):\n"
IN_STEP_1 = """
    steps = -1
    def update_omni_tensor_prefix_cache(self, *args, **kwargs):
        self.steps += 1
        if self.steps == 1:
            {}
        super().update_omni_tensor_prefix_cache(*args, **kwargs)
"""

Subject = Callable[[str], str]


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """``subject(body)``: the name of a class with this body, derived from ours."""

    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(HEAD + body)
        return f"{path}:Mine"

    return write


def run(name: str, timeout: float = 60.0) -> Run:
    with Worker(name, timeout) as worker:
        return worker.verify(HELLO, Options())


def dying(statement: str) -> str:
    return IN_STEP_1.format(statement)


ENDS = {
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV after step 0 was judged"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL after step 0 was judged"),
    "aborted": ("import os; os.abort()", "was ended by SIGABRT after step 0 was judged"),
    "left": ("import os; os._exit(7)", "exited with 7 after step 0 was judged"),
    "left with 0": ("import os; os._exit(0)", "exited with 0 after step 0 was judged"),
}


@pytest.mark.parametrize(("statement", "how"), ENDS.values(), ids=ENDS)
def test_a_worker_that_dies_is_a_crash_with_the_signal(subject: Subject, statement: str, how: str) -> None:
    died = run(subject(dying(statement)))
    assert (died.outcome, died.steps) == ("crash", 1)
    assert how in died.error, died.error


def test_a_crash_says_where_it_was(subject: Subject) -> None:
    assert "string_at" in run(subject(dying("import ctypes; ctypes.string_at(0)"))).error


def test_a_worker_that_hangs_is_a_crash_and_is_gone(subject: Subject) -> None:
    with Worker(subject(dying("import time; time.sleep(600)")), timeout=20.0) as worker:
        worker.start()
        worker._timeout = 6.0
        hung = worker.verify(HELLO, Options())
        assert worker._process is None
    assert hung.outcome == "crash"
    assert "said nothing for 6 s after step 0 was judged" in hung.error


def test_no_memory_is_a_crash_or_an_error_of_its_own(subject: Subject) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); self.hog = bytearray(2**40)"
    starved = run(subject(dying(limit)))
    assert starved.outcome == "crash"
    assert "MemoryError" in starved.error


@pytest.mark.parametrize(
    "statement",
    [
        "print('{}', flush=True); import os; os.write(1, b'{\"type\": \"done\"}\\n')",
        "import sys; assert sys.stdin.read() == ''",
        "import os; os.close(1); os.close(0)",
        "import sys; sys.stdout.close()",
    ],
    ids=["it writes to stdout", "it reads stdin", "it closes both", "it closes sys.stdout"],
)
def test_the_code_under_test_has_no_part_in_what_is_said(subject: Subject, statement: str) -> None:
    agreed = run(subject(dying(statement)))
    assert agreed.outcome == "agreement", agreed


def test_one_that_exits_or_raises_is_a_crash(subject: Subject) -> None:
    for statement, word in (("raise SystemExit(0)", "SystemExit"), ("raise ZeroDivisionError('x')", "ZeroDivision")):
        stopped = run(subject(dying(statement)))
        assert stopped.outcome == "crash"
        assert word in stopped.error
        assert "in step 1" in stopped.error


def test_a_worker_that_died_is_started_again(subject: Subject, tmp_path: Path) -> None:
    once = f"import os, pathlib\n            if not pathlib.Path({str(tmp_path / 'been')!r}).exists(): " + (
        f"pathlib.Path({str(tmp_path / 'been')!r}).touch(); os._exit(3)"
    )
    with Worker(subject(dying(once))) as worker:
        assert [worker.verify(HELLO, Options()).outcome for _ in range(3)] == ["crash", "agreement", "agreement"]


def test_a_worker_says_what_a_replay_here_says() -> None:
    for name in ("builtin", "none"):
        here, there = verify(load(HELLO), Options(subject=name)), run(name)
        assert str(there) == str(here)
        assert (there.tally, there.hits, there.counts, there.notes) == (here.tally, here.hits, here.counts, here.notes)
        assert str(there.first) == str(here.first)


def test_a_broken_class_is_caught_by_its_name(subject: Subject) -> None:
    broken = run(
        subject("    def _get_cached_block_ids(self, r, b): return super()._get_cached_block_ids(r, b).flip(0)\n")
    )
    assert broken.outcome == "divergence"
    assert broken.first is not None
    assert "shifted by" in broken.first.explanation


def test_a_class_without_the_surface_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("class Half:\n    def get_merged_hidden_states(self): ...\n")
    with pytest.raises(OmnisimError) as caught:
        run(f"{tmp_path / 'half.py'}:Half")
    missing = ", ".join(name for name in SURFACE if name != "get_merged_hidden_states")
    assert f"it has no {missing}" in str(caught.value)


def test_a_module_is_found_beside_the_user(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject("    pass\n")
    monkeypatch.chdir(tmp_path)
    assert run("mine:Mine").outcome == "agreement"
