"""Measure and draw how language models change over training and across scales.

>>> import pico_analyze
>>> sorted(pico_analyze.__all__)
['analyze', 'draw', 'load_config', 'open_run']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pico_analyze.analysis import analyze
    from pico_analyze.checkpoint.reader import open_run
    from pico_analyze.config import load_config
    from pico_analyze.plots import draw

__all__ = ["analyze", "draw", "load_config", "open_run"]

# Imported when first used, so that the command line answers without torch, pandas and matplotlib.
_WHERE = {
    "analyze": "pico_analyze.analysis",
    "draw": "pico_analyze.plots",
    "load_config": "pico_analyze.config",
    "open_run": "pico_analyze.checkpoint.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
