"""What is known to go wrong with vLLM, as data: evidence, cause, remedy.

Entries are tried in this order, so the particular comes before the general. To add a cause, add an entry to the
module of its kind, and to `tests/core/test_triage_catalogue.py` what it must match and what it must not.
"""

from __future__ import annotations

from controller.core import triage_gpu, triage_host, triage_model

CATALOGUE = (*triage_gpu.ENTRIES, *triage_model.ENTRIES, *triage_host.ENTRIES)
