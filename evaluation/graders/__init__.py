"""Graders: from the text of an answer to a score. Each says what it extracts and names what it would get wrong."""
