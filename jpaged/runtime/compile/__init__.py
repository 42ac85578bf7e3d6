"""From a configuration to compiled programs: the blueprint, the fitted build, and compiling in the background."""
