"""Frozen records that the stages hand to each other, a module for each stage's file."""
