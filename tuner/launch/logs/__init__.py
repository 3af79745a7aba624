"""Launchers' logs: step times, memory, what went wrong."""
