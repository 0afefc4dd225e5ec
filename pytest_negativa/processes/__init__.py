"""Starts, redirects, watches and ends programs."""
