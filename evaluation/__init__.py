"""Measuring: what is decoded, how fast, and how well. Uses the package; the package never uses this."""
