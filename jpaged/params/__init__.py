"""Parameters of a request, and of what an engine adds to sampling. Each class checks its values when it is made."""
