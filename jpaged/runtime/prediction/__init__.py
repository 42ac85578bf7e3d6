"""How fast compiled programs would run on a kind of device."""
