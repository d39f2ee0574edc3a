"""A host, a playbook and the plan that is made of them."""

from __future__ import annotations

from typing import Any

from controller.core import planner
from controller.core.model import Host, Playbook
from remote_payload.host.protocol import Plan

RUN_ID = "20260102-030405-a1b2c3"
GIVEN: dict[str, Any] = {
    "run_id": RUN_ID,
    "created": "2026-01-02T03:04:05+00:00",
    "payload": "ab" * 32,
    "ctl_version": "0.1.0",
}


def host(**changes: Any) -> Host:
    return Host.model_validate(
        {
            "name": "gpu1",
            "address": "192.0.2.7",
            "user": "lab",
            "python": "/opt/vllm/bin/python",
            "workdir": "/srv/ctl",
            "output_roots": ["states", "/data", "/data/states"],
            "gpus": 8,
            **changes,
        }
    )


def playbook(**sections: Any) -> Playbook:
    return Playbook.model_validate(
        {
            "schema": 1,
            "name": "kimi",
            "origin": "kimi.toml",
            "model": {"path": "/models/Kimi-K2.5"},
            "data": {"path": "data/d.jsonl", "max_samples": 10, "max_seq_len": 100},
            "output": {"path": "/data/states/kimi"},
            **sections,
        }
    )


def plan(**sections: Any) -> Plan:
    return planner.make_plan(host(), playbook(**sections), **GIVEN)
