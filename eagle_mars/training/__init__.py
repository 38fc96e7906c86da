"""Making a draft head: text from the target itself, training-time test, export in EAGLE-3's format."""
