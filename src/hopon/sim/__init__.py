"""The simulator: the engine's own scheduler on a virtual clock, with a device that only takes time."""
