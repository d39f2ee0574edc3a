"""Checks of the trial: a context, a product and an all-reduce, and whether PyTorch is built for these GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.core.checks_health import describe_links
from controller.core.finding import Finding, failed, passed, section, some, warned
from remote_payload.host.protocol import Accelerator, Plan

STEPS = ("import", "context", "matmul", "group", "all-reduce")
STDERR_SHOWN = 300


def check_functional(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge where the ranks of the trial ended, the earliest step first: one rank's error makes the others wait."""
    yield from _check_built(report, plan)
    found = section(report, "functional")
    if found is None:
        return
    if found.get("skipped"):
        yield warned(
            "trial-skipped",
            "the GPUs were not tried" if _cuda(plan) else "the ranks' exchange was not tried",
            why=found["skipped"],
            fix="run preflight again when that has changed; the other checks do not prove that "
            + ("a GPU computes" if _cuda(plan) else "the ranks reach each other"),
        )
        return
    bad = [rank for rank in found["ranks"] if rank["at"]]
    if bad:
        yield _problem(bad, found, report, plan)
        return
    yield from _check_kernels(found)
    first = found["ranks"][0]
    built = f", CUDA {first['cuda']}" if first["cuda"] else ""
    where = f"{len(found['ranks'])} GPUs" if found["device"] == "cuda" else f"{len(found['ranks'])} processes"
    yield passed(
        "trial", f"product and all-reduce on {where} in {found['seconds']:.1f} s: torch {first['torch']}{built}"
    )


def _problem(
    bad: Sequence[Mapping[str, Any]], found: Mapping[str, Any], report: Mapping[str, Any], plan: Plan
) -> Finding:
    # An error says more than a rank that waits for the one that had it.
    worst = min(bad, key=lambda rank: (not rank["error"], STEPS.index(rank["at"])))
    same = [rank for rank in bad if rank["at"] == worst["at"] and bool(rank["error"]) == bool(worst["error"])]
    who = f"rank {some([str(rank['rank']) for rank in same], 8)}"
    step = worst["at"]
    if worst["error"]:
        what, why = f"{who} failed in the step `{step}`", worst["error"]
    else:
        what = f"{who} hung in the step `{step}`"
        why = f"nothing came of it within {found['seconds']:.0f} s"
    tail = [line for line in worst["stderr"].splitlines() if line.strip()][-1:]
    if tail and tail[0] not in why:
        why += f"; {tail[0][:STDERR_SHOWN]}"
    if step in ("group", "all-reduce"):
        return _collective(what, why, report, plan)
    if step == "import":
        python = plan["host"]["python"]
        judge = failed if worst["error"] else warned  # slow is not broken: a cold network disk takes its time once
        return judge("torch-import", what, why=why, fix=f"on the host: `{python} -c 'import torch'`")
    if "no kernel image" in why:
        fix = "install a PyTorch that is built for these GPUs: https://pytorch.org/get-started/locally/"
        return failed("gpu-arch", what, why=why, fix=fix)
    gpus = some([str(rank["uuid"] or rank["rank"]) for rank in same], 8)
    return failed(
        "gpu-context",
        what,
        why=f"{why}; {gpus}",
        fix="on the host: `sudo fuser -v /dev/nvidia*`, then reset the GPU or reboot: 0 MiB in use is not free",
    )


def _collective(what: str, why: str, report: Mapping[str, Any], plan: Plan) -> Finding:
    if not _cuda(plan):
        fix = "on the host: see that processes may talk over the loopback interface: `ping -c 1 127.0.0.1`"
        return failed("gpu-collective", what, why=why, fix=fix)
    health, login = section(report, "health") or {}, section(report, "login") or {}
    links = describe_links(health.get("links"))
    facts = [why, f"links: {links}" if links else "", "an IOMMU is on" if login.get("iommu") else ""]
    if plan["job"]["env"].get("NCCL_P2P_DISABLE") == "1":
        fix = 'set `NCCL_DEBUG = "INFO"` in [env] of the playbook, run preflight again, and read what NCCL says'
    else:
        # Without NVLink the GPUs reach each other through PCIe switches, where IOMMU and ACS make peers hang.
        fix = 'set `NCCL_P2P_DISABLE = "1"` in [env] of the playbook, then preflight again; or turn ACS and IOMMU off'
    return failed("gpu-collective", what, why="; ".join(filter(None, facts)), fix=fix)


def _check_kernels(found: Mapping[str, Any]) -> Iterator[Finding]:
    """PyTorch's own product went well, so this only warns: other kernels may have come from another build."""
    for rank in found["ranks"][:1]:
        if rank["capability"] and rank["archs"] and not has_kernels(rank["capability"], rank["archs"]):
            compute = ".".join(map(str, rank["capability"]))
            yield warned(
                "gpu-arch",
                f"torch {rank['torch']} has no kernels for compute capability {compute}",
                why=f"it is built for {some(rank['archs'], 12)}",
                fix="install a PyTorch that is built for these GPUs: https://pytorch.org/get-started/locally/",
            )


def has_kernels(capability: Sequence[int], archs: Sequence[str]) -> bool:
    """Tell whether code for `archs` (torch.cuda.get_arch_list) runs on a GPU.

    CUDA's rule: machine code `sm_XY` runs within its major version from minor Y on, `sm_XYa` on XY alone, and PTX
    (`compute_XY`) on everything later.
    """
    major, minor = capability[0], capability[1]
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        built = int(match.group(2)), int(match.group(3))
        if match.group(1) == "compute" and built <= (major, minor) and not match.group(4):
            return True
        exact = match.group(4) == "a"
        if built[0] == major and (built[1] == minor if exact else built[1] <= minor):
            return True
    return False


def _check_built(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    environment, health = section(report, "environment"), section(report, "health")
    if not _cuda(plan) or environment is None or plan["extract"] is None:
        return
    built, newest = environment.get("torch_cuda"), (health or {}).get("cuda")
    if environment["packages"].get("torch") and built is None and not environment.get("torch_hip"):
        yield failed(
            "torch-cpu",
            f"torch {environment['packages']['torch']} is built without CUDA",
            why=f"it is what {plan['host']['python']} imports",
            fix="install the CUDA build: https://pytorch.org/get-started/locally/",
        )
    elif built and newest and int(built.partition(".")[0]) > int(newest.partition(".")[0]):
        yield failed(
            "cuda-driver",
            f"torch is built for CUDA {built}, the driver runs CUDA up to {newest}",
            why="a driver runs programs of its own major version and older ones",
            fix="update the driver, or install vLLM and torch built for the older CUDA",
        )


def _cuda(plan: Plan) -> bool:
    return plan["host"]["accelerator"] == Accelerator.CUDA
