"""Programs on disk: StableHLO, and compiled programs."""
