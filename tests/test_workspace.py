"""Which files are found from where, and what is read from them: real files, an environment of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core.errors import ConfigError, UsageError
from controller.core.planner import make_plan
from controller.core.playbook import parse_playbook
from controller.core.shape import model_shape
from controller.workspace import Workspace, load_workspace, shipped_folder, ssh_patterns

HOST = """\
schema = 1
{include}
[hosts.{name}]
python = "/opt/python"
workdir = "/srv/ctl"
output_roots = ["out"]
accelerator = "cpu"
"""

PLAYBOOK = """\
schema = 1
[model]
path = "{model}"
[data]
path = "d"
[output]
path = "out/m"
"""

SHIPPED_HOST = "10.1.230.174"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / "project" / "deep").mkdir(parents=True)
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def host(name: str, include: str = "") -> str:
    return HOST.format(name=name, include=include)


def workspace(home: Path, cwd: str = "project/deep", **environ: str) -> Workspace:
    return load_workspace(cwd=home / cwd, environ={"HOME": str(home), **environ})


def test_nearest_project_file_upwards_counts_and_search_stops_at_home(home: Path) -> None:
    write(home.parent / "hosts.toml", host("above"))
    assert "above" not in workspace(home).config.hosts
    write(home / "project" / "hosts.toml", host("ours"))
    assert "ours" in workspace(home).config.hosts
    assert "ours" not in workspace(home, ".").config.hosts


def test_ctl_config_names_the_project_file(home: Path) -> None:
    write(home / "project" / "hosts.toml", host("ours"))
    write(home / "other.toml", host("theirs"))
    found = workspace(home, CTL_CONFIG="~/other.toml")
    assert "theirs" in found.config.hosts
    assert "ours" not in found.config.hosts
    with pytest.raises(ConfigError) as caught:
        workspace(home, CTL_CONFIG="absent.toml")
    assert "CTL_CONFIG" in caught.value.why


def test_user_file_follows_xdg(home: Path) -> None:
    write(home / ".config/ctl/hosts.toml", host("mine"))
    write(home / "xdg/ctl/hosts.toml", host("moved"))
    assert "mine" in workspace(home).config.hosts
    assert "moved" in workspace(home, XDG_CONFIG_HOME=str(home / "xdg")).config.hosts
    assert "mine" in workspace(home, XDG_CONFIG_HOME="relative").config.hosts


def test_includes_are_read_and_missing_ones_are_listed(home: Path) -> None:
    write(home / "project/hosts.toml", host("ours", 'include = ["more/a.toml", "absent.toml"]'))
    write(home / "project/more/a.toml", host("included", 'include = ["../hosts.toml"]'))
    config = workspace(home).config
    assert {"ours", "included"} <= set(config.hosts)
    found = {Path(source.path).name: source.document is not None for source in config.sources}
    assert found["absent.toml"] is False
    assert found["a.toml"] is True


def test_host_in_file_and_include_is_refused_naming_both(home: Path) -> None:
    write(home / "project/hosts.toml", host("ours", 'include = ["a.toml"]'))
    write(home / "project/a.toml", host("ours"))
    with pytest.raises(ConfigError) as caught:
        workspace(home)
    assert "hosts.toml:3" in caught.value.why
    assert "a.toml:3" in caught.value.why


def test_unreadable_text_is_a_config_error(home: Path) -> None:
    (home / "project/hosts.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        workspace(home)


def test_what_seems_to_be_a_hosts_file_and_is_none_is_named(home: Path) -> None:
    """It is there for whoever looks, so that no hosts are found in it is no answer."""
    own, chosen = home / ".config" / "ctl" / "hosts.toml", home / "chosen.toml"
    playbook = home / "project" / "deep" / "playbooks" / "m.toml"
    cases: list[tuple[Path, Callable[[], object]]] = [
        (home / "project" / "hosts.toml", lambda: workspace(home)),
        (own, lambda: workspace(home)),
        (chosen, lambda: workspace(home, CTL_CONFIG=str(chosen))),
        (playbook, lambda: workspace(home).playbook("m")),
    ]
    for path, read in cases:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nowhere.toml")
        with pytest.raises(ConfigError, match=f"{path} cannot be read: it is a link to nowhere.toml, which is not"):
            read()
        path.unlink()
        path.mkdir()
        with pytest.raises(ConfigError, match=f"{path} cannot be read: it is a folder"):
            read()
        path.rmdir()
    assert workspace(home).project is None


def test_a_byte_order_mark_which_no_editor_shows_is_left_out(home: Path) -> None:
    (home / "project/hosts.toml").write_bytes(b"\xef\xbb\xbf" + host("a").encode())
    assert workspace(home).project == home / "project/hosts.toml"
    (home / "project/hosts.toml").write_bytes(b"\xef\xbb\xbfschema = 1\nschema = 2\n")
    with pytest.raises(ConfigError, match=r"hosts.toml:2:\d+: not valid TOML"):
        workspace(home)


def test_runs_folder_is_beside_the_projects_file_unless_set(home: Path) -> None:
    assert workspace(home).runs_dir == home / "project/deep/ctl-runs"
    write(home / "project/hosts.toml", "schema = 1\n")
    assert workspace(home).runs_dir == home / "project/ctl-runs"
    assert workspace(home, CTL_RUNS_DIR="~/runs").runs_dir == home / "runs"
    assert workspace(home, CTL_RUNS_DIR="/abs").runs_dir == Path("/abs")


def test_playbook_of_the_project_beats_the_users_beats_the_shipped(home: Path) -> None:
    write(home / "project/hosts.toml", host("ours"))
    write(home / ".config/ctl/playbooks/demo.toml", PLAYBOOK.format(model="users"))
    found = workspace(home)
    assert found.playbook("demo").model.path == "users"
    write(home / "project/playbooks/demo.toml", PLAYBOOK.format(model="projects"))
    assert workspace(home).playbook("demo").model.path == "projects"
    assert "eagle3-kimi-k2.5" in found.playbooks


def test_playbook_by_path_setting_and_host(home: Path) -> None:
    write(home / "project/deep/x.toml", PLAYBOOK.format(model="by-path"))
    write(home / "project/hosts.toml", host("ours") + 'playbook = "demo"\n')
    found = workspace(home)
    ours = found.config.host("ours")
    assert found.playbook("x.toml").model.path == "by-path"
    assert found.playbook("./x.toml", ours).name == "x"
    assert found.playbook(None, ours).name == "demo"
    assert workspace(home, CTL_PLAYBOOK="x.toml").playbook(None, ours).name == "x"
    with pytest.raises(UsageError):
        found.playbook(None)
    with pytest.raises(ConfigError, match="no playbook"):
        found.playbook("y.toml")
    with pytest.raises(ConfigError) as caught:
        found.playbook("dmeo")
    assert caught.value.fix == "did you mean `demo`?"


def test_secret_values_come_from_environment_file_and_env_tables(home: Path) -> None:
    write(home / "project/key", "from-file\n")
    secrets = '[hosts.ours.secrets]\nA = { env = "LOCAL_A" }\nB = { file = "key" }\n'
    env = '[hosts.ours.env]\nC_TOKEN = "c"\nD = "d"\nHTTPS_PROXY = "http://me:e@proxy"\n'
    write(home / "project/hosts.toml", host("ours") + secrets + env)
    found = workspace(home, LOCAL_A="from-env")
    ours = found.config.host("ours")
    assert found.secret_values(ours, None) == {
        "A": "from-env",
        "B": "from-file",
        "C_TOKEN": "c",
        "HTTPS_PROXY": "http://me:e@proxy",
    }
    command = parse_playbook("x", "x.toml", 'schema = 1\nkind = "command"\nargv = ["x"]\nsecrets = ["A"]\n')
    assert found.secret_values(ours, command) == {"A": "from-env", "HTTPS_PROXY": "http://me:e@proxy"}
    with pytest.raises(ConfigError) as caught:
        workspace(home).secret_values(ours, None)
    assert "LOCAL_A" in caught.value.fix
    write(home / "project/key", "\n")
    with pytest.raises(ConfigError, match="`B`"):
        found.secret_values(ours, None)


def test_ssh_aliases_are_known_through_includes(home: Path) -> None:
    write(home / ".ssh/config", "Include conf.d/*\nHost a b-*\n  HostName x\nHost=c\n")
    write(home / ".ssh/conf.d/one", 'host "d"\n  Include ~/.ssh/config\n')
    assert set(ssh_patterns(home)) == {"a", "b-*", "c", "d"}
    text = host("ours").replace("[hosts.ours]", "[defaults]")
    write(home / "project/hosts.toml", text)
    assert workspace(home).config.host("b-7").address == "b-7"
    with pytest.raises(UsageError):
        workspace(home).config.host("e")


def test_shipped_files_are_valid_and_plan(home: Path) -> None:
    found = workspace(home)
    lab = found.config.host(SHIPPED_HOST)
    assert (lab.gpus, lab.user, lab.playbook) == (8, "root", "eagle3-kimi-k2.5")
    book = found.playbook(None, lab)
    plan = make_plan(lab, book, run_id="20260102-030405-a1b2c3", created="now", payload="ab" * 32, ctl_version="0")
    assert plan["extract"] is not None
    assert plan["extract"]["engine"]["tensor_parallel_size"] == 8
    assert model_shape(book).num_layers == 61
    assert shipped_folder() / "hosts.toml" in {Path(source.path) for source in found.config.sources}


def test_shipped_demo_playbook_fits_a_cpu_host(home: Path) -> None:
    demo = host("demo").replace('["out"]', '["output"]')
    write(home / "project/hosts.toml", demo)
    found = workspace(home)
    plan = make_plan(
        found.config.host("demo"), found.playbook("demo"),
        run_id="20260102-030405-a1b2c3", created="now", payload="ab" * 32, ctl_version="0",
    )  # fmt: skip
    assert plan["job"]["outputs"][0]["path"] == "/srv/ctl/output/demo"
    assert plan["job"]["env"] == {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}
