"""What OpenSSH itself would do for a host, asked of OpenSSH.

Paramiko's reader of ssh_config knows no `Include` and misjudges `Match`, so `ssh -G` resolves the configuration.
Where there is no ssh binary, OpenSSH's defaults apply and no configuration file is read.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller.core.errors import ConfigError

_RESOLVE_TIMEOUT_S = 15.0
"""`ssh -G` opens no connection; only a `Match exec` of the user's own can take time."""

MAX_JUMPS = 8
"""More hops than anyone has; ends a ProxyJump that leads back to itself."""

_NOT_IN_NAMES = re.compile(r"""[\s\x00-\x1f\x7f'"`$;&<>|(){}]""")
"""ssh puts host and user into the user's own ProxyCommand and `Match exec` lines, which a shell reads; newer versions
of it refuse the same characters."""

_DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

_USUAL_NAMES = frozenset(
    f"id_{kind}" for kind in ("rsa", "dsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss", "mldsa44_ed25519")
)
"""In ~/.ssh: what OpenSSH tries, and `ssh -G` prints, where no IdentityFile is set; which of them, by its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """A host as the user names it: an address, or an alias of their ssh configuration.

    `port` and `user`, and an address given as numbers, win over the ssh configuration.
    """

    host: str
    port: int | None = None
    user: str | None = None
    ssh_config: str | None = None  # path for `ssh -F`; None: the user's and the system's own files


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """One hop, resolved."""

    alias: str
    address: str
    port: int
    user: str
    host_key_name: str  # the name under which known_hosts files list it, without a port
    host_key_alias: bool  # it is a HostKeyAlias, which is listed without a port whatever the port
    user_known_hosts: tuple[str, ...]
    global_known_hosts: tuple[str, ...]
    hash_known_hosts: bool
    may_ask: bool  # False under `StrictHostKeyChecking yes`
    identity_files: tuple[str, ...]
    identities_only: bool
    agent: str | None  # path of the agent's socket
    proxy_jump: tuple[str, ...]
    proxy_command: str | None
    target: SshTarget  # as asked for
    options: Mapping[str, Sequence[str]]  # everything that `ssh -G` prints, by lower-case name; empty without ssh

    @property
    def label(self) -> str:
        """`alias (address:port)`, or the shorter form where they are the same."""
        where = f"{self.address}:{self.port}"
        return where if self.alias == self.address else f"{self.alias} ({where})"

    @property
    def config_name(self) -> str:
        """The configuration that was read, for people."""
        return self.target.ssh_config or "your ssh config"

    @property
    def names_identities(self) -> bool:
        """Whether the configuration names key files; else they are OpenSSH's usual ones, of which most are absent."""
        home = Path.home() / ".ssh"
        usual = [name for name in map(Path, self.identity_files) if name.parent == home and name.name in _USUAL_NAMES]
        return len(usual) < max(len(self.identity_files), len(_DEFAULT_IDENTITIES))

    def by_hand(self, *words: str, program: str = "ssh") -> str:
        """Return the command line with which a person does the same: this configuration, port, user and alias."""
        return by_hand(replace(self.target, port=self.port, user=self.user), *words, program=program)


def by_hand(target: SshTarget, *words: str, program: str = "ssh") -> str:
    """Return a line for a shell that runs `ssh` (or `ssh-copy-id`) for a target as ctl does, with `words` after it.

    The alias is what it goes to, not the address: only so the configuration's lines for it hold.
    """
    config = ["-F", os.path.expanduser(target.ssh_config)] if target.ssh_config is not None else []
    port = ["-p", str(target.port)] if target.port is not None else []
    who = f"{target.user}@{target.host}" if target.user is not None else target.host
    return shlex.join([program, *config, *port, who, *words])


def resolve(target: SshTarget) -> SshSettings:
    """Return the settings for one host.

    Raises ConfigError if the name is none, or ssh cannot read its configuration.
    """
    if not target.host or target.host.startswith("-") or _NOT_IN_NAMES.search(target.host):
        raise ConfigError(
            f"not a host name: {target.host!r}",
            fix="give a name of hosts.toml, an address, or an alias of your ssh configuration",
        )
    if target.user is not None and (target.user.startswith("-") or _NOT_IN_NAMES.search(target.user)):
        raise ConfigError(f"not a user name: {target.user!r}", fix="correct `user` in hosts.toml")
    binary = shutil.which("ssh")
    if binary is not None:
        options = _ssh_g(binary, target)
    elif target.ssh_config is None:
        options = {}
    else:
        raise ConfigError(
            f"cannot read {target.ssh_config}: there is no `ssh` program here to resolve it",
            fix="install the OpenSSH client, or remove `ssh_config` from hosts.toml",
        )
    return _settings(target, options)


def resolve_chain(target: SshTarget) -> list[SshSettings]:
    """Return every hop on the way to `target`, itself last, as OpenSSH's ProxyJump would go.

    Raises ConfigError, also for jumps that lead back to themselves.
    """
    chain = [resolve(target)]
    while chain[0].proxy_jump:
        if len(chain) > MAX_JUMPS:
            raise ConfigError(
                f"more than {MAX_JUMPS} jump hosts lead to {target.host}",
                why=" <- ".join(hop.alias for hop in chain),
                fix="check ProxyJump in your ssh configuration: a host must not be its own jump host",
            )
        hops = [resolve(_jump_target(text, target.ssh_config)) for text in chain[0].proxy_jump]
        # As in OpenSSH, only the first jump's own ProxyJump counts; the list is the way to the others.
        chain = hops + chain
    return chain


def _jump_target(text: str, ssh_config: str | None) -> SshTarget:
    """Parse `[ssh://][user@]host[:port]`, with IPv6 addresses in brackets."""
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d+))?/?", text
    )
    if match is None:
        raise ConfigError(f"not a jump host: {text!r}", fix="write ProxyJump as [user@]host[:port][,...]")
    return SshTarget(
        host=match["v6"] or match["host"],
        port=int(match["port"]) if match["port"] else None,
        user=match["user"],
        ssh_config=ssh_config,
    )


def target_arguments(target: SshTarget) -> list[str]:
    """Return the arguments with which `ssh` means this target, the host's name last."""
    arguments: list[str] = []
    if target.ssh_config is not None:
        arguments += ["-F", os.path.expanduser(target.ssh_config)]
    if target.port is not None:
        arguments += ["-p", str(target.port)]
    if target.user is not None:
        arguments += ["-l", target.user]
    return [*arguments, "--", target.host]


def _ssh_g(binary: str, target: SshTarget) -> dict[str, list[str]]:
    command = [binary, "-G", *target_arguments(target)]
    shown = " ".join(command[1:])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`ssh {shown}` did not answer within {_RESOLVE_TIMEOUT_S:g} s",
            fix="check the `Match exec` commands in your ssh configuration",
        ) from None
    if done.returncode != 0:
        raise ConfigError(
            f"ssh cannot resolve its configuration for {target.host}",
            why=done.stderr.decode(errors="replace").strip(),
            fix=f"correct the file, then check it with `ssh {shown}`",
        )
    options: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _settings(target: SshTarget, options: Mapping[str, Sequence[str]]) -> SshSettings:
    def one(key: str, default: str = "") -> str:
        return options.get(key, (default,))[0]

    def optional(key: str) -> str | None:
        value = one(key, "none")
        return None if value in ("", "none") else value

    address = target.host if _is_address(target.host) else one("hostname", target.host)
    port = target.port or int(one("port", "22"))
    user = target.user or one("user") or getpass.getuser()

    def expand(text: str) -> str:
        tokens = {"%": "%", "d": str(Path.home()), "u": getpass.getuser(), "h": address, "n": target.host}
        tokens |= {"r": user, "p": str(port)}
        return os.path.expanduser(re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), text))

    def files(key: str, default: str) -> tuple[str, ...]:
        return tuple(expand(name) for name in one(key, default).split() if name != "none")

    identities = options.get("identityfile", _DEFAULT_IDENTITIES)
    jump = optional("proxyjump")
    command = optional("proxycommand")
    return SshSettings(
        alias=target.host,
        address=address,
        port=port,
        user=user,
        host_key_name=(optional("hostkeyalias") or address).lower(),
        host_key_alias=optional("hostkeyalias") is not None,
        user_known_hosts=files("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"),
        global_known_hosts=files("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
        hash_known_hosts=one("hashknownhosts") == "yes",
        may_ask=one("stricthostkeychecking", "ask") not in ("yes", "true"),
        identity_files=tuple(expand(name) for name in identities if name != "none"),
        identities_only=one("identitiesonly") == "yes",
        agent=_agent_path(one("identityagent", "SSH_AUTH_SOCK"), expand),
        proxy_jump=tuple(part.strip() for part in jump.split(",")) if jump else (),
        proxy_command=expand(command) if command else None,
        target=target,
        options=options,
    )


def _agent_path(option: str, expand: Callable[[str], str]) -> str | None:
    if option == "none":
        return None
    if option in ("", "SSH_AUTH_SOCK"):
        return os.environ.get("SSH_AUTH_SOCK")
    if option.startswith("$"):
        return os.environ.get(option[1:].strip("{}"))
    return expand(option)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
