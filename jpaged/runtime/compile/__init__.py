"""From a configuration to a table of compiled programs. Some are compiled after the engine has started."""
