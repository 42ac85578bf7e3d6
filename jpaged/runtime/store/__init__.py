"""Programs on disk: as StableHLO, and compiled."""
