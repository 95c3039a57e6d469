"""The fixtures are in a module of another name: there are several files called conftest."""

from hostile_fixtures import *  # noqa: F403
