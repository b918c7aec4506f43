"""A signal to one of several ranks during an evaluation: all give it up between the same two batches, sharded or not."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import kills
import pytest
import several
from kills import History

from pico_train.checkpoint.format import step_folders
from pico_train.checkpoint.verify import verify_run

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="ranks are forked from a process that has imported torch"
)


def _signalled_in_the_second_evaluation(rank: int) -> None:
    from pico_train import evaluation
    from pico_train.data.batches import Batch

    plain, begun = evaluation.probe, []

    class Signalling(Batch):
        def split(self, size: int) -> Iterator[Batch]:
            begun.append(size)
            for number, part in enumerate(super().split(size)):
                if rank == 1 and (len(begun), number) == (2, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield part

    evaluation.probe = lambda *what: Signalling(**vars(plain(*what)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_give_up_an_evaluation_together(tmp_path: Path, strategy: str) -> None:
    kills.preload()
    history = History(tmp_path / "run", (f"training.fabric.strategy={strategy}", "evaluation.held_out.batch_size=1"))
    ranks = several.run(history.words(), history.folder, prepare=_signalled_in_the_second_evaluation)
    assert ranks.codes == [75, 75], ranks.printed(0)
    [stopped] = re.findall(r"stopped by .* at step (\d+); the same command goes on there", ranks.printed(0))
    evaluated = list(step_folders(history.run / "evaluations"))
    assert int(stopped) == kills.stands_at(history.run) > max(evaluated)
    assert several.run(history.words(), history.folder).codes == [0, 0]
    assert list(step_folders(history.run / "evaluations"))[1] == int(stopped)
    n_checkpoints, faults = verify_run(history.run)
    assert (n_checkpoints, faults) == (len(step_folders(history.run / "evaluations")), [])
