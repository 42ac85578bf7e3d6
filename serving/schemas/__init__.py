"""Bodies and answers of all APIs as structs, and the reading of one: by its type, with unknown fields."""
