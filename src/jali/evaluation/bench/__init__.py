"""Measurements: every speed beside its error, every figure beside its baselines in the same run."""
