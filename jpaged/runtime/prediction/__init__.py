"""Predicts the run time of compiled programs on a kind of device."""
