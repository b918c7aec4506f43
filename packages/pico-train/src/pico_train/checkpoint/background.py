"""Publishing while training goes on: one thread, one checkpoint at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs jobs in their order, one at a time, beside the caller.

    At most one is under way: the next ``submit`` waits for it, so the memory of one snapshot is all that overlap costs. A job that
    fails raises in the next ``submit``, or when the block is left.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Wait for the job before, then start this one."""
        self.wait()
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Return once nothing is under way; raises what a job raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else the first error is the one to tell
                raise
        finally:
            self._thread.shutdown()
