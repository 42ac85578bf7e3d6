"""The way to compiled programs: from a configuration to a fitted build, and the ones that are compiled later."""
