"""Kinds of isolation. ``base`` is the seam, ``registry`` knows them by name."""
