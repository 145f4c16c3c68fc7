"""Estimators of time to first token: the white-box replay, and simpler ones for instances that cannot be replayed."""
