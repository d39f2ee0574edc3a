"""Where the values of secrets come from: this workstation's environment, a file, or its keyring.

They are read when a run is planned, travel to the host in the launch request on stdin, and are written nowhere.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from controller.core.errors import ConfigError
from controller.core.model import Secret

KEYRING_TIMEOUT_S = 120.0
"""A locked keyring asks its owner for a password in a window of its own, which takes a person a while."""


def read_secret(name: str, source: Secret, host: str, environ: Mapping[str, str]) -> str:
    """Return the value of the secret `name` of a host.

    Raises ConfigError (`no-secret`, `no-keyring`) that names the secret and its source, never its value.
    """
    where = f"secret `{name}` of host `{host}`"
    if source.env is not None:
        value = environ.get(source.env)
        if not value:
            raise ConfigError(f"{where} is not set", fix=f"set {source.env} in your environment", code="no-secret")
        return value
    if source.file is not None:
        return _from_file(Path(source.file), where)
    assert source.keyring is not None
    assert source.account is not None
    return _from_keyring(source.keyring, source.account, where)


def _from_file(path: Path, where: str) -> str:
    fix = f"write it into {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read", why=str(error), fix=fix, code="no-secret") from error
    if not text.strip():
        raise ConfigError(f"{where} has no value", fix=fix, code="no-secret")
    return text.rstrip("\r\n")


def _from_keyring(service: str, account: str, where: str) -> str:
    try:
        import keyring
    except ImportError as error:
        raise ConfigError(
            f"{where} comes from the keyring, and the library for that is not installed",
            why=str(error),
            fix="install it with `pip install 'ctl-hidden-states[keyring]'`, or give the secret as `env` or `file`",
            code="no-keyring",
        ) from error
    found: list[str | None] = []
    failure: list[Exception] = []

    def ask() -> None:
        try:
            found.append(keyring.get_password(service, account))
        except Exception as error:  # noqa: BLE001 - each backend has errors of its own; reported below
            failure.append(error)

    # A backend waits for its service, or for a person, without any limit of its own.
    worker = threading.Thread(target=ask, name="ctl-keyring", daemon=True)
    worker.start()
    worker.join(KEYRING_TIMEOUT_S)
    backend = f"{type(keyring.get_keyring()).__module__}"
    if worker.is_alive() or failure:
        silent = f"{backend} did not answer within {KEYRING_TIMEOUT_S:.0f} s"
        raise ConfigError(
            f"{where} cannot be read from the keyring",
            why=f"{backend}: {type(failure[0]).__name__}: {failure[0]}" if failure else silent,
            fix="unlock it, see `keyring diagnose`, or give the secret as `env` or `file`",
            code="no-keyring",
        )
    if not found[0]:
        raise ConfigError(
            f"{where} is not in the keyring",
            why=f"{backend} has nothing for service {service!r} and account {account!r}",
            fix=f"store it with `keyring set {service} {account}`",
            code="no-secret",
        )
    return found[0]
