"""Import the fixtures from a module with another name, because there are several files called
conftest."""

from hostile_fixtures import *  # noqa: F403
