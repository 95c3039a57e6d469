"""The byte stream between host and guest, and what travels on it."""
