"""Python that remembers: an interpreter kept in a sandbox, cell after cell."""
