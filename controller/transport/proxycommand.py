"""ProxyCommand: a local program whose stdin and stdout are the way to the host."""

from __future__ import annotations

import socket
import subprocess
import threading


def start_proxy_command(command: str) -> socket.socket:
    """Start `command` (its tokens already expanded) and return a socket connected to it.

    A real socket, unlike paramiko's ProxyCommand, ends for both sides when either closes it, so that the deadlines
    hold here too. The program's stderr is the user's.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # Through a shell, as OpenSSH does: the value is a shell command of the user's own configuration.
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name="ctl-proxy-command", daemon=True).start()
    return ours
