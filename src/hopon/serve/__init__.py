"""The text layer and the HTTP server. Importing the package imports nothing else."""
