"""How an engine shares its GPU beside time-slicing: MPS, limits by the driver."""
