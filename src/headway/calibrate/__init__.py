"""Calibration: from an engine's step log to the profile an estimator reads."""
