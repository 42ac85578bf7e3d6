"""The transformer and its families. Imported as `jpaged.models`."""
