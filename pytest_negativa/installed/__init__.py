"""Installed distributions: their libraries, their RECORD, and the owner of a file."""
