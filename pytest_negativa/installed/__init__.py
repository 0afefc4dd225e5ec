"""Installed distributions: their files, RECORD, and which of them owns a file."""
