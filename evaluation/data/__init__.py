"""Questions: from a file, from a dataset of the hub, and the project's own small sets (README.md beside this)."""
