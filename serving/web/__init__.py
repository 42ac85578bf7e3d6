"""HTTP itself: connections, bodies, limits, TLS, keys, logs. Imports no route."""
