"""Summaries to rows, and rows to what people and programs read."""
