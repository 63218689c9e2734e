"""Runs a command as long as the process that started this one lives.

    python -m hosted_tinker.replicas.guard FD COMMAND...

FD is the reading end of a pipe whose other end the parent keeps: it closes when the parent ends,
however that happens. Then, and when the command itself ends, everything that the command has started
is ended too; vLLM's engine processes would outlive it. All are in this process's own group, so that
the parent can end them if this process was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 15.0
IGNORED = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    assert os.getpgrp() == os.getpid(), "start it in a session of its own"
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # What is ignored here would be ignored by the command as well.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=restore_signals)
    threading.Thread(target=end_with_parent, args=(descriptor, process), daemon=True).start()
    process.wait()
    os.killpg(0, signal.SIGKILL)


def restore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)


def end_with_parent(descriptor: int, process: subprocess.Popen[bytes]) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
