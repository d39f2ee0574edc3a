"""Which names hold secrets, and that no value of one is shown."""

from __future__ import annotations

import pytest

from controller.core.redaction import is_secret, redact, secret_in_argv, split_env


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("hf_token", True),
        ("OPENAI_API_KEY", True),
        ("APIKEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_HOME", False),
        ("KEYBOARD", False),
    ],
)
def test_secret_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_environment_is_split_and_redacted() -> None:
    env = {"B_TOKEN": "x", "A": "1"}
    assert split_env(env) == ({"A": "1"}, ["B_TOKEN"])
    assert redact(env, ["OTHER"]) == {"A": "1", "B_TOKEN": "***", "OTHER": "***"}


def test_secret_assignment_in_argv_is_seen() -> None:
    assert secret_in_argv(["env", "HF_TOKEN=abc", "python"]) == "HF_TOKEN"
    assert secret_in_argv(["env", "MAX_TOKENS=5", "HF_TOKEN=", "--pad_token=<pad>"]) is None
