"""Shows an engine: statistics, distributions for /metrics, snapshots, and the log of steps."""
