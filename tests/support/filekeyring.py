"""A backend of the `keyring` library whose passwords stand in a file: {"service": {"account": "password"}}."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked

FILE = "TEST_KEYRING"
"""Environment variable with the path of the file; what `keyring.set_keyring` gets has none of its own."""


class FileKeyring(KeyringBackend):
    priority = 1  # type: ignore[assignment] # a class property in the base

    def get_password(self, service: str, username: str) -> str | None:
        if service == "locked":
            raise KeyringLocked("the collection is locked")
        if service == "mute":
            time.sleep(60)
        password: str | None = json.loads(Path(os.environ[FILE]).read_text()).get(service, {}).get(username)
        return password

    def set_password(self, service: str, username: str, password: str) -> None:
        raise NotImplementedError

    def delete_password(self, service: str, username: str) -> None:
        raise NotImplementedError
