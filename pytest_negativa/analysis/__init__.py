"""Composes reading, locating and planning over all libraries of a run."""
