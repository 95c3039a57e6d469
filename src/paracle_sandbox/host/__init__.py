"""Reads what this machine's system has and allows. Needs the standard library and our errors."""
