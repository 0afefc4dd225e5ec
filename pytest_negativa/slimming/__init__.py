"""Installed libraries to smaller ones, in place: composes reading, planning and compaction."""
