"""The parts of a step: packed inputs, the forward pass, the output programs, and block moves."""
