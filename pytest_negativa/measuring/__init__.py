"""Measures runs of a program: time, memory, energy, page cache, sizes of files."""
