"""The names of backends: the one list that the settings, the options and the registry follow.

Names map to dotted paths, so that choosing one backend never imports another. Other distributions
add backends with entry points of the group ``paracle_sandbox.backends``. Those are read only when
a name is asked for that is not built in, or when all names are listed: reading them takes longer
than everything else here. The list lies below the settings, because one of them is such a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = {
    "native": "paracle_sandbox.backends.native.backend:NativeBackend",
    "docker": "paracle_sandbox.backends.docker.backend:DockerBackend",
    "gvisor": "paracle_sandbox.backends.docker.gvisor:GvisorBackend",
    "incus": "paracle_sandbox.backends.incus.backend:IncusBackend",
    "incus-vm": "paracle_sandbox.backends.incus.vm:IncusMachineBackend",
    "remote": "paracle_sandbox.backends.remote.backend:RemoteBackend",
    "daytona": "paracle_sandbox.backends.daytona.backend:DaytonaBackend",
    "fake": "paracle_sandbox.testing.fake:FakeBackend",
}
# Names from before, and what they stand for now.
OLDER_NAMES = {"local": "docker"}
# All names that need no other distribution.
MODES = ("auto", *BACKENDS, *OLDER_NAMES)
GROUP = "paracle_sandbox.backends"


class OutsideBackend(NamedTuple):
    """A backend that another distribution offers; ``source`` is its name and version."""

    name: str
    source: str
    point: EntryPoint


def known_names() -> list[str]:
    """All names that may be asked for, those of other distributions last."""
    return [*MODES, *outside_backends()]


def is_known(name: str) -> bool:
    return name in MODES or name in outside_backends()


def is_for_the_user_alone(name: str) -> bool:
    """Whether a configuration file, which may be another person's, must not choose this backend:
    what isolates nothing, and code of another distribution."""
    return name == "fake" or (name not in MODES and name in outside_backends())


def outside_backends() -> dict[str, list[OutsideBackend]]:
    """The backends of other distributions by name, sorted. More than one of a name means that
    several distributions claim it. A built-in name stays ours: a distribution that claims one is
    warned of, and so is one whose entry points cannot be read."""
    import logging
    from importlib.metadata import distributions

    logger = logging.getLogger(__name__)

    found: dict[tuple[str, str], OutsideBackend] = {}
    for dist in distributions():
        # One by one: reading all at once fails for all if one of them cannot be read.
        source = "a distribution without a name"
        try:
            if GROUP not in (dist.read_text("entry_points.txt") or ""):
                continue
            source = f"{dist.name} {dist.version}"
            points = [(point.name, point) for point in dist.entry_points.select(group=GROUP)]
        except Exception as error:  # noqa: BLE001  whatever its files make of the standard library
            logger.warning("The backends of %s cannot be read: %s", source, error)
            continue
        for name, point in points:
            if name in MODES:
                logger.warning("%s brings a backend %r, which is built in: not used.", source, name)
            else:  # the first of a distribution that is on the path twice is the one that counts
                found.setdefault((name, dist.name), OutsideBackend(name, source, point))
    by_name: dict[str, list[OutsideBackend]] = {}
    for (name, _), backend in sorted(found.items(), key=lambda item: item[0]):
        by_name.setdefault(name, []).append(backend)
    return by_name
