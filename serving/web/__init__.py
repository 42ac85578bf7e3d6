"""HTTP itself: connections, bodies, limits, TLS, keys, logs. Knows the structs of bodies, and no route."""
