"""An engine in a process of its own, and front ends in others: tokenising, text, JSON and HTTP.

1. `host` runs in the engine's process. It adds the requests of all front ends, and sends each one a message a step.
2. `remote_engine` runs in a front end. It has the interface of `AsyncLLM` that the server uses.
3. `texts` turns tokens into text there, and finds stop strings.
4. `messages` are what crosses: token ids, numbers and small structs. `channel` carries them over a pair of sockets.

A pair of Unix sockets, and not ZeroMQ: both sides notice within a millisecond that the other process is gone. ZeroMQ
hides that. A pair has no path in the file system, which could exist already, or which another user could open.
"""
