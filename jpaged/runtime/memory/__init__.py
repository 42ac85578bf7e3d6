"""Memory: the plan of a device's memory, advice when it is full, and weights of a sleeping engine on the host."""
