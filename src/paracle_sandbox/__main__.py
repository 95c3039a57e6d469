"""``python -m paracle_sandbox`` is the command ``paracle``."""

from __future__ import annotations

from .cli.app import main

if __name__ == "__main__":
    main()
