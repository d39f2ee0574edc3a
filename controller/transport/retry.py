"""Trying again to connect, where that can help: both transports do it alike."""

from __future__ import annotations

import time

import tenacity

from controller.core.errors import ConnectionFailed
from controller.transport.deadline import Deadline

ATTEMPTS = 4


def attempts(deadline: Deadline) -> tenacity.Retrying:
    """Return a caller of functions that calls again, with jitter, up to ATTEMPTS times and never after `deadline`.

    Only a plain ConnectionFailed is tried again: never a host key, an authentication, a name that is unknown.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: _may_pass(error) and not deadline.expired),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.3, max=3.0),
        sleep=lambda seconds: time.sleep(min(seconds, deadline.remaining())),
        reraise=True,
    )


def _may_pass(error: BaseException) -> bool:
    return type(error) is ConnectionFailed and error.code == ConnectionFailed.code
