"""What long commands say while they work: on stderr, so that stdout holds the result alone."""

import sys


def say(line: str) -> None:
    """A line, at once."""
    print(line, file=sys.stderr, flush=True)
