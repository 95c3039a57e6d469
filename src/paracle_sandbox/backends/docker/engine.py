"""The engine's API, as far as we use it: one call a method, each with its own deadline.

What goes wrong becomes one of two errors here, and the client library is named nowhere else:
DockerConnectionError when the engine cannot be spoken to, EngineRefused when it said no. An
engine that let one call run into its deadline is asked for a sign of life before the next call,
so that a hanging engine costs two seconds a call and not a minute.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ...errors import BackendUnavailableError, DockerConnectionError
from ...settings import Settings
from .attach_channel import AttachChannel, read_with_ours
from .endpoint import INSTALL, LOOK, Endpoint, explain, find_endpoint, unavailable

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

QUESTION_SECONDS = 20.0
WORK_SECONDS = 60.0
PULL_SECONDS = 1800.0
_CONNECT_SECONDS = 5.0
_SIGN_OF_LIFE_SECONDS = 2.0
_PATIENCE, _PAUSE_SECONDS = 100, 0.01
# What Podman says of a container that was to be killed and has ended just then.
_ENDED_MEANWHILE = "state improper"
_REMOVALS, _REMOVAL_PAUSE_SECONDS = 5, 0.1
_SHOWN = 1000
_CANNOT_CONNECT = 900  # the library's own number

Json = dict[str, Any]


class EngineRefused(BackendUnavailableError):
    """The engine answered, and the answer is no. Whoever knows what was asked says it better."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """A client of one engine. It may be used from one event loop after another."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._client: Docker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._endpoint: Endpoint | None = None
        self._doubtful = False
        self._calls = 0
        self.question_seconds = QUESTION_SECONDS
        self.is_podman = False  # known after the first answer

    @property
    def endpoint(self) -> Endpoint:
        """Raises DockerConnectionError when there is none."""
        if self._endpoint is None:
            self._endpoint = find_endpoint(self.settings)
        return self._endpoint

    def client(self) -> Docker:
        """The library's client, for the event loop that runs now."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = _open(self.endpoint), loop
        return self._client

    def container(self, reference: str) -> DockerContainer:
        return self.client().containers.container(reference)

    async def close(self) -> None:
        """Not under a call that is about to end: its caller may be cleaning up."""
        for _ in range(_PATIENCE):
            if not self._calls:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()
            await asyncio.sleep(0)  # the loop lets go of the connections in its next turn

    # Questions

    async def info(self) -> Json:
        return cast(Json, await self._call("GET", "info"))

    async def version(self) -> Json:
        return cast(Json, await self._call("GET", "version", seconds=_CONNECT_SECONDS))

    async def inspect(self, reference: str) -> Json:
        return cast(Json, await self._call("GET", f"containers/{reference}/json"))

    async def containers(self, *labels: str) -> list[Json]:
        """Those that have all the labels, also if they do not run."""
        params = {"all": "1", "filters": json.dumps({"label": labels})}
        return cast("list[Json]", await self._call("GET", "containers/json", params))

    async def stats(self, reference: str) -> Json:
        """One sample. ``one-shot`` spares the second that the engine would wait for another."""
        params = {"stream": "0", "one-shot": "1"}
        return cast(Json, await self._call("GET", f"containers/{reference}/stats", params))

    async def has_image(self, image: str) -> bool:
        return await self.image(image) is not None

    async def image(self, image: str) -> Json | None:
        """What the engine knows of it; None when there is no such image."""
        try:
            return cast(Json, await self._call("GET", f"images/{image}/json"))
        except EngineRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def archive(self, reference: str, path: str, most_bytes: int) -> list[bytes]:
        """A tar of what a container has there, not much more than ``most_bytes`` of it; empty
        when there is nothing. In pieces: to join so much would hold up the event loop."""
        pieces: list[bytes] = []
        size = 0
        try:
            async with self._asking(WORK_SECONDS) as client:
                query = client._query(
                    f"containers/{reference}/archive",
                    params={"path": path},
                    # Unpacking what compresses well would hold up the event loop, too.
                    headers={"Accept-Encoding": "identity"},
                )
                async with query as response, response:
                    async for piece in response.content.iter_any():
                        pieces.append(piece)
                        size += len(piece)
                        if size > most_bytes:
                            response.close()
                            break
        except EngineRefused as refused:
            if refused.status != 404:
                raise
        return pieces

    # Work

    async def create(self, name: str, body: Json) -> str:
        """The id of a new container. Refused with 404 when there is no such image, with 409 when
        the name is taken."""
        answer = await self._call("POST", "containers/create", {"name": name}, body, WORK_SECONDS)
        return str(answer["Id"])

    async def attach(self, reference: str) -> AttachChannel:
        query = {"stdin": "1", "stdout": "1", "stderr": "1", "stream": "1"}
        return await self._hijack(f"containers/{reference}/attach", query)

    async def execute(self, reference: str, body: Json) -> AttachChannel:
        """A further program in a container, attached."""
        made = await self._call("POST", f"containers/{reference}/exec", None, body)
        start = json.dumps({"Detach": False, "Tty": False}).encode()
        return await self._hijack(f"exec/{made['Id']}/start", {}, start)

    async def _hijack(
        self, path: str, query: Mapping[str, str], body: bytes | None = None
    ) -> AttachChannel:
        from aiodocker.stream import Stream
        from yarl import URL

        async def setup() -> tuple[URL, bytes | None, bool]:
            return URL(path).with_query(query), body, False

        async with self._asking(self.question_seconds) as client:
            stream = Stream(client, setup)
            await stream._init()
            read_with_ours(stream)
        return AttachChannel(stream)

    async def start(self, reference: str) -> None:
        await self._call("POST", f"containers/{reference}/start", seconds=WORK_SECONDS)

    async def remove(self, reference: str) -> None:
        """Kill and remove it. Gone is success; it is gone when this returns."""
        for tries_left in reversed(range(_REMOVALS)):
            try:
                path = f"containers/{reference}"
                await self._call("DELETE", path, {"force": "1", "v": "1"}, seconds=WORK_SECONDS)
            except EngineRefused as refused:
                if refused.status == 409:  # the engine is at it already
                    await self._wait_until_removed(reference)
                elif _ENDED_MEANWHILE in refused.message and tries_left:
                    await asyncio.sleep(_REMOVAL_PAUSE_SECONDS)
                    continue
                elif refused.status != 404:
                    raise
            return

    async def is_removed(self, reference: str, seconds: float) -> bool:
        """Wait that long for one that is ending by itself: to kill it would take the engine
        longer, because it starts a program for that."""
        waiting = asyncio.ensure_future(self._wait_until_removed(reference))
        try:
            await asyncio.wait([waiting], timeout=seconds)
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])
        return not waiting.cancelled() and waiting.exception() is None

    async def _wait_until_removed(self, reference: str) -> None:
        try:
            params = {"condition": "removed"}
            await self._call("POST", f"containers/{reference}/wait", params, seconds=WORK_SECONDS)
        except EngineRefused as refused:
            if refused.status != 404:
                raise

    async def pull(self, image: str, tell: Callable[[Json], None]) -> None:
        """Refused when the registry cannot be reached, has no such image, or takes too long."""
        async with self._asking(QUESTION_SECONDS + PULL_SECONDS) as client:
            try:
                async with asyncio.timeout(PULL_SECONDS) as deadline:
                    async for line in client.images.pull(image, stream=True):
                        tell(line)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                # The engine passes on what the registry sends: it is not the one that is late.
                late = f"it did not come within {PULL_SECONDS:g} seconds"
                raise EngineRefused(504, late) from error

    async def tag(self, image: str, name: str) -> None:
        """Call an image by another name as well."""
        path, slash, last = name.rpartition("/")
        last, _, tag = last.partition(":")
        asked = {"repo": f"{path}{slash}{last}", "tag": tag or "latest"}
        await self._call("POST", f"images/{image}/tag", asked, None, WORK_SECONDS)

    # Networks

    async def network(self, name: str) -> Json | None:
        try:
            return cast(Json, await self._call("GET", f"networks/{name}"))
        except EngineRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def create_network(self, body: Json) -> None:
        await self._call("POST", "networks/create", None, body, WORK_SECONDS)

    async def remove_network(self, name: str) -> None:
        await self._call("DELETE", f"networks/{name}", seconds=WORK_SECONDS)

    # News

    async def events(self, filters: Mapping[str, list[str]]) -> AsyncIterator[Json]:
        """What happens from now on, until the engine goes."""
        async with self._asking(None) as client:
            params = {"filters": json.dumps(filters)}
            async with client._query("events", params=params, timeout=None) as response, response:
                async for line in response.content:
                    yield json.loads(line)

    async def _call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        seconds: float | None = None,
    ) -> Any:
        self._calls += 1
        try:
            async with self._asking(seconds or self.question_seconds) as client:
                return await _answer(client, method, path, params, body)
        finally:
            self._calls -= 1

    @asynccontextmanager
    async def _asking(self, seconds: float | None) -> AsyncIterator[Docker]:
        """One call, or a few that belong together, within ``seconds``."""
        if "aiodocker.stream" not in sys.modules:
            await asyncio.to_thread(_load_library)
        client = self.client()
        if self._doubtful:
            await self._want_sign_of_life(client)
        from aiodocker import DockerError

        try:
            async with asyncio.timeout(seconds) as deadline:
                if client.api_version == "auto":
                    version = await _answer(client, "GET", "version", versioned=False)
                    client.api_version = f"v{version['ApiVersion']}"
                    parts = version.get("Components") or ()
                    self.is_podman = any("podman" in str(part).lower() for part in parts)
                yield client
        except TimeoutError as error:
            self._doubtful = self._doubtful or deadline.expired()
            raise unavailable(
                f"{self.endpoint} did not answer within {seconds:g} seconds",
                LOOK,
            ) from error
        except DockerError as error:
            if error.status == _CANNOT_CONNECT:
                raise explain(error, self.endpoint) from error
            raise EngineRefused(error.status, str(error.message)[:_SHOWN]) from error
        except (OSError, ValueError, KeyError, TypeError, _http_error()) as error:
            # A connection that broke, or an answer that is not what the API promises.
            if isinstance(error, DockerConnectionError):
                raise
            raise explain(error, self.endpoint) from error

    async def _want_sign_of_life(self, client: Docker) -> None:
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE_SECONDS):
                await _answer(client, "GET", "version", versioned=False)
        except Exception as error:
            raise unavailable(
                f"{self.endpoint} still does not answer",
                LOOK,
            ) from error
        self._doubtful = False


@asynccontextmanager
async def opened_client(settings: Settings) -> AsyncIterator[Docker]:
    """For what is no sandbox's business. What the engine refuses is the library's own error."""
    _load_library()
    engine = Engine(settings)
    client = engine.client()
    from aiodocker import DockerError

    try:
        yield client
    except (ConnectionError, _http_error()) as error:
        raise explain(error, engine.endpoint) from error
    except DockerError as error:
        if error.status != _CANNOT_CONNECT:
            raise
        raise explain(error, engine.endpoint) from error
    finally:
        await engine.close()


async def _answer(
    client: Docker,
    method: str,
    path: str,
    params: Mapping[str, str] | None = None,
    body: Json | None = None,
    *,
    versioned: bool = True,
) -> Any:
    """The library's own reader leaves the connection open when the answer is no JSON."""
    data = None if body is None else json.dumps(body)
    query = client._query(path, method, params=params, data=data, versioned_api=versioned)
    async with query as response, response:
        content = await response.read()
        return json.loads(content) if content else None


def _load_library() -> None:
    """Takes a good part of a second the first time, which the event loop should not stand."""
    try:
        import aiodocker.stream  # noqa: F401
    except ImportError as error:
        raise unavailable(f"the aiodocker package is missing ({error})", INSTALL) from error


def _open(endpoint: Endpoint) -> Docker:
    _load_library()
    import aiodocker
    import aiohttp

    timeout = aiohttp.ClientTimeout(connect=_CONNECT_SECONDS, sock_connect=_CONNECT_SECONDS)
    try:
        client = aiodocker.Docker(url=endpoint.url, context=endpoint.context, timeout=timeout)
    except (ValueError, OSError, aiodocker.DockerError) as error:
        raise explain(error, endpoint) from error
    # Every sandbox holds a connection for as long as it lives; the library allows a hundred.
    client.connector._limit = 0
    return client


def _http_error() -> type[Exception]:
    import aiohttp

    return aiohttp.ClientError
