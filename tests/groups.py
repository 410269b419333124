"""Control groups for tests, and the program that enters one: real limits, removed afterwards.

python groups.py [--group FOLDER] [--cpu ID] -- COMMAND ...      enters, pins itself, becomes COMMAND
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@dataclass(frozen=True)
class Group:
    """One group of one v1 controller. Its methods return the prefix of a command that shall run in it."""

    folder: Path

    def limit_cpu(self, cpus: float) -> list[str]:
        """So many CPUs of time."""
        (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self.folder / "cpu.cfs_quota_us").write_text(str(int(cpus * PERIOD_US)))
        return self.enter()

    def limit_cpuset(self, cpu: int) -> list[str]:
        """One CPU, with the memory nodes of the group above."""
        (self.folder / "cpuset.mems").write_text((self.folder.parent / "cpuset.mems").read_text())
        (self.folder / "cpuset.cpus").write_text(str(cpu))
        return self.enter()

    def enter(self) -> list[str]:
        """The prefix alone."""
        return [sys.executable, __file__, "--group", str(self.folder), "--"]

    def periods(self) -> tuple[int, int]:
        """Periods so far, and those in which the group was stopped."""
        stat = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(stat["nr_periods"]), int(stat["nr_throttled"])


@contextlib.contextmanager
def group(controller: str) -> Iterator[Group]:
    """A new group below the mount of a v1 controller; the test is skipped where none can be made."""
    import pytest

    folder = MOUNT / controller / f"vllm-zen-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield Group(folder)
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """A group can be busy for a moment after its last process has gone."""
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
    folder.rmdir()


def main() -> None:
    """Enters, pins, and becomes the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=Path)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.group:
        (arguments.group / "cgroup.procs").write_text(str(os.getpid()))
    if arguments.cpu is not None:
        os.sched_setaffinity(0, [arguments.cpu])
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
