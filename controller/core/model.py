"""Hosts and playbooks as values: what hosts.toml and playbooks/NAME.toml may say, checked and normalised.

Paths on the host are absolute POSIX paths after validation where the host alone decides them (`Host`); those of a
playbook stay as written, because the same playbook serves hosts with different folders, and are resolved by the
planner.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from controller.core.validation import refusal
from controller.core.values import (
    AbsolutePath,
    Address,
    Boundaries,
    Bytes,
    Count,
    DataPath,
    Duration,
    Environment,
    EnvName,
    FindingCode,
    Interpreter,
    OnFinish,
    RemotePath,
    Seconds,
    SshWord,
    Text,
    parse_seconds,
)
from remote_payload.host.layers import LAYER_CONVENTIONS
from remote_payload.host.protocol import Accelerator, HostRecord, Stale

ANY_PORT = 0
"""In a HostRecord: no port was given, the ssh configuration decides."""

OWNED_ENGINE_ARGUMENTS = {
    "model": "it is `path` in [model]",
    "revision": "it is `revision` in [model]",
    "trust_remote_code": "it is `trust_remote_code` in [model]",
    "dtype": "it is `dtype` in [model]",
    "max_model_len": "it follows from `max_seq_len` in [data]",
    "worker_cls": "the capture is a worker class of its own",
    "worker_extension_cls": "the capture is a worker class of its own",
    "enable_prefix_caching": "a cached prefix is not computed, so its states would be missing",
    "additional_config": "it keeps the compile caches of different captures apart",
    "pipeline_parallel_size": "models drop the states of earlier pipeline stages without a word",
    "data_parallel_size": "several engines would write the same samples",
    "prefill_context_parallel_size": "a worker would see only part of a prompt's rows",
    "decode_context_parallel_size": "a worker would see only part of a prompt's rows",
    "enable_dbo": "a batch would be run in two halves",
    "distributed_executor_backend": "the workers must be children of the supervised job",
    "speculative_config": "a draft model changes which states are computed",
    "kv_transfer_config": "vLLM's own extraction would run beside this one",
    "hf_token": "a plan holds no secrets; put HF_TOKEN into [hosts.NAME.secrets]",
}
"""vLLM engine arguments that a playbook may not set, and why."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# --------------------------------------------------------------------------------------------- hosts


class Secret(_Model):
    """Where the value of a secret environment variable is found on the workstation: exactly one of the three."""

    env: Text | None = None
    file: Text | None = None
    keyring: Text | None = None
    """The service under which the keyring holds it; `account` is whose it is there."""
    account: Text | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [self.env, self.file, self.keyring].count(None) != 2:
            words = 'write { env = "LOCAL_NAME" }, { file = "path" } or { keyring = "service", account = "name" }'
            raise refusal("a secret has exactly one source", words)
        if (self.keyring is None) != (self.account is None):
            words = 'write { keyring = "service", account = "name" }'
            raise refusal("`keyring` and `account` belong together", words)
        return self


class Fleet(_Model):
    """Hosts to act on together, by name."""

    hosts: Annotated[tuple[SshWord, ...], Field(min_length=1)]


class Host(_Model):
    """A host with every path absolute. `user` and `port` are None where the ssh configuration decides.

    `on_finish` is run on the workstation when a run has ended: an argv, or "notify" for a desktop notification.
    `price_per_gpu_hour` is in whatever currency its reader thinks in.
    """

    name: SshWord
    address: Address
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = None
    user: SshWord | None = None
    transport: Literal["auto", "paramiko", "openssh"] = "auto"
    ssh_config: Text | None = None
    connect_timeout_s: Seconds = 15.0
    command_timeout_s: Seconds = 60.0
    python: Interpreter
    bootstrap_python: Interpreter = "python3"
    workdir: AbsolutePath
    output_roots: Annotated[tuple[RemotePath, ...], Field(min_length=1)]
    lease_dir: RemotePath | None = None
    env_file: RemotePath | None = None
    accelerator: Accelerator = Accelerator.CUDA
    gpus: Annotated[int, Field(strict=True, ge=0)] = 0
    gpu_name: Text | None = None
    playbook: Text | None = None
    on_finish: OnFinish | None = None
    price_per_gpu_hour: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    env: Environment = Field(default_factory=dict, repr=False)
    secrets: dict[EnvName, Secret] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _resolve_paths(cls, data: Any) -> Any:
        workdir = data.get("workdir")
        if not isinstance(workdir, str):
            return data  # the field's own error says more
        found = dict(data)
        roots = found.get("output_roots")
        if isinstance(roots, list | tuple):
            found["output_roots"] = [_below(workdir, root) for root in roots]
        for name in ("lease_dir", "env_file"):
            if name in found:
                found[name] = _below(workdir, found[name])
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.workdir == "/":
            raise refusal("`workdir` cannot be /", key="workdir")
        if "/" in self.output_roots:
            fix = "name the folder that training data goes to"
            raise refusal("`output_roots` cannot hold /", fix, key="output_roots")
        if self.accelerator is Accelerator.CUDA and self.gpus == 0:
            fix = 'set `gpus`, or `accelerator = "cpu"`'
            raise refusal('accelerator "cuda" needs `gpus` of at least 1', fix, key="gpus")
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise refusal(f"`{both[0]}` stands in `env` and in `secrets`", "remove one of the two")
        return self

    def resolve(self, path: str) -> str:
        """Return a path on the host as an absolute one; relative paths start at `workdir`."""
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def record(self) -> HostRecord:
        """Return the host as a plan holds it."""
        return {
            "name": self.name,
            "address": self.address,
            "port": self.port or ANY_PORT,
            "user": self.user or "",
            "workdir": self.workdir,
            "python": self.python,
            "bootstrap_python": self.bootstrap_python,
            "accelerator": self.accelerator.value,
            "gpus": self.gpus,
            "lease_dir": self.lease_dir,
            "env_file": self.env_file,
        }


def _below(workdir: str, path: Any) -> Any:
    return posixpath.join(workdir, path) if isinstance(path, str) and path[:1] not in ("~", "") else path


# ----------------------------------------------------------------------------------------- playbooks


class CapturePath(StrEnum):
    """How states are taken: the model's own support, hooks around its layers, or whichever is proved."""

    AUTO = "auto"
    HOOKS = "hooks"
    NATIVE = "native"


class ModelSection(_Model):
    path: RemotePath
    revision: Text | None = None
    trust_remote_code: StrictBool = False
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    num_layers: Count | None = None
    hidden: Count | None = None


class DataSection(_Model):
    """`path` is on the host, or, after `local:`, on the workstation, from where it is pushed."""

    path: DataPath
    kind: Literal["auto", "tokens", "chat"] = "auto"
    max_samples: Count | None = None
    max_seq_len: Count = 4096
    over_long: Literal["truncate", "skip"] = "truncate"


class CaptureSection(_Model):
    """Boundary b = number of decoder layers completed: 0 is the embeddings, N the last layer's output.

    `boundaries` may be another system's layer ids: `layer_convention` names it, and they are converted. `final_norm`
    None: as the consumers of the output's format expect it.
    `buffer_bytes`: host memory that each rank may hold states in (pinned where there is a GPU).
    """

    boundaries: Boundaries = "eagle3"
    layer_convention: str = "boundaries"
    final_norm: StrictBool | None = None
    store_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = "auto"
    path: CapturePath = CapturePath.AUTO
    canary: StrictBool = True
    buffer_bytes: Annotated[int, Field(strict=True, ge=1 << 20)] = 4 << 30

    @model_validator(mode="after")
    def _known_convention(self) -> Self:
        if self.layer_convention not in LAYER_CONVENTIONS:
            known = ", ".join(LAYER_CONVENTIONS)
            what = f"there is no layer convention `{self.layer_convention}`"
            raise refusal(what, f"use one of {known}", key="layer_convention")
        return self


class RehearseSection(_Model):
    """Whether the job is first run on a model cut from the real one; "auto": where the load takes minutes."""

    mode: Literal["auto", "always", "never"] = "auto"


class OutputSection(_Model):
    path: RemotePath
    format: Literal["speculators", "speculators-0.3", "specforge", "modelopt"] = "speculators"
    stale: Stale = Stale.FAIL


class EngineSection(BaseModel):
    """`tensor_parallel_size` (None: all GPUs of the host) and any other vLLM engine argument, passed on as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    tensor_parallel_size: Count | None = None

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        for name in self.arguments:
            if "-" in name:
                raise refusal(f"`{name}` is not an engine argument", f"write `{name.replace('-', '_')}`", key=name)
            if name in OWNED_ENGINE_ARGUMENTS:
                what = f"`{name}` cannot be set: {OWNED_ENGINE_ARGUMENTS[name]}"
                raise refusal(what, f"remove `{name}`", key=name)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Engine arguments other than `tensor_parallel_size`."""
        return dict(self.model_extra or {})


class PreflightSection(_Model):
    """`allow`: codes of findings that are only warned about; `min_free_bytes`: room to leave on the output's disk."""

    min_free_bytes: Annotated[int, Field(strict=True, ge=0)] | None = None
    allow: tuple[FindingCode, ...] = ()


DEFAULT_LOG_CAP = 4 << 30
"""Bytes of log kept of a run, 4 GiB: vLLM prints a few MB a day, so only a loop of messages comes near."""


class LimitsSection(_Model):
    """Durations in seconds; None (written "none") lifts a limit. `log_cap` in bytes never ends a run."""

    load_timeout: Duration = 1800.0
    silence_timeout: Duration = 900.0
    time_limit: Duration = None
    stop_grace: Annotated[Seconds, BeforeValidator(parse_seconds)] = 30.0
    log_cap: Bytes = DEFAULT_LOG_CAP


class Playbook(_Model):
    """What to extract, host independent. The reader fills in `name`, `origin` (its file) and `engine_places`.

    `engine_places` says where each engine argument was set, as `file:line`.
    """

    name: str
    origin: str
    engine_places: dict[str, str] = Field(default_factory=dict, repr=False)
    schema_version: Annotated[Literal[1], Field(alias="schema")]
    kind: Literal["extract"] = "extract"
    description: str = ""
    model: ModelSection
    data: DataSection
    capture: CaptureSection = CaptureSection()
    output: OutputSection
    rehearse: RehearseSection = RehearseSection()
    engine: EngineSection = EngineSection()
    env: Environment = Field(default_factory=dict, repr=False)
    preflight: PreflightSection = PreflightSection()
    limits: LimitsSection = LimitsSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Values of a playbook given as flags; None leaves the playbook's own. `adopt`, `shard`: flags only."""

    model: str | None = None
    data: str | None = None
    output: str | None = None
    stale: str | None = None
    capture: str | None = None
    canary: bool | None = None
    rehearse: str | None = None
    max_samples: int | None = None
    max_seq_len: int | None = None
    data_kind: str | None = None
    format: str | None = None
    store_dtype: str | None = None
    boundaries: str | list[int] | None = None
    layer_convention: str | None = None
    shard: tuple[int, int] | None = None
    adopt: bool = False
