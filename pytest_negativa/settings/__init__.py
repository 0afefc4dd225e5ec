"""Flags, environment, ``negativa.yaml`` and defaults to ``Settings``."""
