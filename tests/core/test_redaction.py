"""Which names hold secrets, and that no value of one is shown."""

from __future__ import annotations

import pytest

from controller.core.errors import UsageError
from controller.core.redaction import is_secret, redact, refuse_secrets, secret_in_argv, split_env


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


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("http://me:hunter2@proxy:3128", True),
        ("https://index.example.org/simple https://me:hunter2@example.org/simple", True),
        ("postgresql+psycopg://:hunter2@db/x", True),
        ("http://proxy:3128", False),
        ("http://me@proxy:3128", False),
        ("http://me:$PROXY_PASSWORD@proxy:3128", False),
        ("http://me:$PROXY_PASSWORD@proxy:3128 http://me:hunter2@other:3128", True),
        ("me:hunter2@proxy", False),
        ("", False),
    ],
)
def test_a_password_in_a_url_makes_a_secret_of_any_variable(value: str, secret: bool) -> None:
    assert is_secret("HTTPS_PROXY", value) is secret
    assert split_env({"HTTPS_PROXY": value})[1] == (["HTTPS_PROXY"] if secret else [])
    assert redact({"HTTPS_PROXY": value}) == {"HTTPS_PROXY": "***" if secret else value}


def test_environment_is_split_and_redacted() -> None:
    env = {"B_TOKEN": "x", "A": "1"}
    assert split_env(env) == ({"A": "1"}, ["B_TOKEN"])
    assert redact(env, ["OTHER"]) == {"A": "1", "B_TOKEN": "***", "OTHER": "***"}


@pytest.mark.parametrize(
    ("argv", "how", "name"),
    [
        (["env", "HF_TOKEN=abc", "python"], "HF_TOKEN", "HF_TOKEN"),
        (["sh", "-c", "cd x && HF_TOKEN=abc python train.py"], "HF_TOKEN", "HF_TOKEN"),
        (["sh", "-c", "export A=1;WANDB_API_KEY='abc'; train"], "WANDB_API_KEY", "WANDB_API_KEY"),
        (["serve", "--api-key", "abc"], "--api-key", "API_KEY"),
        (["serve", "--api_key=abc"], "--api_key", "API_KEY"),
        (["login", "--token=abc"], "--token", "TOKEN"),
        (["login", "--password=-abc"], "--password", "PASSWORD"),
        (["env", "DB_PASSWORD=-$abc", "x"], "DB_PASSWORD", "DB_PASSWORD"),
        (["train", "--push_to_hub_token", "abc"], "--push_to_hub_token", "PUSH_TO_HUB_TOKEN"),
        (["mount", "--password", "abc"], "--password", "PASSWORD"),
        (["sh", "-c", "login --token 'abc' && train"], "--token", "TOKEN"),
        (["git", "clone", "https://me:hunter2@example.org/x"], "URL with a password", "URL"),
        (["train", "--db=postgresql://:hunter2@db/x"], "URL with a password", "URL"),
    ],
)
def test_a_secret_in_an_argv_is_seen_and_never_repeated(argv: list[str], how: str, name: str) -> None:
    found = secret_in_argv(argv)
    assert found is not None
    assert how in found.how
    assert found.name == name
    with pytest.raises(UsageError) as refused:
        refuse_secrets(argv, "box", "leave it out here")
    told = str(refused.value.to_dict())
    assert '[hosts."box".secrets]' in refused.value.fix
    assert "abc" not in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "argv",
    [
        ["env", "MAX_TOKENS=5", "HF_TOKEN=", "--pad_token=<pad>"],
        ["serve", "--max-tokens", "5", "--tokenizer", "x", "--eos-token", "</s>", "--token-count=3"],
        ["sh", "-c", 'HF_TOKEN=$MY_TOKEN serve --api-key "$API_KEY" --token=${T}'],
        ["train", "--use-auth-token", "--epochs", "3"],
        ["train", "--use_auth_token=True", "--token"],
        ["git", "clone", "ssh://git@example.org:22/x", "https://example.org:8080/@x", "host:/a@b"],
        ["tool", "--password-file", "/run/x", ""],
    ],
)
def test_what_only_looks_like_a_secret_passes(argv: list[str]) -> None:
    assert secret_in_argv(argv) is None
    refuse_secrets(argv, "box", "")
