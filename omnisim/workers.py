"""A process for each subject: two releases never meet, and one that dies or hangs is an outcome, not our end.

The whole replay runs in the worker, its judge too. What a cache hands out may be a view of a buffer that changes
later; a copy sent to another process would not show it, so no array crosses, only a job and its result, as JSON lines.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final

import msgspec

from omnisim.errors import OmnisimError
from omnisim.trace import load
from omnisim.verify import Options, Run, died, verify

__all__ = ["TIMEOUT_SECONDS", "Worker", "serve"]

TIMEOUT_SECONDS: Final = 60.0
"""How long a worker may be silent: to start and to replay a step. A step takes milliseconds, vLLM's import seconds."""


class _Job(msgspec.Struct, frozen=True):
    """What a worker is asked: to replay a trace."""

    path: str
    options: Options


class _Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A step has been judged."""

    step: int


class _Done(msgspec.Struct, frozen=True, tag="done"):
    run: Run


class _Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """An OmnisimError, in its parts."""

    what: str
    remedy: str


class _Broken(msgspec.Struct, frozen=True, tag="broken"):
    """An error of omnisim's own."""

    traceback: str


_ANSWER = msgspec.json.Decoder(_Beat | _Done | _Unusable | _Broken, dec_hook=lambda kind, value: Counter(value))
_JOB = msgspec.json.Decoder(_Job)


class Worker:
    """The process in which one subject is replayed, started when it is needed and again after it died.

    A context manager: at its end the process is gone. ``num_threads`` is torch's, None for its own choice.
    """

    def __init__(self, subject: str, timeout: float = TIMEOUT_SECONDS, num_threads: int | None = None) -> None:
        self.subject = subject
        self._timeout = timeout
        self._num_threads = num_threads
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._words: IO[bytes]
        self._rest = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def kill(self) -> None:
        """From another thread: end the process, whatever it does, for good."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()

    def start(self) -> None:
        """Start the process, if there is none; ``verify`` does so too."""
        if self._process is not None or self._killed:
            return
        environ = dict(os.environ)
        if self._num_threads is not None:
            environ["OMP_NUM_THREADS"] = str(self._num_threads)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from omnisim.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=environ,
        )

    def verify(self, path: Path, options: Options, progress: Callable[[int], None] | None = None) -> Run:
        """Replay the trace at ``path`` with this worker's subject. A worker that dies or hangs is a crash.

        ``progress`` is called with the index of each step that has been judged. Raises what ``verify`` would, as
        OmnisimError.
        """
        self.start()
        if self._process is None:
            raise OmnisimError(f"{path}: the worker for {self.subject} was told to end")
        assert self._process.stdin is not None
        options, last = replace(options, subject=self.subject), -1
        try:
            self._process.stdin.write(msgspec.json.encode(_Job(str(path), options)) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, which its silence will say
        while True:
            line = self._read_line()
            if line is None:
                return died(load(path), options, self._bury(last), last + 1)
            match _ANSWER.decode(line):
                case _Done(run):
                    return run
                case _Unusable(what, remedy):
                    raise OmnisimError(what, remedy)
                case _Broken(told):
                    raise RuntimeError(f"a worker for {self.subject} broke:\n{told}")
                case _Beat(last):
                    if progress is not None:
                        progress(last)

    def _read_line(self) -> bytes | None:
        """The next line of the worker; None if it died, or said nothing for too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - monotonic())):
                    return None
                more = os.read(self._process.stdout.fileno(), 1 << 20)
                if not more:
                    return None
                self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _bury(self, last: int) -> str:
        """How the worker ended, in words; a hanging one is killed."""
        assert self._process is not None
        when = "before the first step was judged" if last < 0 else f"after step {last} was judged"
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            how = f"the worker process said nothing for {self._timeout:g} s"
        else:
            how = f"the worker process {'was ended by ' + _signal(-code) if code < 0 else f'exited with {code}'}"
        words = self._last_words()
        self._stop()
        return f"{how} {when}{f' ({words})' if words else ''}"

    def _last_words(self) -> str:
        """Where faulthandler says that it was, or what it wrote last."""
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - 8192))
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        frames = [line for line in lines if line.startswith('File "')]
        return (frames or lines[-1:] or [""])[0][:300]

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._words.close()
        self._process = None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def serve() -> None:
    """Be a worker: jobs come from stdin and answers go to stdout, which the code under test then has no part in."""
    import faulthandler
    import traceback

    faulthandler.enable()
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    for line in jobs:
        job = _JOB.decode(line)
        try:
            say(_Done(verify(load(Path(job.path)), job.options, progress=lambda step: say(_Beat(step)))))
        except OmnisimError as error:
            say(_Unusable(error.what, error.remedy))
        except Exception:  # ours: what the subject raises is an outcome
            say(_Broken(traceback.format_exc()))
