"""One page per model family: its program and its tensor names."""
