"""Runs a command as long as the process that started this one lives.

    python -m hosted_tinker.replicas.guard FD COMMAND...

FD is the reading end of a pipe whose other end the parent keeps: it closes when the parent ends,
however that happens. Then, and when the command itself ends, everything that the command has started
is ended too; vLLM's engine processes would outlive it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 15.0


def main() -> None:
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The restored default is the command's: what is ignored would be ignored by it as well.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        restore_signals=True,
        preexec_fn=restore_signals,
    )
    threading.Thread(target=end_with_parent, args=(descriptor, process), daemon=True).start()
    code = process.wait()
    end_group(process.pid, signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


def restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def end_with_parent(descriptor: int, process: subprocess.Popen[bytes]) -> None:
    os.read(descriptor, 1)
    end_group(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        end_group(process.pid, signal.SIGKILL)


def end_group(group: int, number: signal.Signals) -> None:
    """Signals every process of the command's session; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
