"""The fixtures are in a module of another name: there are several files called conftest."""

import sys
from pathlib import Path

for folder in ("hostile", "docs"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))

from container_fixtures import *  # noqa: E402, F403
from hostile_fixtures import fake, lying, weak  # noqa: E402, F401
