"""The control plane. Standard library only; see ARCHITECTURE.md."""
