"""Measuring many checkpoints on the workers of a Dask cluster, with the numbers of one process.

Comes in: a list of `Work` and the address of a scheduler. Goes out: what each gives, as it is finished. The workers read the
runs themselves, so the runs, and plugins given by path, have to be on a file system that all machines see under one path.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_analyze import device, plugins
from pico_analyze.measure import Measured, Work, missing
from pico_analyze.spread import DIED, Report, measure_packed, packed

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

CONNECT_S = 5
WITHOUT_WORKERS_S = 300  # a cluster may take minutes to replace a worker
LOOK_EVERY_S = 2
COMPARED = ("pico-analyze", "torch", "numpy", "scipy", "distributed")  # what the numbers and the transport depend on
ONE_THREAD = "OMP_NUM_THREADS"

_one_at_a_time = threading.Lock()


class ClusterError(ValueError):
    """A cluster that cannot be used; the message says which part of it, and what to do."""


class ClusterLost(RuntimeError):
    """A cluster that is gone in the middle of the work."""


def spread_on_cluster(
    works: Sequence[Work], scheduler: str, plugin_names: Sequence[str] = (), device_name: str = "cpu"
) -> Iterator[tuple[int, Measured]]:
    """The place of each work in ``works`` and what its cells give, in the order in which they are finished.

    What a worker had in hand when it died goes to another one. A checkpoint of which several workers die, as many as the
    scheduler's setting ``allowed-failures`` and one more, is logged and gives missing values. Without any worker for
    ``WITHOUT_WORKERS_S`` seconds it gives up.

    Args:
        scheduler: Address of the scheduler, such as tcp://host:8786, or the path of its scheduler file, ``*.json``.

    Raises:
        ClusterError: distributed is not installed, no scheduler answers, it has no workers, or a worker cannot do the work.
        ClusterLost: the scheduler or all workers are gone.
    """
    names = tuple(str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in plugin_names)
    with _connected(scheduler) as client:
        _check_workers(client, names, device_name)
        if works:
            yield from _gathered(client, works, names)


def _gathered(client: "Client", works: Sequence[Work], names: tuple[str, ...]) -> Iterator[tuple[int, Measured]]:
    from distributed import CancelledError, KilledWorker

    waiting = {
        client.submit(_on_worker, place, packed(work), names, os.getcwd(), pure=False): place
        for place, work in enumerate(works)
    }
    try:
        for future in _finished(client, list(waiting)):
            work = works[place := waiting.pop(future)]
            try:
                place, measured, messages = future.result()
            except KilledWorker:
                logger.error("%s: every worker that measured it died; its values are missing", work.name)
                yield place, {cell.key: missing(cell, DIED) for cell in work.cells}
                continue
            except ModuleNotFoundError as error:
                raise ClusterError(f"a worker lacks a package: {error}; install there what is installed here") from None
            except CancelledError:
                raise ClusterLost("dask: the scheduler is gone; the same command computes what is missing") from None
            for level, text in messages:
                logger.log(level, "%s", text)
            yield place, measured
    finally:
        client.cancel(list(waiting))


def _finished(client: "Client", futures: "Sequence[Future]") -> "Iterator[Future]":
    """The futures as they are finished; raises `ClusterLost` when there has been no worker for too long."""
    from distributed import as_completed

    completed = as_completed(futures)
    looked = seen = time.monotonic()
    while completed.count():
        if completed.has_ready():
            yield next(completed)
        elif (now := time.monotonic()) - looked < LOOK_EVERY_S:
            time.sleep(0.05)
        elif client.scheduler_info(n_workers=-1)["workers"]:
            looked = seen = now
        elif now - seen > WITHOUT_WORKERS_S:
            raise ClusterLost(
                f"dask: all workers are gone, for {WITHOUT_WORKERS_S:g} seconds now; start some, and the same command computes "
                "what is missing"
            )
        else:
            if looked == seen:
                logger.warning("dask: all workers are gone; waiting %g seconds for others", WITHOUT_WORKERS_S)
            looked = now


@contextmanager
def _connected(scheduler: str) -> "Iterator[Client]":
    try:
        from distributed import Client
        from distributed.comm.registry import backends
    except ModuleNotFoundError as error:
        raise ClusterError(
            f"--dask needs the package distributed ({error}): pip install 'pico-analyze[dask]'"
        ) from None
    by_file = scheduler.endswith(".json")
    if by_file and not Path(scheduler).is_file():  # distributed would wait for it without end
        raise ClusterError(f"dask: there is no scheduler file {scheduler}")
    scheme = scheduler.partition("://")[0] if "://" in scheduler else "tcp"
    if not by_file and scheme not in backends:  # distributed would try it all the same, and leave its threads behind
        known = ", ".join(f"{name}://" for name in sorted(backends) if name != "inproc")
        raise ClusterError(
            f"dask: {scheduler} is no address of a scheduler; one begins with {known}: give the one that `dask scheduler` prints, "
            "such as tcp://host:8786, not that of its dashboard"
        )
    where: dict[str, Any] = {"scheduler_file": scheduler} if by_file else {"address": scheduler}
    try:
        client = Client(**where, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(
            f"dask: no scheduler answers at {scheduler} ({' '.join(str(error).split())[:200]}); start one with `dask scheduler` "
            "and give the address that it prints, such as tcp://host:8786"
        ) from None
    with client, client.as_current():
        yield client


def _check_workers(client: "Client", names: tuple[str, ...], device_name: str) -> None:
    """Raises `ClusterError` where there are no workers, or one of them would fail, or give other numbers."""
    if not client.scheduler_info(n_workers=-1)["workers"]:
        raise ClusterError("dask: the scheduler has no workers; start some with `dask worker ADDRESS --nthreads 1`")
    problems = []
    for package in COMPARED:  # asked by a function of Python's own: a worker without our package can answer
        here = metadata.version(package)
        for address, there in client.run(metadata.version, package, on_error="return").items():
            if isinstance(there, metadata.PackageNotFoundError):
                problems.append(f"worker {address} has no package {package}")
            elif isinstance(there, str) and there != here:  # an exception else: it has gone since
                problems.append(f"worker {address} has {package} {there}, and here it is {here}")
    if not problems:
        said = client.run(_problem_of_worker, names, os.getcwd(), device_name, on_error="return")
        problems = [f"worker {address} {problem}" for address, problem in said.items() if isinstance(problem, str)]
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise ClusterError("dask: the workers cannot do this analysis:\n  " + "\n  ".join(problems[:10] + more))


def _problem_of_worker(names: tuple[str, ...], folder: str, device_name: str) -> str | None:
    """Why the process that runs this cannot measure, None where it can."""
    if os.environ.get(ONE_THREAD) != "1":
        return f"computes with several threads, which changes the last digits; start it with {ONE_THREAD}=1"
    if not Path(folder).is_dir():
        return f"does not see the folder {folder}: runs have to be on a file system that all machines share"
    try:
        device.check(device_name)
        for name in names:
            plugins.load(name)
    except (plugins.PluginError, device.DeviceError) as error:
        return f"cannot be used: {error}"
    return None


def _on_worker(place: int, content: bytes, plugin_names: tuple[str, ...], folder: str) -> Report:
    """Measure one checkpoint; a worker of several threads does one at a time, since folder and log belong to the process."""
    with _one_at_a_time, chdir(folder):
        return measure_packed(place, content, plugin_names)
