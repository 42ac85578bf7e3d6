"""Describes an engine: statistics, histograms for /metrics, snapshots, and the log of steps."""
