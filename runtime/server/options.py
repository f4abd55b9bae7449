"""Options of the HTTP server. Imports no library of the ``serve`` extra, since the command line reads the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ServerOptions:
    """How the server accepts requests.

    Attributes:
        served_model_names: names that requests may give the model; responses use the first one. Empty: the name in the
            engine's configuration.
        api_key: the key that clients send as a bearer token; None: no key is required.
        max_body_bytes: the longest request body; a longer one is refused with 413.
        body_seconds: deadline for a request's headers, and for its body.
        drain_seconds: deadline for in-flight requests after the first SIGTERM or SIGINT.
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 * MEBIBYTE
    body_seconds: float = 30.0
    drain_seconds: float = 30.0
