"""Connections to clients, below the application: bounded in time and memory."""
