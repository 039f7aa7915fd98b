"""The lab: a local page that shows batching step by step, and the same picture as a file."""
