"""The parts that a batching system is made of: order, admission, composition, eviction; and presets made of them."""
