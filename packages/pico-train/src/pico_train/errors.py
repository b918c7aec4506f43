"""The two ways in which a command ends without its work done; the command line turns them into one message and an exit code."""


class PicoError(Exception):
    """Something failed that is not a bug: the disk, a file, the numbers. The message says what and what to do."""

    exit_code = 1
    alike_on_all_ranks = (
        False  # where several processes train a run: whether all of them raise it, so that one says it for all
    )


class UserError(PicoError, ValueError):
    """What the user wrote or pointed at is wrong; the message names it, what is allowed and what to do."""

    exit_code = 2
