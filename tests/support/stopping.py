"""A job with a child that ignores SIGTERM in a session of its own, and the request that stops a run."""

from __future__ import annotations

from typing import Any

from support.hostrun import HostRun

READY = "import os, signal, subprocess, sys, time\n"
CHILD = (
    READY
    + """
child = [sys.executable, '-S', '-c', "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
         "print('child up', flush=True); open('child', 'w').write('1'); time.sleep(300)"]
subprocess.Popen(child, start_new_session=True)
time.sleep(300)
"""
)


def stop(host: HostRun, plan: dict[str, object], grace_s: float = 1.0, force: bool = False) -> dict[str, Any]:
    return host.ask("stop", {"run_id": plan["run_id"], "grace_s": grace_s, "force": force})
