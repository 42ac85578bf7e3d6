"""Import paths of vLLM's command line programs."""
