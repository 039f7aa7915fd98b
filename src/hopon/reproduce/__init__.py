"""What is said about continuous batching, checked: a page for each group of claims."""
