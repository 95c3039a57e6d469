"""The fixtures are in a module of another name: there are several files called conftest."""

import sys
from pathlib import Path

for folder in ("hostile", "conformance"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))

from hostile_fixtures import fake, lying, weak  # noqa: E402, F401
from incus_fixtures import *  # noqa: E402, F403
