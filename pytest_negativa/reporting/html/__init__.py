"""The HTML report: one file with its own script, style and data."""
