"""Many traces under many subjects: a worker a subject, as many at a time as there are cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from omnisim.errors import OmnisimError
from omnisim.subjects import check_subject
from omnisim.verify import Options, Run, unusable
from omnisim.workers import TIMEOUT_SECONDS, Worker

__all__ = ["Runs", "run_all"]

Runs = dict[tuple[Path, str], Run]
"""The run of each trace and subject; one that could not be judged has the outcome ``unusable``."""


def run_all(
    traces: Mapping[str, Sequence[Path]],
    options: Options,
    timeout: float = TIMEOUT_SECONDS,
    progress: Callable[[Run], None] | None = None,
) -> Runs:
    """Replay each subject's traces. UsageError or SetupError, before any replay, for a subject that cannot be had.

    ``progress`` is called with each run as it ends, in any order and from any thread.
    """
    for subject in traces:
        check_subject(subject)
    cores = len(os.sched_getaffinity(0))
    at_once = max(1, min(cores, len(traces)))
    workers = {subject: Worker(subject, timeout, max(1, cores // at_once)) for subject in traces}
    stopping = threading.Event()
    runs: Runs = {}

    def replay_all(subject: str) -> None:
        with workers[subject] as worker:
            for path in traces[subject]:
                if stopping.is_set():
                    return
                runs[path, subject] = _run(worker, path, options)
                if progress is not None and not stopping.is_set():
                    progress(runs[path, subject])

    with ThreadPoolExecutor(at_once) as pool:
        try:
            futures = [pool.submit(replay_all, subject) for subject in traces]
            for done in wait(futures, return_when=FIRST_EXCEPTION).done:
                done.result()
        except BaseException:
            stopping.set()
            for worker in workers.values():
                worker.kill()
            raise
    return runs


def _run(worker: Worker, path: Path, options: Options) -> Run:
    try:
        return worker.verify(path, options)
    except OmnisimError as error:
        return unusable(str(path), replace(options, subject=worker.subject), str(error))
