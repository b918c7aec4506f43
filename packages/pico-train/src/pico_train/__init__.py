"""Train suites of small language models and keep the trail of how they learn.

>>> import pico_train
>>> results = pico_train.train("configs/demo.yaml", "training.max_steps=20")  # doctest: +SKIP
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pico_train.config import RunConfig
    from pico_train.run import RunResult
    from pico_train.suite import Suite

__all__ = ["train"]


def train(
    config: "str | Path | Mapping[str, Any] | RunConfig | Suite", *overrides: "str | list[str]"
) -> "list[RunResult]":
    """Train a run or a suite to its end, from wherever it stands: what ``pico-train run`` does.

    Args:
        config: a YAML file of a run or a suite, the same as a mapping (a run then needs ``checkpointing.run_name``),
            or what ``pico_train.suite.load`` returned.
        overrides: ``key.sub=value``, as on the command line, one by one or as a list.

    Returns:
        One result per run, in the order of the suite.

    Raises:
        PicoError: what is wrong with the configuration, the data or a file, in one message.
    """
    from pico_train.run import train_suite  # torch and lightning take seconds
    from pico_train.stopping import StopRequest
    from pico_train.suite import as_suite

    words = [word for given in overrides for word in (given if isinstance(given, list) else [given])]
    with StopRequest() as stop:
        return train_suite(as_suite(config, words), ["pico_train.train"], stop)
