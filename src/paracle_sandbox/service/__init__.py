"""The sandbox service: a sandbox for each user, over HTTP. Start it with ``paracle serve``."""
