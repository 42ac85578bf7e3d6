"""/v1/files and /v1/batches, and the files of `jpaged run-batch`."""
