"""The one tree of errors.

    TesseraError
    ├── RecoverableError         the kubelet's retry, or our own, may succeed; the process lives
    │   ├── ClaimError           this claim can't be prepared as it is; others are unaffected
    │   ├── HardwareError        NVML, sysfs or a device node answered with an error
    │   ├── ApiError             the API server refused, or could not be reached
    │   ├── StateError           stored state can't be read or written
    │   ├── MpsError             the node's MPS daemon pod does not answer, or an MPS control daemon fails
    │   └── CelError             a CEL expression that can't be evaluated
    └── FatalError               the process ends with ``exit_code`` and this message
        ├── UsageError           exit code 2: invalid options or input
        └── EnvironmentFault     exit code 3: the machine lacks something
            └── DriverMissing    NVML can't be used (yet); the node plugin waits for it

A message names the field or object, what was found and what would have been accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

SHOWN_FAULTS = 10
"""Most invalid fields that one message names."""

FORBIDDEN, NOT_FOUND, CONFLICT, INVALID = 403, 404, 409, 422
"""Expected statuses of an ApiError: not permitted; missing; existing already, or changed meanwhile; not valid."""

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


class TesseraError(Exception):
    """Root of everything Tessera raises on purpose."""


class RecoverableError(TesseraError):
    """The operation failed; the process goes on and the operation may be tried again."""


class ClaimError(RecoverableError):
    """A ResourceClaim can't be prepared as it is: unknown, not allocated, or asking for nonsense."""


class HardwareError(RecoverableError):
    """The GPU, its library or the kernel's view of it answered with an error.

    ``code`` is NVML's return code (``NVML_ERROR_*``), or None where NVML was not involved.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ApiError(RecoverableError):
    """The API server refused a request or could not be reached.

    ``status`` is the HTTP status, or None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later: no answer came, or the API server is overloaded or failed."""
        return self.status is None or self.status == TOO_MANY_REQUESTS or self.status >= SERVER_ERROR


@contextmanager
def accepted_status(*statuses: int) -> Iterator[None]:
    """A block that an ApiError of one of these statuses ends without being raised, like ``contextlib.suppress``."""
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise


class StateError(RecoverableError):
    """Stored state (checkpoint, CDI spec, a plan's status) can't be read or written."""


class MpsError(RecoverableError):
    """The pod of the node's MPS daemons does not answer, or a control daemon fails: no fault of a GPU or the node."""


class CelError(RecoverableError):
    """A CEL expression is refused: its syntax, a name, a type, or something that Tessera can't evaluate.

    Recoverable, because users write expressions into claims and classes: the object is reported, the rest goes on.
    ``position`` counts characters from 0; None: the whole expression.
    """

    def __init__(self, message: str, expression: str = "", position: int | None = None) -> None:
        super().__init__(message)
        self.expression = expression
        self.position = position


class FatalError(TesseraError):
    """The process can't go on."""

    exit_code = 1


class UsageError(FatalError):
    """The options or input are invalid; the message says what is valid."""

    exit_code = 2


class EnvironmentFault(FatalError):
    """The machine lacks what the process needs (library, permission, directory)."""

    exit_code = 3


class DriverMissing(EnvironmentFault):
    """The NVIDIA driver is not installed or not loaded, or NVML refuses to start; ``reason`` says why, in short."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def invalid_fields(place: str, error: ValidationError) -> UsageError:
    """The error about input that pydantic has refused; for each field it has the value and what is wrong."""
    return UsageError("; ".join(f"{place}: {_described(fault)}" for fault in error.errors()[:SHOWN_FAULTS]))


def _described(fault: ErrorDetails) -> str:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).removeprefix(".")
    value = "" if isinstance(fault["input"], dict | list) else f" (found {fault['input']!r:.60})"
    return f"{field or 'the whole'}: {fault['msg']}{value}"
