"""A scenario small enough for a test, as text to be changed."""

from __future__ import annotations

SMALL = """\
name: small
num_queries: 120
seeds: [0, 1]
rates_per_s: [6, 9]
focus_rate_per_s: 9
policies:
  - {policy: bear, options: {fallback: least_work}}
  - {policy: bear, label: label only, sees: task_label}
  - shortest_queue
references: [task_label]
sweeps:
  - {of: snapshot_interval_ms, values: [0, 100]}
  - {of: delta_per_ms, values: [0, 1.0e-3]}
  - {of: lambda_per_musd, values: [1.0e-4, 5.0e-4]}
  - {of: burst_ratio, values: [1, 6]}
"""
