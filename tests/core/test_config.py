"""hosts.toml: what is accepted, what is refused and how the refusal speaks, and which value counts."""

from __future__ import annotations

import json

import pytest

from controller.core.config import BUILT_IN, Config, build
from controller.core.errors import ConfigError, ExitCode, UsageError
from controller.core.model import Host, Playbook
from controller.core.sources import Layer, Source, includes
from controller.core.suggest import did_you_mean, nearest
from controller.core.tomltext import dotted, parse
from controller.core.validation import check_keys, fail, keys_of

HOST = """\
schema = 1

[hosts.gpu1]
address = "192.0.2.7"
user = "lab"
python = "/opt/vllm/bin/python"
workdir = "/srv/ctl"
output_roots = ["states", "/data/states/"]
gpus = 8
"""


def source(text: str, *, path: str = "/project/hosts.toml", layer: Layer = Layer.PROJECT) -> Source:
    return Source(path=path, layer=layer, document=parse(path, text))


def config(*sources: Source, **settings: object) -> Config:
    given: dict[str, object] = {"flags": {}, "environ": {}, "home": "/home/me", **settings}
    return build(sources, **given)  # type: ignore[arg-type]


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config(source(text))
    return caught.value


# ---------------------------------------------------------------------------------------------- hosts


def test_host_paths_are_absolute_and_normalised() -> None:
    host = config(source(HOST + 'lease_dir = "leases//gpu"\n')).host("gpu1")
    assert host.output_roots == ("/srv/ctl/states", "/data/states")
    assert host.lease_dir == "/srv/ctl/leases/gpu"
    assert host.resolve("models/m") == "/srv/ctl/models/m"
    assert host.resolve("/models//m/") == "/models/m"


def test_record_says_that_ssh_decides_where_nothing_is_given() -> None:
    text = HOST.replace('user = "lab"\n', "").replace('address = "192.0.2.7"\n', "")
    record = config(source(text)).host("gpu1").record()
    assert (record["address"], record["user"], record["port"]) == ("gpu1", "", 0)


def test_the_folder_of_leases_is_shown_as_used_where_none_is_set() -> None:
    assert config(source(HOST)).document()["values"]["hosts.gpu1.lease_dir"]["value"] == "/run/lock/ctl"
    assert config(source(HOST)).host("gpu1").record()["lease_dir"] is None, "the host decides"


def test_host_is_found_by_name_and_by_address() -> None:
    made = config(source(HOST))
    assert made.host("gpu1") == made.host("192.0.2.7")


def test_address_of_two_hosts_is_ambiguous() -> None:
    second = HOST.split("\n", 2)[2].replace("gpu1", "gpu2")
    with pytest.raises(UsageError) as caught:
        config(source(HOST + second)).host("192.0.2.7")
    assert "gpu1" in caught.value.why
    assert "gpu2" in caught.value.why


def test_unknown_host_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        config(source(HOST)).host("gpu-1")
    assert caught.value.fix == "did you mean `gpu1`?"
    assert caught.value.exit_code is ExitCode.USAGE


def test_no_host_given_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        config(source(HOST)).host()
    assert "gpu1" in caught.value.why


def test_ssh_alias_becomes_a_host_from_defaults() -> None:
    text = """\
schema = 1
[defaults]
python = "/opt/python"
workdir = "/srv/ctl"
output_roots = ["out"]
accelerator = "cpu"
"""
    made = config(source(text), ssh_patterns=("lab-*", "*"))
    host = made.host("lab-3")
    assert (host.name, host.address, host.python) == ("lab-3", "lab-3", "/opt/python")
    with pytest.raises(UsageError):
        made.host("other")  # only `Host *` matches, and that says nothing


def test_ssh_alias_without_enough_defaults_says_what_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        config(source('schema = 1\n[defaults]\npython = "/opt/python"\n'), ssh_patterns=("lab",)).host("lab")
    assert caught.value.data["missing"] == ["workdir", "output_roots", "gpus"]


def test_fleet_gives_hosts_in_order_and_unknown_ones_are_refused() -> None:
    made = config(source(HOST + '[fleets.lab]\nhosts = ["gpu1"]\n'))
    assert [host.name for host in made.fleet("lab")] == ["gpu1"]
    with pytest.raises(UsageError):
        made.fleet("lap")
    error = refused(HOST + '[fleets.lab]\nhosts = ["gpu2"]\n')
    assert error.what.startswith("/project/hosts.toml:11: ")
    assert "gpu1" in error.fix


@pytest.mark.parametrize(
    ("line", "where", "says"),
    [
        ("gpuz = 8", "hosts.gpu1.gpuz", "did you mean `gpus`?"),
        ("gpuz = 8\nusr = 1", "hosts.gpu1.gpuz", "unknown key `hosts.gpu1.usr`: did you mean `user`?"),
        ('port = "22"', "hosts.gpu1.port", "write a whole number, without quotes"),
        ("port = true", "hosts.gpu1.port", ""),
        ("port = 70000", "hosts.gpu1.port", ""),
        ('transport = "rsh"', "hosts.gpu1.transport", ""),
        ('lease_dir = "~/leases"', "hosts.gpu1.lease_dir", "relative to `workdir`"),
        ('bootstrap_python = "bin/python"', "hosts.gpu1.bootstrap_python", ""),
        ('gpu_name = "a\\nb"', "hosts.gpu1.gpu_name", ""),
        ("connect_timeout_s = 0", "hosts.gpu1.connect_timeout_s", ""),
        ("gpu_name = 8", "hosts.gpu1.gpu_name", "write text in quotes"),
        ('env = "A=1"', "hosts.gpu1.env", "write a table"),
        ("connect_timeout_s = inf", "hosts.gpu1.connect_timeout_s", ""),
        ('env = { "A-B" = "1" }', "hosts.gpu1.env.A-B", ""),
        ("env = { A = 1 }", "hosts.gpu1.env.A", ""),
        ('env = { CTL_RUN_ID = "x" }', "hosts.gpu1.env.CTL_RUN_ID", "remove `CTL_RUN_ID`"),
        ('secrets = "A=1"', "hosts.gpu1.secrets", "write a table"),
        ('secrets = { T = { env = "A", file = "b" } }', "hosts.gpu1.secrets.T", "exactly one"),
        ('secrets = { T = { keyring = "a" } }', "hosts.gpu1.secrets.T", "belong together"),
        ('secrets = { T = { env = "A", account = "b" } }', "hosts.gpu1.secrets.T", "belong together"),
        ('secrets = { T = { account = "b" } }', "hosts.gpu1.secrets.T", "exactly one"),
        ('secrets = { T = { enw = "A" } }', "hosts.gpu1.secrets.T.enw", "did you mean `env`?"),
        ('env = { A = "1" }\nsecrets = { A = { env = "A" } }', "hosts.gpu1", "remove one"),
    ],
)
def test_bad_host_value_is_refused_with_its_line_and_key(line: str, where: str, says: str) -> None:
    error = refused(HOST + line + "\n")
    expected_line = 3 if where == "hosts.gpu1" else 10
    assert error.what.startswith(f"/project/hosts.toml:{expected_line}")
    assert error.data["key"] == where
    assert says in f"{error.why} {error.fix}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('workdir = "/srv/ctl"', 'workdir = "srv"'),
        ('workdir = "/srv/ctl"', 'workdir = "/srv/../etc"'),
        ('workdir = "/srv/ctl"', 'workdir = "//"'),
        ('"/data/states/"', '"/"'),
        ('["states", "/data/states/"]', "[]"),
        ('["states", "/data/states/"]', '["../../etc"]'),
        ("192.0.2.7", "-oProxyCommand=id"),
        ("192.0.2.7", "a b"),
        ('user = "lab"', 'user = "-l"'),
        ("gpus = 8", "gpus = 0"),
        ("gpus = 8", ""),
    ],
)
def test_dangerous_or_missing_host_value_is_refused(old: str, new: str) -> None:
    assert "gpu1" in refused(HOST.replace(old, new)).what


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("root@127.0.0.1:47629", 'write address = "127.0.0.1", user = "root", port = 47629'),
        ("127.0.0.1:47629", 'write address = "127.0.0.1", port = 47629'),
        ("root@gpu1", 'write address = "gpu1", user = "root"'),
        ("[::1]:22", 'write address = "::1", port = 22'),
    ],
)
def test_an_address_that_says_more_is_taken_apart(address: str, fix: str) -> None:
    assert refused(HOST.replace("192.0.2.7", address)).fix == fix


@pytest.mark.parametrize("address", ["fe80::1", "gpu1.example", "10.0.0.1"])
def test_other_addresses_are_taken_as_they_are(address: str) -> None:
    assert config(source(HOST.replace("192.0.2.7", address))).host("gpu1").address == address


def test_all_problems_of_a_host_are_reported_at_once() -> None:
    error = refused(HOST.replace("gpus = 8", 'gpus = "8"\nport = 0'))
    assert "`hosts.gpu1.port`" in error.what
    assert "`hosts.gpu1.gpus`" in error.why


def test_syntax_error_names_line_and_column() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("/project/hosts.toml", "schema = 1\n[hosts.a]\ngpus = \n")
    assert caught.value.what == "/project/hosts.toml:3:8: not valid TOML"
    assert caught.value.data == {"file": "/project/hosts.toml", "line": 3, "column": 8}


def test_unknown_table_and_missing_schema_are_refused() -> None:
    assert refused("schema = 1\n[host.a]\n").fix == "did you mean `hosts`?"
    assert "schema" in refused("[defaults]\n").what
    assert refused("schema = 2\n").data["key"] == "schema"
    assert "address" not in refused('schema = 1\n[defaults]\naddress = "a"\n').fix


def test_models_are_frozen() -> None:
    host = config(source(HOST)).host("gpu1")
    assert isinstance(host, Host)
    with pytest.raises(ValueError, match="frozen"):
        host.gpus = 1  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ precedence


def test_layers_merge_key_by_key_and_origins_name_file_line_and_layer() -> None:
    user = source(
        'schema = 1\n[defaults]\ncommand_timeout_s = 90\n[hosts.gpu1]\nuser = "me"\ngpu_name = "H200"\n',
        path="/home/me/.config/ctl/hosts.toml",
        layer=Layer.USER,
    )
    made = config(source(HOST), user)
    host = made.host("gpu1")
    assert (host.user, host.gpu_name, host.command_timeout_s) == ("lab", "H200", 90.0)
    origins = made.origins()
    assert origins["hosts.gpu1.user"] == "/project/hosts.toml:5 (project)"
    assert origins["hosts.gpu1.gpu_name"] == "/home/me/.config/ctl/hosts.toml:6 (user)"
    assert origins["hosts.gpu1.command_timeout_s"] == "/home/me/.config/ctl/hosts.toml:3 (user)"
    assert origins["hosts.gpu1.bootstrap_python"] == BUILT_IN


def test_a_hosts_own_key_beats_defaults_of_a_higher_file() -> None:
    project = source('schema = 1\n[defaults]\nuser = "everyone"\n')
    user = source(HOST, path="/home/me/hosts.toml", layer=Layer.USER)
    assert config(project, user).host("gpu1").user == "lab"


def test_shipped_host_counts_only_where_the_project_defines_none() -> None:
    shipped = source(HOST + 'gpu_name = "H200"\n', path="/lib/hosts.toml", layer=Layer.SHIPPED)
    assert config(shipped).host("gpu1").gpu_name == "H200"
    assert config(source(HOST), shipped).host("gpu1").gpu_name is None


def test_a_shipped_host_is_no_host_of_yours_but_can_be_named() -> None:
    shipped = source(HOST.replace("gpu1", "example"), path="/lib/hosts.toml", layer=Layer.SHIPPED)
    alone = config(shipped)
    assert alone.host_names() == ()
    assert alone.host("example").gpus == 8
    with pytest.raises(UsageError) as caught:
        alone.host()
    assert (caught.value.why, caught.value.fix) == (
        "no host is defined",
        "describe one with `ctl init` or `ctl hosts add`",
    )
    with pytest.raises(UsageError) as caught:
        alone.host("exampel")
    assert "example" not in caught.value.fix
    both = config(source(HOST.replace("192.0.2.7", "example")), shipped)
    assert both.host_names() == ("gpu1",)
    assert both.host("example").name == "gpu1"  # by its address: yours come first
    extended = config(source("schema = 1\n[hosts.example]\ngpus = 4\n", layer=Layer.USER), shipped)
    assert extended.host_names() == ("example",)


def test_env_tables_merge_by_name() -> None:
    text = HOST.replace("[hosts.gpu1]", '[defaults.env]\nA = "1"\nB = "1"\n[hosts.gpu1]')
    made = config(source(text + '[hosts.gpu1.env]\nB = "2"\n'))
    assert made.host("gpu1").env == {"A": "1", "B": "2"}
    assert made.origins()["hosts.gpu1.env.A"] == "/project/hosts.toml:4 (project)"


def test_same_host_twice_in_a_layer_names_both_files() -> None:
    with pytest.raises(ConfigError) as caught:
        config(source(HOST), source(HOST, path="/project/more.toml"))
    assert caught.value.data["files"] == ["/project/hosts.toml:3", "/project/more.toml:3"]


def test_settings_take_flag_over_environment_over_built_in() -> None:
    environ = {"CTL_HOST": "gpu1", "CTL_RUNS_DIR": "/env", "CTL_PLAYBOOK": ""}
    made = config(source(HOST), flags={"runs_dir": "/flag", "host": None}, environ=environ)
    assert made.host().name == "gpu1"
    assert made.settings["runs_dir"].value == "/flag"
    assert made.origins()["runs_dir"] == "--runs-dir"
    assert made.origins()["host"] == "CTL_HOST"
    assert made.playbook(made.host()) is None
    assert config(source(HOST)).settings["runs_dir"].origin == BUILT_IN


def test_values_of_a_host_that_only_came_with_ctl_are_shown_where_a_setting_means_it() -> None:
    example = "schema = 1\n[defaults]\ncommand_timeout_s = 90\n" + HOST.partition("\n")[2].replace("gpu1", "example")
    shipped = source(example, path="/ctl/hosts.toml", layer=Layer.SHIPPED)
    made = config(source(HOST), shipped)
    assert {key.split(".")[1] for key in made.document()["values"] if key.startswith("hosts.")} == {"gpu1"}
    assert made.origins()["hosts.gpu1.command_timeout_s"] == "/ctl/hosts.toml:3 (shipped)"  # its defaults count
    assert made.host("example").name == "example"
    meant = config(source(HOST), shipped, environ={"CTL_HOST": "example"})
    assert meant.origins()["hosts.example.user"].startswith("/ctl/hosts.toml:")
    own = config(source(example, path="/ctl/hosts.toml"))  # in ctl's own checkout
    assert "hosts.example.user" in own.values()


def test_shown_values_are_json_and_hide_secrets() -> None:
    env = '[hosts.gpu1.env]\nHF_TOKEN = "hf_abc"\nHTTPS_PROXY = "http://me:hf_abc@proxy"\n'
    made = config(source(HOST + env + '[hosts.gpu1.secrets]\nK = { file = "k" }\n'))
    text = json.dumps(made.document())
    assert "hf_abc" not in text
    assert made.values()["hosts.gpu1.env.HF_TOKEN"].value == "***"
    assert made.document()["files"][0]["found"] is True
    assert "hf_abc" not in repr(made.host("gpu1"))


def test_local_paths_start_at_the_file_that_they_stand_in() -> None:
    text = HOST + 'ssh_config = "ssh/config"\nsecrets = { K = { file = "k" }, L = { file = "~/l" } }\n'
    host = config(source(text)).host("gpu1")
    assert host.ssh_config == "/project/ssh/config"
    assert (host.secrets["K"].file, host.secrets["L"].file) == ("/project/k", "/home/me/l")


def test_includes_are_relative_to_the_file() -> None:
    document = parse("/project/hosts.toml", 'include = ["more/a.toml", "/etc/b.toml", "~/c.toml"]')
    assert includes(document, home="/home/me") == ("/project/more/a.toml", "/etc/b.toml", "/home/me/c.toml")
    with pytest.raises(ConfigError):
        includes(parse("/project/hosts.toml", 'include = "more.toml"'), home="/home/me")


# ------------------------------------------------------------------------------------------- TOML text


def test_lines_are_found_behind_multi_line_values_and_quoted_keys() -> None:
    document = parse(
        "f",
        'a = [\n  "x",\n  ["y"]\n]\ntext = """\n[no.table]\nb = 1\n"""\n[hosts."10.0.0.1"] # gpu\nenv.A = "1"\n'
        'in = { one = 1, two = { three = 3 } }\n[hosts.b]\n"q.k" = 1\n',
    )
    assert document.line(("text",)) == 5
    assert document.line(("hosts", "10.0.0.1")) == 9
    assert document.line(("hosts", "10.0.0.1", "env", "A")) == 10
    assert document.line(("hosts", "10.0.0.1", "in", "two", "three")) == 11
    assert document.line(("hosts", "b", "q.k")) == 13
    assert document.line(("hosts", "b", "absent")) == 12
    assert document.line(("absent",)) is None
    assert document.line(("no", "table")) is None


def test_dotted_quotes_what_toml_would() -> None:
    assert dotted(("hosts", "10.0.0.1", "gpus")) == 'hosts."10.0.0.1".gpus'


def test_nearest_ignores_case_and_dashes() -> None:
    assert nearest("Output-Roots", ["output_roots", "gpus"]) == "output_roots"
    assert nearest("zzz", ["gpus"]) is None
    assert did_you_mean("zzz", ["b", "a"], kind="keys") == "valid keys: a, b"


# ------------------------------------------------------------------------------------ errors about keys


def test_keys_of_a_model_are_those_that_a_file_may_set() -> None:
    assert "name" not in keys_of(Host)
    assert "schema" in keys_of(Playbook)


def test_check_keys_and_fail_name_the_place() -> None:
    document = parse("f.toml", "\na = 1\n")
    check_keys(document.data, ["a"], prefix=(), where=document.where)
    with pytest.raises(ConfigError, match=r"f\.toml:2: unknown key `t\.a`"):
        check_keys(document.data, ["b"], prefix=("t",), where=lambda key: document.where(key[1:]))
    with pytest.raises(ConfigError, match=r"f\.toml:2: no") as caught:
        fail(document, ("a",), "no", fix="do")
    assert caught.value.fix == "do"
