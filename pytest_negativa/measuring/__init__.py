"""Measures runs of a program: time, memory, energy, page cache and sizes of files."""
