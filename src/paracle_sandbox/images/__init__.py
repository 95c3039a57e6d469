"""The container images that sandboxes start from: what is in them, and how they are built."""
