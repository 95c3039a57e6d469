"""The budget, measured: ours beside the alternatives, in one run. Start with ``make bench``."""
