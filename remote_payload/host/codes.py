"""Codes of notices and records that both sides read; `protocol.py` has the records themselves."""

from __future__ import annotations

PAUSES = ("disk-low", "disk-full")
"""Codes of the driver's notices that begin a pause, in which no sample is admitted; `disk-freed` ends it."""

BLANK = "blank"
"""Code of a data set's line that the job passes over, and that is no record: a sample's number does not count it."""

STOPPING = "stopping"
"""Code of the notices that say how far the end of a run's processes is."""
