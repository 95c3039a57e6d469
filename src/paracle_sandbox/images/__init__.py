"""Describes and builds the container images that sandboxes start from."""
