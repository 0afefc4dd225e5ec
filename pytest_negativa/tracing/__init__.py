"""A running process to its trace file; nothing here is imported before tracing starts."""
