"""Signs of life while many things are done."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("pico_analyze")


@contextmanager
def progress(unit: str, every: int = 1) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call after each thing with its name, how many are done, and how many there are.

    It moves a bar on a terminal or in a notebook; elsewhere it logs a line, one for ``every`` things and the last.
    """
    from tqdm.auto import tqdm

    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(unit=unit, dynamic_ncols=True, file=sys.stderr, disable=not watched, leave=False) as bar:

        def show(name: str, n_done: int, n_all: int) -> None:
            bar.total = n_all
            bar.set_postfix_str(name, refresh=False)
            bar.update(n_done - bar.n)
            if not watched and (n_done % every == 0 or n_done == n_all):
                log.info("%d of %d %ss: %s", n_done, n_all, unit, name)

        yield show
