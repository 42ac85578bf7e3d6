"""What can be seen of an engine: statistics, distributions for /metrics, snapshots, and the log of steps."""
