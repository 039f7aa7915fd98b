"""Weight files and packed weights."""
