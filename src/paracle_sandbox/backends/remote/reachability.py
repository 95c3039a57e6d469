"""Whether the configured service can be used. It needs nothing installed: the remote backend and
its client library are imported only when the backend is taken."""

from __future__ import annotations

import time

from ...settings import Settings

_PROBE_SECONDS = 3.0
_ANSWER_SECONDS = 5.0  # for the whole answer
_MAX_INFO = 64 << 10


def service_problem(settings: Settings, seconds: float = _ANSWER_SECONDS) -> str | None:
    """Why the configured service cannot be used; None when it can. Takes at most ``seconds``."""
    import threading

    address = f"{(settings.api_url or '').rstrip('/')}/info"
    if not address.startswith(("http://", "https://")):
        return "its address is not http or https"
    deadline = time.monotonic() + seconds
    found: list[str | None] = []
    # In a thread, which is left behind if need be: neither looking up a name nor the head of an
    # answer, which may come byte by byte, can be given a time in which to end.
    asking = threading.Thread(
        target=lambda: found.append(_ask(address, settings.api_key or "", deadline)), daemon=True
    )
    asking.start()
    asking.join(seconds)
    return found[0] if found else f"it did not answer within {seconds:g} seconds"


def _ask(address: str, key: str, deadline: float) -> str | None:
    import http.client
    import urllib.error
    import urllib.request

    from .answers import from_json
    from .info import info_problem

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """The key is for this address only. The remote backend follows no redirect, either."""

        def redirect_request(self, *_: object) -> None:
            return None

    body = b""
    try:
        request = urllib.request.Request(address, headers={"X-API-Key": key})  # noqa: S310  checked
        opener = urllib.request.build_opener(NoRedirects)
        with opener.open(request, timeout=_PROBE_SECONDS) as answer:
            while len(body) <= _MAX_INFO and (piece := answer.read1(_MAX_INFO)):
                body += piece
                if time.monotonic() > deadline:
                    return "its answer did not end in time"
    except urllib.error.HTTPError as error:
        with error:
            return "it refuses the key" if error.code == 401 else f"it answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"it cannot be reached: {error}"
    try:
        return info_problem(from_json(body) if len(body) <= _MAX_INFO else None)
    except ValueError:
        return info_problem(None)
