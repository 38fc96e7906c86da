"""MARS inside serving engines: their own verifiers stay, the rows that they read are rewritten just before.

Nothing of an engine is imported before the engine calls its plugin.
"""
