"""The texts behind `ctl help TOPIC`: what belongs to no single verb."""

from __future__ import annotations

TOPICS: dict[str, str] = {
    "exit-codes": """\
Exit codes

    0    ok
    1    unexpected: a defect of ctl, a command of its own that failed on the host, or a stop that left something
    2    usage or configuration, a Python or workdir in hosts.toml that the host cannot go by among it
    3    refused: preflight, a lease held by somebody else, a local folder that cannot be written, or
         anything that is no longer what was shown
    4    cannot connect, or the host's key or ours was not accepted
    8    detached: the run goes on
    9    unknown: the launch could be neither confirmed nor denied
    100  the job failed
    103  the job was stopped
    130  interrupted before anything was launched

0 to 9 speak of ctl, 100 and more of the job. --detach ends with 8, as Ctrl-C
does: 0 says that the job has succeeded, and that is not known yet.
""",
    "environment": """\
Environment

    CTL_HOST       the host, when no --host is given
    CTL_PLAYBOOK   the playbook, when no --playbook is given
    CTL_RUNS_DIR   where run folders are kept (default: ctl-runs beside the nearest hosts.toml
                   of a project, here or above; else in the current folder)
    CTL_CONFIG     the project's hosts.toml, instead of the nearest one upwards
    NO_COLOR       plain lines instead of the dashboard, as with CI and TERM=dumb
    XDG_CONFIG_HOME/ctl/hosts.toml, XDG_CONFIG_HOME/ctl/playbooks    your own hosts and playbooks
    XDG_STATE_HOME/ctl/history.jsonl                                 every run launched from here
    XDG_STATE_HOME/ctl/defects/                                      tracebacks of errors that are ctl's own

A flag beats the environment, the environment the project's file, that your own, and that the shipped one:
`ctl config show` prints the origin of every value.

In the job, ctl sets CTL_RUN_ID, CTL_RUN_DIR, CTL_HOST, SPT_NOENV, PYTHONUNBUFFERED, VLLM_PROCESS_NAME_PREFIX and
puts its payload first in PYTHONPATH.
""",
    "json": """\
JSON

--json prints exactly one document on stdout; progress stays on stderr. Every document has `schema_version`.
An error is a document too: {"schema_version": 1, "error": {"code", "what", "why", "fix", "data"?}}, with the same
exit code as without --json. `--progress json` prints every event as a line on stderr.

docs/json.md lists the fields of every verb. `extract`, `run`, `attach` and `summary` print the run's summary:

    kind, run_id, state, end_reason, hosts      what it was and how it ended
    gpus_clean                                  true, false or "unknown": measured after the end
    problems [{code, what, fix, traceback?}]    empty for a success
    timings {push_s, preflight_s, load_s, ...}  seconds
    versions                                    of Python, torch, vLLM on the host
    gpu_hours, cost {price_per_gpu_hour, total} null where not known
    samples {expected, written, skipped, failed, missing}, tokens, bytes, tokens_per_s, bytes_per_s
    boundaries, states [{boundary, norm_mean, norm_max, nan, inf, zero_rows}], shape {hidden, states, dtype}
    format, model, num_layers                   extraction only, like the two lines above
    survey {files, bytes, records, groups, nan, damaged, unread}   of commands with outputs

Every other verb that looks or acts has a document of its own.
""",
    "run": """\
Commands

    ctl run --host H -- python train.py --epochs 3    a one-off; the words after `--` are passed on as they are
    ctl run --host H --tracebacks -- python train.py  with whole tracebacks of every Python process
    ctl run train --host H                            the command playbook playbooks/train.toml
    ctl run train --host H -- --epochs 5              the words follow the playbook's own
    ctl run train --host H --dry-run                  what would be uploaded, run, deleted
    ctl stacks --last                                 what each Python process is doing now
    ctl summary --last                                what it wrote: shapes, dtypes, counts, NaN

A playbook has `kind = "command"` and `argv`, and may have uploads, container, env, secrets, outputs, progress,
preflight, limits, success and summary; docs/playbooks-command.md shows each.
""",
    "runs": """\
Which run is meant

    ctl summary 20261130-081832-dbde0b    a run by its id
    ctl summary dbde0b                    by a part that only it has
    ctl attach dbde0b --host gpu1         one launched elsewhere, by asking gpu1
    ctl summary --last                    the one launched last from this folder
    ctl convert --last --to specforge     the last extraction

A run that is not known here is asked for at no host but the one that --host
names; an id that is like a known one is answered with that.

`--last`, also the default, is the run that was launched last from this folder,
of whatever kind: a rehearsal, a conversion and a command count. One that was
refused does not, nor one of another project. `convert` takes the last
extraction, because nothing else has samples. `summary` and `report` name the
last extraction too, where the run is a rehearsal or a conversion. `stop --last`
stops that run and no other: where it has ended, runs of which no end is known
are named. `logs --last --previous` is the run before it.
""",
    "boundaries": """\
Boundaries

Boundary b is the state after b decoder layers: 0 is the embeddings, N (the number of layers) the last layer's
output before the final norm.

    tokens -> embedding -o-> layer 1 -o-> ... -o-> layer N -o-> norm -> lm_head
                         0            1       N-1           N

`boundaries = "eagle3"` means [2, N//2, N-3, N]; for Kimi-K2.5 (N = 61) that is 2, 30, 58, 61. Other systems count
differently: SpecForge, TorchSpec, AngelSlim and speculators 0.3 number a layer's output, so their id k is boundary
k + 1; vLLM and speculators from 0.5 on use the boundary itself. Every sample file says which boundaries it holds.
""",
    "hooks": """\
Hooks

`on_finish` of a host in hosts.toml (or of [defaults], or in your own file) is run on this workstation when a run has
ended: a command as a list of words, without a shell, or "notify" for a notification of the desktop.

    on_finish = ["/home/me/bin/tell-the-team", "--channel", "gpu"]

It gets the run's summary as JSON on its stdin, and CTL_RUN_ID, CTL_RUN_DIR and CTL_END_REASON in its environment. It
runs once for a run, by whoever sees the end first (`extract`, `attach`, `logs --follow`, a notebook). It has 60
seconds. Its failure is a warning, and changes neither the run nor ctl's exit code.
""",
}
