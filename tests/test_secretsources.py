"""Secrets from the environment, a file and the keyring: found, or explained without the value."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import keyring
import keyring.backends.fail
import keyring.backends.null
import pytest
from support.filekeyring import FILE, FileKeyring

from controller import secretsources
from controller.core.errors import ConfigError
from controller.core.model import Secret
from controller.secretsources import read_secret

STORED = Secret(keyring="hf", account="me")


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "keyring.json"
    path.write_text(json.dumps({"hf": {"me": "from-keyring"}}))
    monkeypatch.setenv(FILE, str(path))
    before = keyring.get_keyring()
    keyring.set_keyring(FileKeyring())
    yield
    keyring.set_keyring(before)


def read(secret: Secret, **environ: str) -> str:
    return read_secret("TOKEN", secret, "gpu1", environ)


def failure(secret: Secret, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(secret, **environ)
    assert "`TOKEN` of host `gpu1`" in caught.value.what
    return caught.value


def test_each_source_gives_its_value(ring: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from-file\n")
    assert read(STORED) == "from-keyring"
    assert read(Secret(env="LOCAL"), LOCAL="from-env") == "from-env"
    assert read(Secret(file=str(tmp_path / "file"))) == "from-file"


def test_what_no_source_has_is_named(ring: None, tmp_path: Path) -> None:
    absent = failure(Secret(keyring="hf", account="you"))
    assert (absent.code, absent.fix) == ("no-secret", "store it with `keyring set hf you`")
    assert failure(Secret(env="LOCAL")).code == "no-secret"
    assert failure(Secret(env="LOCAL"), LOCAL="").code == "no-secret"
    assert failure(Secret(file=str(tmp_path / "none"))).code == "no-secret"
    (tmp_path / "empty").write_text("\n")
    assert failure(Secret(file=str(tmp_path / "empty"))).code == "no-secret"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert failure(Secret(file=str(tmp_path / "binary"))).code == "no-secret"


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    error = failure(STORED)
    assert error.code == "no-keyring"
    assert "[keyring]" in error.fix


@pytest.mark.parametrize(
    ("backend", "code", "why"),
    [
        (keyring.backends.null.Keyring, "no-secret", "keyring.backends.null has nothing"),
        (keyring.backends.fail.Keyring, "no-keyring", "NoKeyringError"),
    ],
)
def test_a_workstation_without_a_keyring_is_explained(
    ring: None, backend: type[keyring.backend.KeyringBackend], code: str, why: str
) -> None:
    keyring.set_keyring(backend())
    error = failure(STORED)
    assert error.code == code
    assert why in error.why


def test_a_locked_keyring_and_one_that_never_answers_are_told_apart(
    ring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = failure(Secret(keyring="locked", account="me"))
    assert (locked.code, "KeyringLocked: the collection is locked" in locked.why) == ("no-keyring", True)
    monkeypatch.setattr(secretsources, "KEYRING_TIMEOUT_S", 0.2)
    mute = failure(Secret(keyring="mute", account="me"))
    assert "did not answer" in mute.why
