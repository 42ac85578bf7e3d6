"""The decoder and its model families. Imported as `jpaged.models`."""
