"""Measuring many checkpoints, one after another here or spread over processes, with the same numbers.

Comes in: a list of `Work`. Goes out: what each gives, as it is finished. Every process computes with one thread: sums are
then taken in one order, so that the numbers do not depend on the machine's cores or on how many processes share the work.
"""

import logging
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from pico_analyze import plugins
from pico_analyze.measure import Measured, References, Work, measure, missing
from pico_analyze.plan import Cell

logger = logging.getLogger(__name__)

Report = tuple[int, Measured, list[tuple[int, str]]]  # the place of the work, what it gives, what was logged

# The matrices that a worker process compares others with: loaded where they are needed, kept from one checkpoint to the next.
_references: References = {}


def spread(works: Sequence[Work], n_jobs: int, plugin_names: Sequence[str] = ()) -> Iterator[tuple[int, Measured]]:
    """The place of each work in ``works`` and what its cells give, in the order in which they are finished.

    A process that dies (out of memory, a crash in a plugin) takes its checkpoints along: each is tried once more alone, and one
    that kills its process again is logged and gives missing values.
    """
    if n_jobs == 1 or len(works) < 2:
        references: References = {}
        with _one_thread():
            for place, work in enumerate(works):
                yield place, measure(work, references)
        return
    waiting = dict(enumerate(works))
    while waiting:
        started: set[int] = set()
        try:
            yield from _in_processes(waiting, n_jobs, plugin_names, started)
        except BrokenProcessPool:
            if not started:
                raise
            for place in sorted(started & waiting.keys()):
                work = waiting[place]
                logger.warning("%s: a process died, perhaps of this checkpoint; it is tried alone", work.name)
                try:
                    yield from _in_processes({place: work}, n_jobs, plugin_names, set())
                except BrokenProcessPool:
                    logger.error("%s: the process that measured it died again; its values are missing", work.name)
                    yield place, {cell.key: missing(cell, DIED) for cell in work.cells}
                waiting.pop(place)


DIED = "the process that measured this checkpoint died: out of memory, or a crash outside Python"


def _in_processes(
    waiting: dict[int, Work], n_jobs: int, plugin_names: Sequence[str], started: set[int]
) -> Iterator[tuple[int, Measured]]:
    """Measure what is ``waiting``, and take out what is done; ``started`` gets the places handed to a process.

    Raises:
        BrokenProcessPool: a process died.
    """
    from joblib import Parallel, delayed, parallel_config

    def tasks() -> Iterator[object]:
        for place, work in list(waiting.items()):
            started.add(place)
            yield delayed(_in_process)(place, packed(work), tuple(plugin_names), os.getcwd())

    with parallel_config(backend="loky", n_jobs=n_jobs, inner_max_num_threads=1):
        parallel = Parallel(return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs", max_nbytes=None)
        with closing(parallel(tasks())) as reports:  # on an interruption the processes are ended
            for place, measured, messages in reports:
                for level, text in messages:
                    logger.log(level, "%s", text)
                waiting.pop(place)
                yield place, measured


def _alone(work: Work) -> Work:
    """The work with no more of its runs than it needs: the manifests of its step and of those it is compared with."""
    others = [cell.reference for cell in work.cells if cell.reference is not None]
    runs = {run.identity.run_id: run for run in (work.run, *(other.run for other in others))}
    steps = {(work.run.identity.run_id, work.step), *((other.run.identity.run_id, other.step) for other in others)}
    for run_id, run in runs.items():
        manifests = {step: manifest for step, manifest in run.manifests.items() if (run_id, step) in steps}
        runs[run_id] = replace(run, manifests=manifests, skipped={})

    def alone(cell: Cell) -> Cell:
        other = cell.reference
        reference = None if other is None else replace(other, run=runs[other.run.identity.run_id])
        return replace(cell, run=runs[cell.run.identity.run_id], reference=reference)

    return replace(work, run=runs[work.run.identity.run_id], cells=[alone(cell) for cell in work.cells])


def packed(work: Work) -> bytes:
    """The work alone, as bytes, because plugins must be loaded before what they define can be unpacked."""
    return pickle.dumps(_alone(work))


def measure_packed(place: int, content: bytes, plugin_names: Sequence[str]) -> Report:
    """Measure one checkpoint in a process that has not planned it; what is logged goes back with the values."""
    for name in plugin_names:
        plugins.load(name)
    messages: list[tuple[int, str]] = []
    with _logged_to(messages), _one_thread():
        return place, measure(pickle.loads(content), _references), messages


def _in_process(place: int, content: bytes, plugin_names: Sequence[str], folder: str) -> Report:
    """Measure one checkpoint in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one decides
    os.chdir(folder)  # the process may have served an analysis elsewhere; paths are from the working directory
    return measure_packed(place, content, plugin_names)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _logged_to(messages: list[tuple[int, str]]) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelno, record.getMessage()))

    handler, log = Handler(), logging.getLogger("pico_analyze")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
